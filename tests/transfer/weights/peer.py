"""A process at one end: python -m tests.transfer.weights.peer sender|receiver OPTIONS, where OPTIONS are JSON.

sender      prints its address; publishes a version for each line of its standard input, a number
receiver    reads an address from its standard input; prints each version that has come, once it has checked it,
            until VERSIONS have come, or the name of the error that ended its wait
"""

import asyncio
import base64
import json
import sys
from typing import Any

import torch

from tailrace.errors import WeightsError
from tailrace.transfer.weights.address import WeightsAddress
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender
from tests.transfer.weights.helpers import CHUNK_MIB, LIMIT_S, check, tensors


def to_line(address: WeightsAddress) -> str:
    """An address as text."""
    token = base64.b64encode(address.token).decode()
    return json.dumps({"endpoints": address.endpoints, "host": address.host, "token": token}) + "\n"


def from_line(line: str) -> WeightsAddress:
    """What `to_line` has written."""
    fields: dict[str, Any] = json.loads(line)
    return WeightsAddress(**fields | {"token": base64.b64decode(fields["token"])})


def send(*, scale: int = 1, **options: Any) -> None:
    """Be a sender."""
    with WeightSender(chunk_mib=CHUNK_MIB, **options) as sender:
        print(to_line(sender.address), end="", flush=True)
        for line in sys.stdin:
            sender.publish(int(line), tensors(int(line), scale=scale).items())


async def receive(*, versions: int, scale: int = 1, **options: Any) -> None:
    """Be a receiver."""
    address = from_line(sys.stdin.readline())
    with WeightReceiver(address, **options) as receiver:
        version = -1
        for _ in range(versions):
            version = await receiver.wait(version + 1, timeout_s=LIMIT_S)
            check(receiver, version, scale=scale)
            receiver.installed(version)
            print(version, receiver.stats().bytes_received, flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # others may still get weights from here


def main() -> None:
    torch.set_num_threads(1)
    role, options = sys.argv[1], json.loads(sys.argv[2])
    try:
        if role == "sender":
            send(**options)
        else:
            asyncio.run(receive(**options))
    except WeightsError as error:
        print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main()

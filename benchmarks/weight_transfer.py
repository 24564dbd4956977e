"""How fast new weights are where they are needed: same_host, slow_link, or both.

    same_host    one receiver in another process. Beside it, in turns, a plain copy of the same tensors into warm memory
    slow_link    four receivers behind a link that they share, by the tree and each from the sender itself; needs root

The tensors have the shapes of SmolLM2-135M, or as many bytes as the link is to carry, and random elements.
"""

import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tailrace.transfer.weights.address import LISTEN, WeightsAddress
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender

LIMIT_S = 120.0
WARM_UP = 3
"""Versions before the first that counts: both buffers are made, and mapped."""
HERE, THERE = "10.203.118.1", "10.203.118.2"

Tensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SameHost:
    """Medians, in seconds from the beginning of `publish`."""

    model_bytes: int
    wire_bytes: int
    publish_s: float
    here_s: float
    """Until the receiver has verified it all and may read it."""
    copy_s: float
    """Of the plain copy."""

    @property
    def rate_of_copy(self) -> float:
        """The rate at which the model travels, over that of a plain copy of it."""
        return self.copy_s / self.here_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """One version each way."""

    wire_bytes: int
    tree_s: float
    """Until the last of the receivers has it."""
    one_by_one_s: float
    tree_link_bytes: int
    """That have crossed the link, by the interface's count."""
    one_by_one_link_bytes: int

    @property
    def time_ratio(self) -> float:
        """Tree over one by one."""
        return self.tree_s / self.one_by_one_s

    @property
    def bytes_ratio(self) -> float:
        """What crosses the link with the tree, over the payload."""
        return self.tree_link_bytes / self.wire_bytes


def smollm2(dtype: torch.dtype) -> Tensors:
    """Random tensors with the shapes of SmolLM2-135M: 134.5M elements."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, 576), "model.norm.weight": (576,)}
    for layer in range(30):
        rows = {"q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576)}
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
        rows = {"gate": (1536, 576), "up": (1536, 576), "down": (576, 1536)}
        shapes |= {f"model.layers.{layer}.mlp.{name}_proj.weight": shape for name, shape in rows.items()}
        shapes |= {f"model.layers.{layer}.{name}_layernorm.weight": (576,) for name in ("input", "post_attention")}
    return [(name, torch.randn(shape).to(dtype)) for name, shape in shapes.items()]


def same_host(*, model: torch.dtype = torch.float32, wire: torch.dtype = torch.bfloat16, turns: int = 15) -> SameHost:
    """Publish to one receiver in a process of its own, and copy the same, in turns."""
    tensors = smollm2(model)
    warm = [torch.zeros_like(tensor) for _, tensor in tensors]
    copies, published, here = [], [], []
    with WeightSender(dtype=wire) as sender, receivers(sender, [{"name": "engine"}]) as (engine,):
        for version in range(WARM_UP + turns):
            start = time.monotonic()
            for target, (_, source) in zip(warm, tensors, strict=True):
                target.copy_(source)
            copies.append(time.monotonic() - start)
            start = time.monotonic()
            sender.publish(version, tensors)
            published.append(time.monotonic() - start)
            here.append(engine.came() - start)
            asyncio.run(sender.installed(version, timeout_s=LIMIT_S))
        wire_bytes = sender.stats().nbytes
    return SameHost(
        model_bytes=sum(tensor.nbytes for _, tensor in tensors),
        wire_bytes=wire_bytes,
        publish_s=statistics.median(published[WARM_UP:]),
        here_s=statistics.median(here[WARM_UP:]),
        copy_s=statistics.median(copies[WARM_UP:]),
    )


def slow_link(*, rate_mbit: int = 200, mebibytes: int = 48, count: int = 4) -> SlowLink:
    """Publish to receivers in another network, by the tree, and then with receivers that do not relay.

    Raises:
        subprocess.CalledProcessError: no network can be made: this is not root, or `ip` or `tc` is missing.
    """
    torch.manual_seed(0)
    tensors = [("w", torch.randn(mebibytes * 2**18))]
    with link(rate_mbit) as name:
        tree = _over(name, tensors, count, listen=(f"tcp://{THERE}:*",))
        alone = _over(name, tensors, count, listen=("tcp://127.0.0.1:*",))
    return SlowLink(
        wire_bytes=tensors[0][1].nbytes,
        tree_s=tree[0],
        one_by_one_s=alone[0],
        tree_link_bytes=tree[1],
        one_by_one_link_bytes=alone[1],
    )


def _over(name: str, tensors: Tensors, count: int, *, listen: Sequence[str]) -> tuple[float, int]:
    """Seconds until all have it, and bytes on the link."""
    counter = Path(f"/sys/class/net/{name}-a/statistics/tx_bytes")
    inside = ["ip", "netns", "exec", name]
    options = [{"name": f"engine-{n}", "datacentre": "far", "medium": "tcp", "listen": listen} for n in range(count)]
    with (
        WeightSender(datacentre="near", listen=(f"tcp://{HERE}:*",)) as sender,
        receivers(sender, options, inside=inside) as engines,
    ):
        before = int(counter.read_text())
        start = time.monotonic()
        sender.publish(0, tensors)
        end = max(engine.came() for engine in engines)
        return end - start, int(counter.read_text()) - before


@contextmanager
def link(rate_mbit: int) -> Iterator[str]:
    """A network joined to this one by a slow pair of interfaces: NAME-a here, NAME-b there."""
    name = f"trw{os.getpid()}"

    def run(*words: str) -> None:
        subprocess.run(words, check=True, timeout=LIMIT_S)

    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", f"{name}-a", "type", "veth", "peer", "name", f"{name}-b", "netns", name)
        for where, end, address in (([], "a", HERE), (["-n", name], "b", THERE)):
            run("ip", *where, "addr", "add", f"{address}/30", "dev", f"{name}-{end}")
            run("ip", *where, "link", "set", f"{name}-{end}", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        for inside, end in (([], "a"), (["ip", "netns", "exec", name], "b")):
            shape = ["tbf", "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "100ms"]
            run(*inside, "tc", "qdisc", "add", "dev", f"{name}-{end}", "root", *shape)
        yield name
    finally:
        run("ip", "netns", "del", name)


class Engine:
    """A receiver in a process of its own."""

    def __init__(self, address: WeightsAddress, options: dict[str, Any], inside: Sequence[str]) -> None:
        """`inside`: a command that runs it elsewhere."""
        command = [*inside, sys.executable, __file__, "receive", json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        token = base64.b64encode(address.token).decode()
        facts = {"endpoints": address.endpoints, "host": address.host, "token": token}
        self.process.stdin.write(json.dumps(facts) + "\n")
        self.process.stdin.flush()

    def came(self) -> float:
        """When its next version came, by `time.monotonic`.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a receiver has ended; its error is above")
        return float(line)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


@contextmanager
def receivers(
    sender: WeightSender, options: Sequence[dict[str, Any]], inside: Sequence[str] = ()
) -> Iterator[list[Engine]]:
    """Start them, and wait until they are there."""
    with ExitStack() as stack:
        engines = []
        for each in options:
            engines.append(Engine(sender.address, each, inside))
            stack.callback(engines[-1].close)
        deadline = time.monotonic() + LIMIT_S
        while len(sender.stats().receivers) < len(options):
            if time.monotonic() > deadline:
                raise RuntimeError(f"after {LIMIT_S:g} s {len(sender.stats().receivers)} receivers are there")
            time.sleep(0.1)
        yield engines


async def receive(options: dict[str, Any]) -> None:
    """Be a receiver: say when each version has come."""
    facts = json.loads(sys.stdin.readline())
    address = WeightsAddress(**facts | {"token": base64.b64decode(facts["token"])})
    with WeightReceiver(address, **{"listen": LISTEN} | options) as receiver:
        version = -1
        while True:
            version = await receiver.wait(version + 1, timeout_s=LIMIT_S)
            print(time.monotonic(), flush=True)
            receiver.installed(version)


def main(what: Sequence[str]) -> None:
    """Measure, and end with a line of JSON."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    if "same_host" in what:
        for model in (torch.float32, torch.bfloat16):
            found = same_host(model=model)
            name = str(model).removeprefix("torch.")
            figures[f"same_host_{name}"] = asdict(found) | {"rate_of_copy": found.rate_of_copy}
    if "slow_link" in what:
        link_found = slow_link()
        ratios = {"time_ratio": link_found.time_ratio, "bytes_ratio": link_found.bytes_ratio}
        figures["slow_link"] = asdict(link_found) | ratios
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        asyncio.run(receive(json.loads(sys.argv[2])))
    else:
        main(sys.argv[1:] or ["same_host", "slow_link"])

"""The speed of new weights on their way to receivers. Each argument names a measurement; without any, all are made.

    slow_link             four receivers behind a link that they share, by the tree and each from the sender itself, in
                          turns; needs root
    same_host_bfloat16    one receiver in another process, of weights that travel in this dtype. Beside it, in turns, a
    same_host_float32     plain copy of the same tensors into warm memory of that dtype: as many bytes read and written

The tensors have the shapes of SmolLM2-135M, or as many bytes as the link is to carry, and random elements. On the same
host they are in the dtype of the wire. Where that is not float32, they are also measured in float32, as a trainer has
them; then both sides cast.
"""

import asyncio
import base64
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tailrace.transfer.weights.address import LISTEN, WeightsAddress
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender

LIMIT_S = 120.0
WARM_UP, TURNS = 3, 15
"""Versions on the same host: those of the warm-up, in which both buffers are made and mapped, and those that count."""
LINK_WARM_UP, LINK_TURNS = 1, 5
"""Versions of each way across the link, which takes seconds: those of the warm-up, and those that count."""
LINK_MBIT, LINK_MIB, RECEIVERS = 200, 48, 4
HERE, THERE = "10.203.118.1", "10.203.118.2"

SAME_HOST = {"same_host_bfloat16": torch.bfloat16, "same_host_float32": torch.float32}
"""The dtype of the wire of each measurement."""

Tensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SameHost:
    """Medians of one measurement, in seconds from the beginning of `publish`."""

    read_bytes: int
    written_bytes: int
    """Bytes written, both by the publication and by the plain copy."""
    publish_s: float
    here_s: float
    """Seconds until the receiver has verified it all and may read it."""
    copy_s: float
    """Seconds of the plain copy."""

    @property
    def rate_of_copy(self) -> float:
        """The rate at which the weights travel, over that of a plain copy of them."""
        return self.copy_s / self.here_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Medians over the versions that went one way."""

    seconds: float
    """Seconds until the last of the receivers has a version."""
    link_bytes: float
    """Bytes that have crossed the link, by the interface's count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """The figures of both ways to the receivers."""

    wire_bytes: int
    tree: Crossing
    one_by_one: Crossing

    @property
    def time_ratio(self) -> float:
        """Time of the tree over that of one by one."""
        return self.tree.seconds / self.one_by_one.seconds

    @property
    def bytes_ratio(self) -> float:
        """Bytes that cross the link with the tree, over the payload."""
        return self.tree.link_bytes / self.wire_bytes


def smollm2(dtype: torch.dtype) -> Tensors:
    """Return random tensors with the shapes of SmolLM2-135M: 134.5M elements."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, 576), "model.norm.weight": (576,)}
    for layer in range(30):
        rows = {"q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576)}
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
        rows = {"gate": (1536, 576), "up": (1536, 576), "down": (576, 1536)}
        shapes |= {f"model.layers.{layer}.mlp.{name}_proj.weight": shape for name, shape in rows.items()}
        shapes |= {f"model.layers.{layer}.{name}_layernorm.weight": (576,) for name in ("input", "post_attention")}
    return [(name, torch.randn(shape).to(dtype)) for name, shape in shapes.items()]


def same_host(model: torch.dtype, wire: torch.dtype) -> SameHost:
    """Publish to one receiver in a process of its own, and copy the same tensors, in turns."""
    tensors = smollm2(model)
    warm = [torch.zeros_like(tensor, dtype=wire) for _, tensor in tensors]
    copies, published, here = [], [], []
    with WeightSender(dtype=wire) as sender, receivers(sender, [{"name": "engine"}]) as (engine,):
        for version in range(WARM_UP + TURNS):
            start = time.monotonic()
            for target, (_, source) in zip(warm, tensors, strict=True):
                target.copy_(source)
            copies.append(time.monotonic() - start)
            start = time.monotonic()
            sender.publish(version, tensors)
            published.append(time.monotonic() - start)
            here.append(engine.came() - start)
            asyncio.run(sender.installed(version, timeout_s=LIMIT_S))
    return SameHost(
        read_bytes=sum(tensor.nbytes for _, tensor in tensors),
        written_bytes=sum(tensor.nbytes for tensor in warm),
        publish_s=statistics.median(published[WARM_UP:]),
        here_s=statistics.median(here[WARM_UP:]),
        copy_s=statistics.median(copies[WARM_UP:]),
    )


def slow_link() -> SlowLink:
    """Publish to receivers in another network: by the tree, and to receivers that do not relay, in turns.

    Raises:
        OSError: `ip` or `tc` is missing.
        subprocess.CalledProcessError: no network can be made, since this is not root.
    """
    torch.manual_seed(0)
    tensors = [("w", torch.randn(LINK_MIB * 2**18))]
    with link(LINK_MBIT) as name, way(name, THERE) as tree, way(name, "127.0.0.1") as one_by_one:
        ways = (tree, one_by_one)
        for version in range(LINK_WARM_UP + LINK_TURNS):
            for each in ways if version % 2 else reversed(ways):
                each.cross(version, tensors)
    return SlowLink(wire_bytes=tensors[0][1].nbytes, tree=tree.medians(), one_by_one=one_by_one.medians())


class Way:
    """A sender on this side of the link, and its receivers on the other."""

    def __init__(self, sender: WeightSender, engines: Sequence["Engine"], counter: Path) -> None:
        """`counter`: the file that counts the bytes that this side has sent across."""
        self._sender = sender
        self._engines = engines
        self._counter = counter
        self._seconds: list[float] = []
        self._link_bytes: list[int] = []

    def cross(self, version: int, tensors: Tensors) -> None:
        """Publish, and wait until all receivers have the version."""
        before = int(self._counter.read_text())
        start = time.monotonic()
        self._sender.publish(version, tensors)
        self._seconds.append(max(engine.came() for engine in self._engines) - start)
        self._link_bytes.append(int(self._counter.read_text()) - before)
        asyncio.run(self._sender.installed(version, timeout_s=LIMIT_S))

    def medians(self) -> Crossing:
        """Return the medians of the versions that count."""
        return Crossing(
            seconds=statistics.median(self._seconds[LINK_WARM_UP:]),
            link_bytes=statistics.median(self._link_bytes[LINK_WARM_UP:]),
        )


@contextmanager
def way(name: str, address: str) -> Iterator[Way]:
    """Yield a way over the link of this name, to receivers that others reach at `address`."""
    inside = ["ip", "netns", "exec", name]
    common = {"datacentre": "far", "medium": "tcp", "listen": [f"tcp://{address}:*"]}
    options = [{"name": f"engine-{number}", **common} for number in range(RECEIVERS)]
    with (
        WeightSender(datacentre="near", listen=(f"tcp://{HERE}:*",)) as sender,
        receivers(sender, options, inside=inside) as engines,
    ):
        yield Way(sender, engines, Path(f"/sys/class/net/{name}-a/statistics/tx_bytes"))


@contextmanager
def link(rate_mbit: int) -> Iterator[str]:
    """Yield a network joined to this one by a slow pair of interfaces: NAME-a here, NAME-b there."""
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
        """`inside`: a command that runs the receiver elsewhere."""
        command = [*inside, sys.executable, __file__, "receive", json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        token = base64.b64encode(address.token).decode()
        facts = {"endpoints": address.endpoints, "host": address.host, "token": token}
        self.process.stdin.write(json.dumps(facts) + "\n")
        self.process.stdin.flush()

    def came(self) -> float:
        """Return the time at which its next version came, by `time.monotonic`.

        Raises:
            RuntimeError: the receiver ended instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a receiver has ended; its error is above")
        return float(line)

    def close(self) -> None:
        """End the receiver."""
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


@contextmanager
def receivers(
    sender: WeightSender, options: Sequence[dict[str, Any]], inside: Sequence[str] = ()
) -> Iterator[list[Engine]]:
    """Start receivers, and wait until they are there."""
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
    if "slow_link" in what:  # first, since it may not be allowed
        found = slow_link()
        figures["slow_link"] = asdict(found) | {"time_ratio": found.time_ratio, "bytes_ratio": found.bytes_ratio}
    for name, wire in SAME_HOST.items():
        if name in what:
            models = dict.fromkeys((wire, torch.float32))
            cases = {str(model).removeprefix("torch."): same_host(model, wire) for model in models}
            figures[name] = {model: asdict(case) | {"rate_of_copy": case.rate_of_copy} for model, case in cases.items()}
    print(json.dumps(figures))


def end(number: int, frame: FrameType | None) -> None:
    """Exit by way of the clean-up: nothing else removes the network."""
    sys.exit(128 + number)


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        asyncio.run(receive(json.loads(sys.argv[2])))
    else:
        signal.signal(signal.SIGTERM, end)
        known = ["slow_link", *SAME_HOST]
        if unknown := set(sys.argv[1:]) - set(known):
            sys.exit(f"no measurements: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        main(sys.argv[1:] or known)

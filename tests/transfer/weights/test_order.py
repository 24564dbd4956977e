"""However publications, reads and receivers interleave, a receiver has one whole version, and never an older one."""

import asyncio
from contextlib import ExitStack
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender
from tests.transfer.weights.helpers import CHUNK_MIB, LIMIT_S, check, tensors

ANYWHERE = ("tcp://0.0.0.0:*",)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 3)),
        st.tuples(st.just("join"), st.sampled_from(["auto", "tcp", "gloo"])),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("open"), st.integers(0, 3)),
        st.tuples(st.just("wait"), st.integers(0, 3)),
    ),
    max_size=12,
)


class Play:
    """A sender, receivers that come and go, and reads that stay open."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.sender = stack.enter_context(WeightSender(chunk_mib=CHUNK_MIB, datacentre="near"))
        self.version = -1
        self.receivers: list[WeightReceiver] = []
        self.last: dict[WeightReceiver, int] = {}
        self.reads: list[tuple[int, Any]] = []

    async def step(self, what: str, value: Any) -> None:
        if what == "publish":
            self.version += value
            self.sender.publish(self.version, tensors(self.version).items())
        elif what == "join":
            where = {"datacentre": "far", "listen": ANYWHERE, "medium": value}
            receiver = WeightReceiver(self.sender.address, name=f"r{len(self.last)}", **where)
            self.receivers.append(self.stack.enter_context(receiver))
            self.last[receiver] = -1
        elif value < len(self.receivers):
            await self._use(what, self.receivers[value])

    async def _use(self, what: str, receiver: WeightReceiver) -> None:
        if what == "leave":
            if all(reader is not receiver for reader, _ in self._readers()):
                receiver.close()
                self.receivers.remove(receiver)
        elif what == "open" and receiver.received is not None:
            version, got = self.stack.enter_context(receiver.weights())
            self.reads.append((version, (receiver, got)))
        elif what == "wait" and self.version >= 0:
            version = await receiver.wait(self.version, timeout_s=LIMIT_S)
            assert version == self.version >= self.last[receiver]
            self.last[receiver] = version
            check(receiver, version)

    def _readers(self) -> list[tuple[WeightReceiver, Any]]:
        return [read for _, read in self.reads]

    async def end(self) -> None:
        for receiver in self.receivers:
            await self._use("wait", receiver)
        for version, (_, got) in self.reads:
            assert all((got[name] == tensor).all() for name, tensor in tensors(version).items())


@settings(max_examples=25)
@given(steps)
def test_what_is_here_is_one_version(plan: list[tuple[str, Any]]) -> None:
    async def play() -> None:
        with ExitStack() as stack:
            game = Play(stack)
            for what, value in plan:
                await game.step(what, value)
            await game.end()

    asyncio.run(play())

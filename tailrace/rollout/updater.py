"""Installs new weights in an engine that generates all the time.

    trainer ──▶ WeightSource (arrives in the background) ──▶ EngineUpdater ──update_weights──▶ Engine
                                                                  ▲
    LocalPort ──generating(needed)──────────────────────────────┘

The time at which a version that has arrived is installed:

    synchronous   at once; the trainer waits for it
    in_flight     at once, between two steps of the engine: its responses go on with the new weights
    delayed       when the engine has finished every response that it has begun (AsyncFlow, section 4.2.2); when the
                  next prompts need newer weights than the engine has, nothing else begins before them
    sub_step      when the engine has its turn: it begins nothing, finishes the responses that it has begun, installs
                  the weights and passes the turn on, while all others generate (AsyncFlow, figure 8 d)

Waiting: a response waits for weights that may begin it. The updater waits for new versions and, delayed or in turns,
for the responses that have begun. A prompt is admitted only after the version that it needs was published. So that
version is on its way, and needs no response that has not begun. Limits cover only what can hang: weights that do not
come or cannot be installed, and an engine that stands still. Finishing responses has no limit.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import TYPE_CHECKING, Protocol

from tailrace.activity import Activity
from tailrace.config.weights import WeightsMode
from tailrace.engine.base import Engine
from tailrace.errors import EngineStuck, SenderLost, WeightsError, WeightsTimeout
from tailrace.events import EventLog
from tailrace.registers.events import EventKind
from tailrace.types import WeightVersion

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """A source of weight versions; `WeightReceiver` is one."""

    async def announcement(self, version: WeightVersion, *, timeout_s: float) -> None:
        """Wait until `version` or a newer one is on its way or has arrived.

        Raises:
            WeightsTimeout, SenderLost: as for `wait`.
        """

    async def wait(self, version: WeightVersion, *, timeout_s: float) -> WeightVersion:
        """Wait until `version` or a newer one has arrived completely; return the version that has.

        Raises:
            WeightsTimeout: none has come in time.
            SenderLost: the trainer gives no sign of life; it may again.
        """

    async def heard(self, *, timeout_s: float) -> None:
        """Wait until the trainer gives signs of life, or `timeout_s` have passed."""

    def weights(self) -> AbstractContextManager[tuple[WeightVersion, "Mapping[str, torch.Tensor]"]]:
        """The newest complete version; its tensors are valid inside the block."""

    def installed(self, version: WeightVersion) -> None:
        """Tell the trainer that the engine has `version`."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Enter when no other engine has the turn to install weights. This may take any time."""


class EngineUpdater:
    """Installs the versions of a source in an engine, and holds responses back until their version is installed."""

    def __init__(
        self,
        engine: Engine,
        source: WeightSource,
        mode: WeightsMode,
        *,
        log: EventLog,
        activity: Activity,
        timeout_s: float,
    ) -> None:
        self.version: WeightVersion = 0
        """The version that the engine has."""
        self._engine = engine
        self._source = source
        self._mode = mode
        self._log = log
        self._activity = activity
        self._timeout_s = timeout_s
        self._begun = 0
        """Number of claims whose responses have begun and are not finished."""
        self._wanted: list[WeightVersion] = []
        """The versions that the waiting responses need."""
        self._held_back = False
        """Whether no response may begin."""
        self._limits: set[asyncio.Timeout] = set()
        """The limits of the waiting responses."""
        self._unlimited = False
        """Whether these limits are suspended."""
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Install each version that arrives; never ends."""
        self._source.installed(self.version)
        while True:
            try:
                await self._source.announcement(self.version + 1, timeout_s=self._timeout_s)
                with self._activity.waiting("weights"):  # counted even if no prompt waits for them
                    arrived = await self._source.wait(self.version + 1, timeout_s=self._timeout_s)
                await self._take(arrived)  # not counted: weights may wait for responses here
            except WeightsTimeout:
                continue  # an update takes as long as it takes; waits for its weights have a limit
            except SenderLost:  # the driver finds out whether it is dead
                await self._source.heard(timeout_s=self._timeout_s)

    async def _take(self, arrived: WeightVersion) -> None:
        """Install the newest version that has arrived, `arrived` or newer, when the mode allows it."""
        async with AsyncExitStack() as stack:
            with self._without_limits():
                if self._mode == "sub_step":
                    await stack.enter_async_context(self._source.turn())
                if self._mode in ("delayed", "sub_step"):
                    with self._log.span(EventKind.WEIGHTS_DRAIN, "engine", version=arrived):
                        if self._mode == "delayed":
                            await self._finish()
                        await stack.enter_async_context(self._drained())
            await self._install()

    @asynccontextmanager
    async def generating(self, needed: WeightVersion) -> AsyncIterator[None]:
        """See `WeightsGate`."""
        if not self._may_begin(needed):
            with self._activity.waiting("weights"):
                await self._wait_to_begin(needed)
        self._begun += 1
        try:
            yield
        finally:
            self._begun -= 1
            await self._tell()

    async def _wait_to_begin(self, needed: WeightVersion) -> None:
        self._wanted.append(needed)
        try:
            async with self._limited():
                await self._until(lambda: self._may_begin(needed))
        except TimeoutError:
            raise WeightsError(
                f"weights of version {needed} have not been installed within {self._timeout_s:g} s, and the engine has "
                f"version {self.version}; is the trainer alive? If they only take long, raise weights.timeout_s"
            ) from None
        finally:
            self._wanted.remove(needed)
            await self._tell()  # a cancelled wait holds no one back

    def _may_begin(self, needed: WeightVersion) -> bool:
        drains = self._mode == "delayed" and max(self._wanted, default=0) > self.version
        return self.version >= needed and not drains and not self._held_back

    async def _install(self) -> None:
        with (
            self._activity.busy("weight_transfer"),
            self._source.weights() as (version, tensors),
            self._log.span(EventKind.UPDATE_WEIGHTS, "engine", version=version),
        ):
            await self._engine.update_weights(version, tensors.items())
        self.version = version
        self._source.installed(version)
        await self._tell()

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Within the block no response is unfinished, and none begins."""
        self._held_back = True
        try:
            await self._finish()
            yield
        finally:
            self._held_back = False
            await self._tell()

    async def _finish(self) -> None:
        """Wait until no response is unfinished.

        Raises:
            EngineStuck: the engine has work and stands still.
        """
        while self._begun:
            before = self._engine.stats()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._until(lambda: not self._begun)
            except TimeoutError:
                now = self._engine.stats()
                worked = before.running + before.waiting == 0 or now.steps > before.steps
                if not worked:
                    raise EngineStuck(
                        f"new weights wait for {now.running + now.waiting} responses, and the engine has made no step "
                        f"for them within {self._timeout_s:g} s; is its device stuck? If a step takes that long, raise "
                        "weights.timeout_s"
                    ) from None

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Give the block the limit of a wait for weights.

        Raises:
            TimeoutError: the limit has passed, counted from the last end of `_without_limits`.
        """
        async with asyncio.timeout_at(self._deadline()) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.remove(limit)

    @contextmanager
    def _without_limits(self) -> Iterator[None]:
        """Suspend the limits of waits for weights; they restart after the block.

        All that can hang in it has its own limit.
        """
        self._limit_waits(unlimited=True)
        try:
            yield
        finally:
            self._limit_waits(unlimited=False)

    def _limit_waits(self, *, unlimited: bool) -> None:
        self._unlimited = unlimited
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(self._deadline())

    def _deadline(self) -> float | None:
        return None if self._unlimited else asyncio.get_running_loop().time() + self._timeout_s

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

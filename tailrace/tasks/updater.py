"""New weights for an engine that generates all the time.

    trainer ──▶ WeightSource (arrives in the background) ──▶ EngineUpdater ──update_weights──▶ Engine
                                                                  ▲
    RolloutTask ──generating(needed)────────────────────────────┘

When a version that has arrived goes in:

    synchronous   at once; the trainer waits for it
    in_flight     at once, between two steps of the engine: its responses go on with the new weights
    delayed       when the engine has finished every response that it has begun (AsyncFlow, section 4.2.2); where the
                  next prompts may only begin with newer weights than it has, nothing else begins before them
    sub_step      when the engine has its turn: it begins nothing, finishes what it has begun, takes the weights, and
                  passes the turn on, while all others generate (AsyncFlow, figure 8 d)

Who waits on whom: a response on weights that may begin it; the updater on new versions and, delayed or in turns, on the
responses that have begun. A prompt is admitted only after the version that it needs was published, so whatever it waits
for is on its way and needs no response that has not begun. Limits are for what can hang: weights that do not come or do
not go in, and an engine that stands still. That responses finish first takes as long as it takes.
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
from tailrace.errors import SenderLost, WeightsError, WeightsTimeout
from tailrace.events import EventLog
from tailrace.registers.events import EventKind
from tailrace.types import WeightVersion

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """Where versions come from; `WeightReceiver` is one."""

    async def announcement(self, version: WeightVersion, *, timeout_s: float) -> None:
        """Until `version` or a newer one is on its way, or here.

        Raises:
            WeightsTimeout, SenderLost: as for `wait`.
        """

    async def wait(self, version: WeightVersion, *, timeout_s: float) -> WeightVersion:
        """Until `version` or a newer one is wholly here; which one that is.

        Raises:
            WeightsTimeout: none has come in time.
            SenderLost: the trainer gives no sign of life; it may again.
        """

    async def heard(self, *, timeout_s: float) -> None:
        """Until the trainer gives signs of life, or `timeout_s` have passed."""

    def weights(self) -> AbstractContextManager[tuple[WeightVersion, "Mapping[str, torch.Tensor]"]]:
        """The newest version that is wholly here; its tensors are good inside the block."""

    def installed(self, version: WeightVersion) -> None:
        """Tell the trainer that the engine has it."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Enter when no other engine has the turn to install weights, however long that takes."""


class EngineUpdater:
    """Installs the versions of a source in an engine, and holds responses back until theirs is in."""

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
        """What the engine has."""
        self._engine = engine
        self._source = source
        self._mode = mode
        self._log = log
        self._activity = activity
        self._timeout_s = timeout_s
        self._begun = 0
        """Claims whose responses have begun and are not finished."""
        self._wanted: list[WeightVersion] = []
        """What the responses that wait need."""
        self._held_back = False
        """Nothing may begin."""
        self._limits: set[asyncio.Timeout] = set()
        """Of the responses that wait."""
        self._unlimited = False
        """They have none now."""
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Install each version that arrives, for ever."""
        self._source.installed(self.version)
        while True:
            try:
                await self._source.announcement(self.version + 1, timeout_s=self._timeout_s)
                with self._activity.waiting("weights"):  # also where no prompt is there to wait for them
                    arrived = await self._source.wait(self.version + 1, timeout_s=self._timeout_s)
                await self._take(arrived)  # where they wait for responses, the engine does not wait for them
            except WeightsTimeout:
                continue  # an update takes as long as it takes; who needs its weights has a limit
            except SenderLost:  # whether it is dead is for the driver to say
                await self._source.heard(timeout_s=self._timeout_s)

    async def _take(self, arrived: WeightVersion) -> None:
        """Install the newest version that is here, `arrived` or a newer one, when the mode says so."""
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
            await self._tell()  # what was cancelled bars nobody any more

    def _may_begin(self, needed: WeightVersion) -> bool:
        drains = self._mode == "delayed" and max(self._wanted, default=0) > self.version
        return self.version >= needed and not drains and not self._held_back

    async def _install(self) -> None:
        with (
            self._activity.waiting("weights"),
            self._source.weights() as (version, tensors),
            self._log.span(EventKind.UPDATE_WEIGHTS, "engine", version=version),
        ):
            await self._engine.update_weights(version, tensors.items())
        self.version = version
        self._source.installed(version)
        await self._tell()

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """In the block nothing is unfinished, and nothing begins."""
        self._held_back = True
        try:
            await self._finish()
            yield
        finally:
            self._held_back = False
            await self._tell()

    async def _finish(self) -> None:
        """Until nothing is unfinished.

        Raises:
            WeightsError: the engine has work and stands still.
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
                    raise WeightsError(
                        f"new weights wait for {now.running + now.waiting} responses, and the engine has made no step "
                        f"for them within {self._timeout_s:g} s; is its device stuck? If a step takes that long, raise "
                        "weights.timeout_s"
                    ) from None

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """The block has the limit of a wait for weights.

        Raises:
            TimeoutError: it has taken so long, since `_without_limits` ended last.
        """
        async with asyncio.timeout_at(self._deadline()) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.remove(limit)

    @contextmanager
    def _without_limits(self) -> Iterator[None]:
        """In the block nothing can hang that has no limit of its own; waits for weights have theirs anew after it."""
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

"""Expects the lengths of responses, learns from those that come, and says whether that helps.

    prompts ──expect──▶ expectations ──▶ placement, order
    finished responses ──learn──▶ predictor
                       ──of a whole step, every few steps──▶ check: were the expectations right, and was it worth it?

Three ways are compared: engines that pull the step's samples as they came, engines that pull those first that were
expected to be the longest, and placement by the expectations. All are predicted from the lengths that came, with the
same step costs, so it can be told whichever was done. Where placement gains less over pulling than the stated part,
prompts are pulled, until a later check finds that placing them would have paid. So they are where a predictor fails, or
is slower than its limit. Policies that know no lengths are not compared.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.config.rollout import DispatchConfig
from tailrace.errors import one_line
from tailrace.events import Event, EventLog
from tailrace.planning.dispatch.base import EngineState, Job, Policy
from tailrace.planning.dispatch.seconds import makespan_s, pulled
from tailrace.planning.dispatch.simple import Pull
from tailrace.planning.lengths.assessment import Assessment, assess
from tailrace.planning.lengths.base import Asked, Expectation, Finished, LengthPredictor
from tailrace.planning.remaining import LengthHistory
from tailrace.registers.events import EventKind
from tailrace.types import Sample

_BATCH = 64
"""Responses that a predictor learns at a time: some compute all anew after that."""


class Seconds(NamedTuple):
    """Of a step's generation, as predicted with the lengths that came."""

    pulled: float
    """By engines that pull samples in the order of their groups."""
    ordered: float
    """By engines that pull the longest expected ones first."""
    placed: float | None
    """None where the policy knows no lengths."""

    @property
    def order_gain(self) -> float:
        """The part that the order saves."""
        return 1 - self.ordered / self.pulled

    @property
    def placement_gain(self) -> float | None:
        """The part that placement saves over pulling in either order."""
        return None if self.placed is None else 1 - self.placed / min(self.pulled, self.ordered)


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished response, and what was expected of it."""

    group: int
    expected: Expectation
    """When it was placed."""
    finished: Finished


class Foresight:
    """The lengths and the policy of a run. Use it from one event loop."""

    def __init__(
        self,
        predictor: LengthPredictor,
        policy: Policy,
        config: DispatchConfig,
        history: LengthHistory,
        log: EventLog,
        *,
        samples_per_step: int,
        max_staleness: int = 0,
        executor: Executor | None = None,
    ) -> None:
        """`history`: gets the length of every response.

        `max_staleness`: training steps by which a step may be overtaken.

        `executor`: for checks and the slow work of the predictor; by default threads of the loop's.
        """
        self._predictor = predictor
        self._placing = policy
        self._pulling = Pull()
        self._config = config
        self._history = history
        self._log = log
        self._samples_per_step = samples_per_step
        self._max_staleness = max_staleness
        self._executor = executor
        self._steps: defaultdict[int, list[Ended]] = defaultdict(list)
        """What has finished of each step that is being generated."""
        self._whole = 0
        """Steps of which all has finished."""
        self._new: list[Finished] = []
        """What the predictor has not learned yet."""
        self._preparing = asyncio.Lock()
        self._late: asyncio.Future[None] | None = None
        """Slow work of the predictor that goes on although nobody waits for it."""
        self._is_spared = False
        """Whether no such work is begun before the next check."""
        self._trouble = ""
        """What was wrong with it the last time."""
        self.pays = True
        """Whether placement has paid at the last check."""

    @property
    def policy(self) -> Policy:
        """The policy to place by now."""
        return self._placing if self.pays else self._pulling

    @property
    def plans(self) -> bool:
        """Whether prompts are placed by expected lengths while that pays."""
        return self._placing.plans

    @property
    def places(self) -> bool:
        """Whether prompts are placed by expected lengths by now."""
        return self.pays and self._placing.plans

    @property
    def tells_samples_apart(self) -> bool:
        """See `LengthPredictor`."""
        return self._predictor.tells_samples_apart

    def wants_scout(self, asked: Asked) -> bool:
        """Whether one sample of a group should begin before the others."""
        return self.pays and self._predictor.scouts and not self._predictor.knows(asked)

    async def prepare(self, asked: Sequence[Asked]) -> None:
        """Have the predictor do the slow work for these prompts. After a failure it is spared until the next check."""
        if self._is_spared:
            return
        try:
            async with asyncio.timeout(self._config.limit_s), self._preparing:
                if self._late is not None:
                    await asyncio.wait([self._late])  # of other prompts, for whom it came too late
                if not self._is_spared:
                    await self._prepared(asked)
        except TimeoutError:
            self._spare(f"take longer than rollout.dispatch.limit_s ({self._config.limit_s:g} s)")
        except Exception as error:  # whatever a library raises: a run needs no lengths
            self._spare(f"cannot be had ({one_line(error)})")

    async def _prepared(self, asked: Sequence[Asked]) -> None:
        """Wait for the slow work. It goes on where the waiting ends earlier."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._executor, self._predictor.prepare, list(asked))
        try:
            await asyncio.shield(work)
            self._trouble = ""
        finally:
            if not work.done():
                self._late = work
                work.add_done_callback(self._end_late)

    def _end_late(self, late: asyncio.Future[None]) -> None:
        self._late = None
        if not late.cancelled():
            late.exception()  # nobody waits for it any more

    def _spare(self, why: str) -> None:
        self._is_spared = True
        self.pays = not self._placing.plans
        if why != self._trouble:
            self._trouble = why
            how = "taken to be all alike until the next check"
            if self._placing.plans:
                how = "pulled until a check finds that placing them pays"
            self._tell_change(None, f"prompts are {how}: the lengths of {self._predictor.name} {why}")

    def expect(self, asked: Sequence[Asked]) -> list[Expectation]:
        """Return an expectation for each prompt."""
        return self._predictor.expect(asked)

    def suppose(self, asked: Asked, tokens: float) -> Expectation:
        """Return what is expected of a prompt that has a response of so many tokens, beside those that are known."""
        return self._predictor.suppose(asked, tokens)

    def ended(self, step: int, asked: Asked, expected: Expectation, sample: Sample) -> list[Ended] | None:
        """Learn from a finished response of a training step.

        Args:
            expected: of it, when it was placed.

        Returns:
            All responses of the step, where this is its last, and a check is due.
        """
        tokens = len(sample.response_ids)
        finished = Finished(asked=asked, tokens=tokens, version=int(sample.weight_versions.min()))
        self._history.add(tokens)
        self._new.append(finished)
        of_step = self._steps[step]
        of_step.append(Ended(sample.group_id, expected, finished))
        whole = len(of_step) == self._samples_per_step
        if whole or self._predictor.scouts or len(self._new) >= _BATCH:
            self._predictor.learn(sorted(self._new, key=lambda response: response.version))
            self._new.clear()
        if not whole:
            return None
        del self._steps[step]
        for other in [other for other in self._steps if other < step - self._max_staleness]:
            del self._steps[other]  # it was resumed, and its first responses came before
        self._whole += 1
        return of_step if self._whole % self._config.check_every == 0 else None

    async def check(self, step: int, ended: Sequence[Ended], engines: Sequence[EngineState]) -> None:
        """Compare what was expected of a step with what came, and decide how to go on.

        Args:
            ended: see `ended`.
            engines: without work; none where their steps were not measured.
        """
        loop = asyncio.get_running_loop()
        assessment, seconds = await loop.run_in_executor(self._executor, self._compare, ended, engines)
        self._tell(step, assessment, seconds)
        if self._is_spared:
            self._is_spared = False  # what it had not prepared says nothing of what it can do
        elif seconds is not None and seconds.placement_gain is not None:
            self._decide(step, seconds.placement_gain)

    def _compare(self, ended: Sequence[Ended], engines: Sequence[EngineState]) -> tuple[Assessment, Seconds | None]:
        """What was expected beside what came, and the seconds of each way."""
        lengths = [response.finished.tokens for response in ended]
        assessment = assess([response.expected for response in ended], lengths, [response.group for response in ended])
        if not engines:
            return assessment, None
        expected = [_job(response, response.expected.tokens, response.expected.deviation) for response in ended]
        came = [_job(response, float(response.finished.tokens)) for response in ended]
        policy = self._placing
        in_order = sorted(range(len(ended)), key=lambda number: ended[number].group)
        by_length = sorted(range(len(ended)), key=lambda number: -ended[number].expected.tokens)
        seconds = Seconds(
            pulled=pulled(engines, [came[number] for number in in_order]).seconds,
            ordered=pulled(engines, [came[number] for number in by_length]).seconds,
            placed=makespan_s(engines, came, policy.place(expected, engines).of) if policy.plans else None,
        )
        return assessment, seconds

    def _decide(self, step: int, gain: float) -> None:
        if (pays := gain >= self._config.least_gain) == self.pays:
            return
        self.pays = pays
        least = _percent(self._config.least_gain)
        if pays:
            lengths = f"the lengths of {self._predictor.name}"
            text = f"prompts are placed by {lengths} again: a gain of {_percent(gain)} is predicted"
        else:
            text = (
                f"prompts are pulled from now on: placing them by the lengths of {self._predictor.name} is predicted "
                f"to gain {_percent(gain)} over that, below rollout.dispatch.least_gain ({least}); later checks go on"
            )
        self._tell_change(step, text)

    def _tell_change(self, step: int | None, text: str) -> None:
        self._emit(EventKind.DISPATCH_CHANGE, step, info={"text": text})

    def _tell(self, step: int, found: Assessment, seconds: Seconds | None) -> None:
        metrics = {"expected_inside": found.inside}
        for percent, recall in found.recall.items():
            metrics |= {} if recall is None else {f"recall_{percent}": recall}
        for percent, ceiling in found.ceiling.items():
            metrics |= {} if ceiling is None else {f"recall_ceiling_{percent}": ceiling}
        if found.tau is not None:
            metrics["expected_tau"] = found.tau
        if seconds is not None:
            told = {"pull_s": seconds.pulled, "ordered_s": seconds.ordered, "placed_s": seconds.placed}
            told |= {"order_gain": seconds.order_gain, "placement_gain": seconds.placement_gain}
            metrics |= {name: value for name, value in told.items() if value is not None}
        info = {"lengths": self._predictor.name, "policy": self._placing.name}
        self._emit(EventKind.DISPATCH, step, metrics=metrics, info=info, samples=found.responses)

    def _emit(
        self,
        task: EventKind,
        step: int | None,
        *,
        info: dict[str, str],
        metrics: Mapping[str, float] | None = None,
        samples: int | None = None,
    ) -> None:
        """Emit an event of this moment. Beside the metrics it says whether prompts are placed by now."""
        now = self._log.now()
        self._log.emit(
            Event(
                task=task,
                actor="rollout",
                start=now,
                end=now,
                step=step,
                samples=samples,
                metrics={"placed": float(self.places), **(metrics or {})},
                info=info,
            )
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _job(response: Ended, tokens: float, deviation: float = 0.0) -> Job:
    return Job(
        group=response.group,
        samples=1,
        prompt_tokens=response.finished.asked.prompt_tokens,
        expected_tokens=max(1.0, tokens),
        deviation=deviation,
    )

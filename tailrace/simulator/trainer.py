"""A trainer in simulated time: it claims the groups of its step, and computes. The policy's weights are handed on.

    let_train ──▶ ready ──claim: all of a step, or a micro-batch's worth──▶ update ──▶ optimizer ──▶ weights ──▶ engines

Where it has a machine with engines together, each slows the other down. Where it has the same devices, they take turns.
The trainer of a critic is like the policy's, but engines get none of its weights.
"""

from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from tailrace.activity import Activity
from tailrace.events import Event
from tailrace.planning.claims import Claim
from tailrace.planning.packing import Lengths
from tailrace.registers.events import EventKind
from tailrace.simulator.agenda import Agenda, Change, Process
from tailrace.simulator.devices import Devices
from tailrace.simulator.engines import SimulatedEngine
from tailrace.simulator.log import VirtualLog
from tailrace.simulator.passes import passes_s
from tailrace.simulator.samples import Group
from tailrace.simulator.scenario import Scenario, TrainerKind

_ROUNDING_S = 1e-9
"""Work of so many seconds counts as done."""


def claim_of(trainer: TrainerKind, micro_batch_tokens: int | None, groups: int) -> Claim:
    """A claim of at most so many groups: a micro-batch's worth for each rank, or all of them without a number of
    tokens."""
    return Claim(tokens=None if micro_batch_tokens is None else micro_batch_tokens * trainer.ranks, rows=groups)


def update_s(trainer: TrainerKind, samples: Sequence[Lengths], budget: int) -> float:
    """Seconds of the forward and backward passes over a claim."""
    return passes_s(trainer.times.update_s, samples, budget, ranks=trainer.ranks, stages=trainer.stages)


class SimulatedTrainer:
    """The trainer of a model."""

    def __init__(
        self,
        agenda: Agenda,
        scenario: Scenario,
        kind: TrainerKind,
        engines: Sequence[SimulatedEngine],
        log: VirtualLog,
        *,
        name: str,
        devices: Devices | None,
        turned: Change,
    ) -> None:
        """`engines`: those of the moment. `name`: of its worker. `devices`: those that it has in turns; None where it
        has its own.

        `turned`: told when an engine begins or ends to compute.
        """
        self.activity = Activity(log, name, breakdown=True)
        self.trained_steps = 0
        """Steps whose update it has made."""
        self.trained = Change(agenda)
        self._agenda = agenda
        self._scenario = scenario
        self._kind = kind
        self._engines = engines
        self._log = log
        self._name = name
        self._devices = devices
        self._turned = turned
        self._ready: dict[int, deque[Group]] = {}
        """Groups that can be trained on, by step, in the order in which they became so."""
        self._ready_tokens: Counter[int] = Counter()
        self._arrived = Change(agenda)

    def let_train(self, group: Group) -> None:
        """Let it have a group."""
        self._ready.setdefault(group.step, deque()).append(group)
        self._ready_tokens[group.step] += group.tokens
        self._arrived.tell()

    def train(self, step: int) -> Generator[Any, None, list[Group]]:
        """Train on the groups of a step. Return them."""
        scenario, times = self._scenario, self._kind.times
        yield scenario.step_s
        once = scenario.mini_batches * scenario.epochs == 1
        groups: list[Group] = []
        while len(groups) < scenario.groups_per_step:
            claim = yield from self._claim(step, len(groups))
            groups += claim
            # before several updates, the loss needs log-probabilities of the weights before the first
            work_s = self._update_s if once else self._score_s
            yield from self._compute(step, EventKind.ACTOR, work_s(claim), claim)
        if once:
            yield from self._compute(step, EventKind.OPTIMIZER, times.optimizer_s(), [])
        else:
            groups.sort(key=lambda group: group.number)
            size = -(-len(groups) // scenario.mini_batches)
            for first in list(range(0, len(groups), size)) * scenario.epochs:
                part = groups[first : first + size]
                yield from self._compute(step, EventKind.ACTOR, self._update_s(part), part)
                yield from self._compute(step, EventKind.OPTIMIZER, times.optimizer_s(), [])
        self.trained_steps = step + 1
        self.trained.tell()
        return groups

    def _claim(self, step: int, taken: int) -> Generator[float | Change, None, list[Group]]:
        """Wait for groups of a step: all of them, or a micro-batch's worth. Return them."""
        scenario = self._scenario
        missing = scenario.groups_per_step - taken
        self.activity.enter("data")
        while True:
            ready = self._ready.get(step, deque())
            claim = self._claimable(step, ready, missing)
            if claim:
                break
            yield self._arrived
        self.activity.leave("data")
        for group in claim:
            ready.remove(group)
            self._ready_tokens[step] -= group.tokens
        return claim

    def _claimable(self, step: int, ready: deque[Group], missing: int) -> list[Group]:
        """The groups that it would be handed now; empty while it waits. See `Claim`."""
        scenario = self._scenario
        claim = claim_of(self._kind, scenario.micro_batch_tokens if scenario.streaming else None, missing)
        if not claim.is_reached_by(self._ready_tokens[step], len(ready)):
            return []
        groups: list[Group] = []
        for group in list(ready) if scenario.streaming and not scenario.in_order else self._next(step, ready, missing):
            if not claim.fits(group.tokens, 1):
                return groups
            groups.append(group)
            claim.add(group.tokens, 1)
            if claim.is_complete:
                return groups
        return []

    def _next(self, step: int, ready: deque[Group], missing: int) -> Iterator[Group]:
        """The next groups of the step in the order of the run, as far as they are there."""
        by_number = {group.number: group for group in ready}
        number = (step + 1) * self._scenario.groups_per_step - missing
        while number in by_number:
            yield by_number[number]
            number += 1

    def _update_s(self, groups: Sequence[Group]) -> float:
        samples = [one for group in groups for one in group.lengths]
        return update_s(self._kind, samples, self._scenario.micro_batch_tokens)

    def _score_s(self, groups: Sequence[Group]) -> float:
        kind, samples = self._kind, [one for group in groups for one in group.lengths]
        budget = self._scenario.micro_batch_tokens
        return passes_s(kind.times.score_s, samples, budget, ranks=kind.ranks, stages=kind.stages)

    def _compute(self, step: int, kind: EventKind, seconds: float, groups: Sequence[Group]) -> Process:
        """Work. Where others have the same devices, it takes its turn."""
        if self._devices is not None:
            yield from self._devices.take()
        start = self._agenda.now
        self.activity.enter("update")
        yield from self._work(seconds)
        self.activity.leave("update")
        if self._devices is not None:
            self._devices.leave()
        samples = sum(len(group.responses) for group in groups)
        tokens = sum(one.tokens for group in groups for one in group.responses)
        self._log.emit(
            Event(
                task=kind,
                actor=self._name,
                start=start,
                end=self._agenda.now,
                step=step,
                version=step,
                samples=samples or None,
                tokens=tokens or None,
            )
        )

    def _work(self, seconds: float) -> Process:
        """Compute. Where it shares a machine with engines, each slows the other down."""
        scenario = self._scenario
        if self._devices is not None or scenario.engine_beside == scenario.trainer_beside == 1:
            yield seconds
            return
        for engine in self._engines:
            engine.keep_pace(scenario.engine_beside)
        while seconds > _ROUNDING_S:
            pace = scenario.trainer_beside if any(engine.computes for engine in self._engines) else 1.0
            start = self._agenda.now
            yield seconds * pace, self._turned
            seconds -= (self._agenda.now - start) / pace
        for engine in self._engines:
            engine.keep_pace(1.0)


class SimulatedPublisher:
    """Hands the policy's weights on to engines."""

    def __init__(
        self,
        agenda: Agenda,
        scenario: Scenario,
        engines: Sequence[SimulatedEngine],
        log: VirtualLog,
        activity: Activity,
    ) -> None:
        """`engines`: those of the moment. `activity`: the trainer's."""
        self._sent = 0
        """The newest version that is on its way to engines, or there."""
        self._agenda = agenda
        self._scenario = scenario
        self._engines = engines
        self._log = log
        self._activity = activity

    def send_to(self, engine: SimulatedEngine) -> None:
        """Have the newest weights go to an engine."""
        if version := self._sent:
            self._agenda.after(engine.kind.arrive_s, lambda: engine.arrive(version))

    def publish(self, version: int) -> Process:
        """Hand the weights on, and wait for the engines where the mode says so."""
        scenario = self._scenario
        if scenario.trainer.publish_s:
            start = self._agenda.now
            self._activity.enter("weight_transfer")
            yield scenario.trainer.publish_s
            self._activity.leave("weight_transfer")
            self._emit(EventKind.WEIGHTS_PUBLISH, start, version)
        self._sent = version
        for engine in self._engines:
            self.send_to(engine)
        if scenario.weights == "synchronous":
            start = self._agenda.now
            self._activity.enter("weights")
            for engine in list(self._engines):
                while engine.version < version and not engine.is_leaving:
                    yield engine.installed
            self._activity.leave("weights")
            self._emit(EventKind.WEIGHTS_WAIT, start, version)

    def _emit(self, kind: EventKind, start: float, version: int) -> None:
        self._log.emit(Event(task=kind, actor="trainer", start=start, end=self._agenda.now, version=version))

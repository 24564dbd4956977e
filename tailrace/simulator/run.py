"""A run in simulated time: the main loop of `run.pipeline`, with work that takes time and computes nothing.

    prompts ─▶ service ─▶ engines ─▶ graders ─▶ (reference, critic) ─▶ trainer ─▶ weights ─▶ engines
       ▲                                                                             │
       └──────────── prompts of later steps, as soon as weights admit them ◀─────────┘

    part        waits for
    prompts     weights that are at most `max_staleness` updates older than those their step trains
    engines     prompts, and the weights that may begin them
    graders     responses; a free grader
    scorer      whole groups that are graded
    trainer     the groups of its step: all of them, or, streaming, a micro-batch's worth

It emits the events of a real run, so that everything which reads those reads these.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

from tailrace.activity import Activity
from tailrace.events import Event, EventLog, Sink
from tailrace.host.collector import spared
from tailrace.planning.admission import oldest_version, staleness
from tailrace.planning.dispatch.factory import make_policy
from tailrace.planning.packing import GroupPart, Lengths, plan_micro_batches, shared
from tailrace.planning.remaining import LengthHistory
from tailrace.registers.events import EventKind
from tailrace.simulator.agenda import Agenda, Change, Process
from tailrace.simulator.engines import Response, SimulatedEngine, Turns
from tailrace.simulator.scenario import Scenario, TrainerTimes
from tailrace.simulator.service import SimulatedService
from tailrace.workloads.replay import Replay

_ROUNDING_S = 1e-9
"""Work of so many seconds counts as done."""


class VirtualLog(EventLog):
    """A log whose clock is an agenda's."""

    def __init__(self, agenda: Agenda, sinks: tuple[Sink, ...], worker: str = "") -> None:
        super().__init__(sinks=sinks, worker=worker, origin=0.0)
        self._agenda = agenda

    def now(self) -> float:
        """See `EventLog`."""
        return self._agenda.now


@dataclass(eq=False, slots=True)
class Group:
    """The samples of a prompt, which are trained on together."""

    number: int
    step: int
    responses: list[Response]
    missing: int
    """Responses that have not been graded."""
    tokens: int
    """Of all; the prompt counts once."""

    @property
    def lengths(self) -> list[Lengths]:
        """The lengths of its samples."""
        return [Lengths(self.number, one.script.prompt_tokens, one.tokens) for one in self.responses]


class SimulatedRun:
    """Call `run` once."""

    def __init__(
        self, scenario: Scenario, replay: Replay, *, sinks: tuple[Sink, ...] = (), samples: bool = True
    ) -> None:
        """`replay`: the lengths of all groups, at least as many as the run takes. `samples`: whether each response
        has an event."""
        self.agenda = Agenda()
        self.log = VirtualLog(self.agenda, sinks)
        self._scenario = scenario
        self._replay = replay
        self._longest = float(replay.longest_response)
        self._random = random.Random(scenario.seed)
        self._tells_samples = samples
        self.version = 0
        """Of the weights that the trainer has published."""
        self._published = Change(self.agenda)
        self._turned = Change(self.agenda)
        """Told when an engine begins or ends to compute."""
        turns = Turns(self.agenda)
        counts: Counter[str] = Counter()
        self.engines: list[SimulatedEngine] = []
        for kind in scenario.engines:
            for _ in range(kind.engines):
                name = f"{kind.name}-{counts[kind.name]}"
                counts[kind.name] += 1
                log = self._log_of(name, sinks)
                self.engines.append(
                    SimulatedEngine(
                        self.agenda,
                        name,
                        kind,
                        scenario.weights,
                        log,
                        turns=turns,
                        on_ended=self._grade,
                        on_turn=self._turned.tell,
                    )
                )
        policy = make_policy(scenario.dispatch, LengthHistory(), seed=scenario.seed)
        splits = scenario.knows_lengths == "lengths" and policy.plans
        self._service = SimulatedService(
            self.agenda,
            self.engines,
            policy,
            group_size=scenario.group_size,
            splits=splits,
            may_move=scenario.moves,
            cache_token_s=scenario.cache_token_s,
        )
        self._free_graders = [0.0] * scenario.graders
        self._groups: dict[int, Group] = {}
        self._scorer = _Scorer(self, scenario) if scenario.reference else None
        self._ready: dict[int, deque[Group]] = {}
        """Groups that can be trained on, by step, in the order in which they became so."""
        self._ready_tokens: Counter[int] = Counter()
        self._arrived = Change(self.agenda)
        self._trainer_log = self._log_of("trainer-0", sinks)
        self._activity = Activity(self._trainer_log, "trainer", breakdown=True)

    @property
    def moved(self) -> int:
        """Running responses that went on in another engine."""
        return self._service.moved

    def _log_of(self, worker: str, sinks: tuple[Sink, ...]) -> VirtualLog:
        """The log of a worker; colocated, all work is that of one process."""
        return VirtualLog(self.agenda, sinks, worker if self._scenario.placement == "separated" else "")

    def run(self) -> None:
        """Simulate to the end."""
        self.agenda.start(self._feed())
        self.agenda.start(self._train())
        if rate := self._scenario.engine_failures_per_hour:
            chance = random.Random(self._scenario.seed)
            for engine in self.engines:
                self.agenda.start(self._fail(engine, random.Random(chance.random()), rate / 3600))
        with spared():  # the lengths of all groups are many objects
            self.agenda.run()

    def _feed(self) -> Process:
        """Let the prompts of each step in as soon as the weights admit them."""
        scenario = self._scenario
        for step in range(scenario.steps):
            needed = oldest_version(step, scenario.max_staleness)
            while self.version < needed:
                yield self._published
            yield scenario.hop_s
            self._service.generate([self._group(step, number, needed) for number in range(scenario.groups_per_step)])

    def _fail(self, engine: SimulatedEngine, chance: random.Random, rate: float) -> Process:
        """Have an engine die now and then."""
        while True:
            yield chance.expovariate(rate)
            died = self.agenda.now
            lost = engine.die(self._scenario.restart_s, self._service.decide)
            self._emit(EventKind.WORKER_DIED, "rollout", died, worker=engine.name, info={"how": "simulated"})
            self._service.lost(lost)
            yield self._scenario.restart_s
            self._emit(EventKind.WORKER_STARTED, "rollout", died, worker=engine.name)

    def _group(self, step: int, number: int, needed: int) -> list[Response]:
        scenario = self._scenario
        group = step * scenario.groups_per_step + number
        scripts = self._replay.groups[group][: scenario.group_size]
        expected = self._expected([script.tokens for script in scripts])
        responses = [
            Response(
                step=step,
                group=group,
                number=sample,
                script=script,
                tokens=script.tokens,
                needed=needed,
                expected=tokens,
                priority={"first_in": 0.0, "longest_first": tokens, "shortest_first": -tokens}[scenario.order],
            )
            for sample, (script, tokens) in enumerate(zip(scripts, expected, strict=True))
        ]
        tokens = scripts[0].prompt_tokens + sum(response.tokens for response in responses)
        self._groups[group] = Group(group, step, responses, len(responses), tokens)
        return responses

    def _expected(self, tokens: Sequence[int]) -> list[float]:
        match self._scenario.knows_lengths:
            case "nothing":
                return [self._longest] * len(tokens)
            case "lengths":
                return [each * self._surprise() for each in tokens]
            case "group_means":
                return [sum(tokens) / len(tokens) * self._surprise()] * len(tokens)

    def _surprise(self) -> float:
        """What an expectation is multiplied by."""
        return math.exp(self._random.gauss(0.0, self._scenario.expectation_error))

    def _grade(self, response: Response, engine: SimulatedEngine) -> None:
        """Take a response that has ended: the next free grader grades it."""
        self._service.ended(engine)
        if self._tells_samples:
            self._tell_sample(response, engine)
        arrived = self.agenda.now + self._scenario.hop_s
        start = max(arrived, self._free_graders[0])
        end = start + (response.script.reward_s or self._scenario.grade_s)
        heapreplace(self._free_graders, end)
        self.agenda.at(end, lambda: self._graded(response, start))

    def _graded(self, response: Response, start: float) -> None:
        if self._tells_samples:
            self.log.emit(
                Event(
                    task=EventKind.REWARD,
                    actor="reward",
                    start=start,
                    end=self.agenda.now,
                    step=response.step,
                    samples=1,
                )
            )
        group = self._groups[response.group]
        group.missing -= 1
        if not group.missing:
            del self._groups[response.group]
            after = self._scorer.score if self._scorer else self.let_train
            self.agenda.after(2 * self._scenario.hop_s, lambda: after(group))  # by way of the advantages

    def let_train(self, group: Group) -> None:
        """Let the trainer have a group."""
        self._ready.setdefault(group.step, deque()).append(group)
        self._ready_tokens[group.step] += group.tokens
        self._arrived.tell()

    def _train(self) -> Process:
        scenario, trainer = self._scenario, self._scenario.trainer
        for step in range(scenario.steps):
            start = self.agenda.now
            yield scenario.step_s
            groups: list[Group] = []
            while len(groups) < scenario.groups_per_step:
                claim = yield from self._claim(step, len(groups))
                groups += claim
                if scenario.mini_batches == 1:
                    yield from self._compute(step, EventKind.ACTOR, self._update_s(claim), claim)
                else:  # the loss needs log-probabilities of the weights before the step's first update
                    yield from self._compute(step, EventKind.ACTOR, self._score_s(claim), claim)
            if scenario.mini_batches > 1:
                groups.sort(key=lambda group: group.number)
                size = -(-len(groups) // scenario.mini_batches)
                for first in range(0, len(groups), size):
                    part = groups[first : first + size]
                    yield from self._compute(step, EventKind.ACTOR, self._update_s(part), part)
                    yield from self._compute(step, EventKind.OPTIMIZER, trainer.times.optimizer_s(), [])
            else:
                yield from self._compute(step, EventKind.OPTIMIZER, trainer.times.optimizer_s(), [])
            yield from self._publish(step + 1)
            self._tell_step(step, start, groups)
        self.agenda.stop()

    def _claim(self, step: int, taken: int) -> Generator[float | Change, None, list[Group]]:
        """Wait for groups of a step: all of them, or a micro-batch's worth. Return them."""
        scenario = self._scenario
        missing = scenario.groups_per_step - taken
        self._activity.enter("data")
        while True:
            ready = self._ready.get(step, deque())
            claim = self._claimable(step, ready, missing)
            if claim:
                break
            yield self._arrived
        self._activity.leave("data")
        for group in claim:
            ready.remove(group)
            self._ready_tokens[step] -= group.tokens
        return claim

    def _claimable(self, step: int, ready: deque[Group], missing: int) -> list[Group]:
        """The groups that the trainer would be handed now; empty while it waits. See `TokenBudgetConfig`."""
        scenario = self._scenario
        if not scenario.streaming:
            return sorted(ready, key=lambda group: group.number) if len(ready) == missing else []
        budget = scenario.micro_batch_tokens * scenario.trainer.ranks
        if len(ready) < missing and self._ready_tokens[step] < budget:
            return []
        candidates = list(ready)
        if scenario.in_order:
            by_number = {group.number: group for group in ready}
            candidates = []
            first = (step + 1) * scenario.groups_per_step - missing
            while (number := first + len(candidates)) in by_number:
                candidates.append(by_number[number])
        claim: list[Group] = []
        tokens = 0
        for group in candidates:
            if claim and tokens + group.tokens > budget:
                return claim
            claim.append(group)
            tokens += group.tokens
        return claim if len(claim) == missing or tokens >= budget else []

    def _micro_batches(self, groups: Sequence[Group]) -> list[list[list[GroupPart]]]:
        """The micro-batches of each rank."""
        budget = self._scenario.micro_batch_tokens
        samples = [one for group in groups for one in group.lengths]
        shares = shared(samples, self._scenario.trainer.ranks)
        return [plan_micro_batches([samples[index] for index in share], budget) for share in shares]

    def _update_s(self, groups: Sequence[Group]) -> float:
        """Seconds of the slowest rank: the longest micro-batch fills and empties its pipeline."""
        trainer = self._scenario.trainer
        shares = [list(map(trainer.times.update_s, batches)) for batches in self._micro_batches(groups)]
        return max(sum(each) + (trainer.stages - 1) * max(each, default=0.0) for each in shares)

    def _score_s(self, groups: Sequence[Group]) -> float:
        times = self._scenario.trainer.times
        return max(sum(map(times.score_s, batches)) for batches in self._micro_batches(groups))

    def _compute(self, step: int, kind: EventKind, seconds: float, groups: Sequence[Group]) -> Process:
        """Have the trainer work. Where the engine has the same device, it stands still meanwhile."""
        colocated = self.engines if self._scenario.placement == "colocated" else []
        if colocated:
            yield max(engine.pause() for engine in colocated)
        start = self.agenda.now
        self._activity.enter("update")
        yield from self._work(seconds)
        self._activity.leave("update")
        for engine in colocated:
            engine.resume()
        samples = sum(len(group.responses) for group in groups)
        tokens = sum(one.tokens for group in groups for one in group.responses)
        self._emit(kind, "trainer", start, step=step, version=step, samples=samples or None, tokens=tokens or None)

    def _work(self, seconds: float) -> Process:
        """Let the trainer compute. Where it shares a machine with engines, each slows the other down."""
        scenario = self._scenario
        if scenario.placement == "colocated" or scenario.engine_beside == scenario.trainer_beside == 1:
            yield seconds
            return
        for engine in self.engines:
            engine.keep_pace(scenario.engine_beside)
        while seconds > _ROUNDING_S:
            pace = scenario.trainer_beside if any(engine.computes for engine in self.engines) else 1.0
            start = self.agenda.now
            yield seconds * pace, self._turned
            seconds -= (self.agenda.now - start) / pace
        for engine in self.engines:
            engine.keep_pace(1.0)

    def _publish(self, version: int) -> Process:
        """Hand the weights on, and wait for the engines where the mode says so."""
        scenario = self._scenario
        if scenario.trainer.publish_s:
            start = self.agenda.now
            self._activity.enter("weight_transfer")
            yield scenario.trainer.publish_s
            self._activity.leave("weight_transfer")
            self._emit(EventKind.WEIGHTS_PUBLISH, "trainer", start, version=version)
        for engine in self.engines:
            self.agenda.after(engine.kind.arrive_s, _arrival(engine, version))
        if scenario.weights == "synchronous":
            start = self.agenda.now
            self._activity.enter("weights")
            for engine in self.engines:
                while engine.version < version:
                    yield engine.installed
            self._activity.leave("weights")
            self._emit(EventKind.WEIGHTS_WAIT, "trainer", start, version=version)
        self.version = version
        self._published.tell()

    def _emit(self, kind: EventKind, actor: str, start: float, **fields: Any) -> None:
        log = self._trainer_log if actor == "trainer" else self.log
        log.emit(Event(task=kind, actor=actor, start=start, end=self.agenda.now, **fields))

    def _tell_sample(self, response: Response, engine: SimulatedEngine) -> None:
        self._emit(
            EventKind.SAMPLE,
            "engine",
            response.start,
            worker=engine.name,
            step=response.step,
            tokens=sum(turn.generated_tokens for turn in response.script.turns),
            version=response.first_version,
            info={
                "group": response.group,
                "sample": response.number,
                "prompt_tokens": response.script.prompt_tokens,
                "finish_reason": response.script.finish_reason.value,
                "last_version": response.last_version,
            },
        )

    def _tell_step(self, step: int, start: float, groups: Sequence[Group]) -> None:
        for engine in self.engines:
            engine.activity.emit()
        self._activity.emit()
        responses = [response for group in groups for response in group.responses]
        tokens = [sum(turn.generated_tokens for turn in response.script.turns) for response in responses]
        ages = [staleness(step, response.first_version) for response in responses]
        seconds = self.agenda.now - start
        self._emit(
            EventKind.STEP,
            "driver",
            start,
            step=step,
            version=step,
            samples=len(responses),
            tokens=sum(tokens),
            metrics={
                "response_tokens_mean": sum(tokens) / len(tokens),
                "response_tokens_max": float(max(tokens)),
                "staleness_mean": sum(ages) / len(ages),
                "staleness_max": float(max(ages)),
                "samples_per_s": len(tokens) / seconds,
                "tokens_per_s": sum(tokens) / seconds,
            },
        )


def _arrival(engine: SimulatedEngine, version: int) -> Any:
    return lambda: engine.arrive(version)


class _Scorer:
    """The workers of a reference: the next free one takes what is there."""

    def __init__(self, run: SimulatedRun, scenario: Scenario) -> None:
        assert scenario.reference is not None
        self._run = run
        self._times: TrainerTimes = scenario.reference.times
        self._budget = scenario.micro_batch_tokens
        self._free = [0.0] * scenario.reference.workers

    def score(self, group: Group) -> None:
        """Score a group, then let the trainer have it."""
        agenda = self._run.agenda
        start = max(agenda.now, self._free[0])
        end = start + sum(map(self._times.score_s, plan_micro_batches(group.lengths, self._budget)))
        heapreplace(self._free, end)
        agenda.at(end, lambda: self._scored(group, start))

    def _scored(self, group: Group, start: float) -> None:
        run = self._run
        run.log.emit(
            Event(task=EventKind.REFERENCE, actor="reference", start=start, end=run.agenda.now, step=group.step)
        )
        run.let_train(group)

"""A run in simulated time: the main loop of `run.pipeline`, with work that takes time and computes nothing.

    prompts ─▶ service ─▶ engines ─▶ graders, (reference), (values) ─▶ advantages ─▶ trainer ─▶ weights ─▶ engines
       ▲                                                                   └───────▶ (critic)     │
       └───────── prompts of later steps, as soon as weights admit them ◀─────────────────────────┘

    part        waits for
    prompts     weights that are at most `max_staleness` updates older than those their step trains; the critic's update
    engines     prompts, and the weights that may begin them
    graders     responses; a free grader
    reference   the responses of whole groups; a turn, where it is colocated
    values      the same; a turn at the critic's devices
    advantages  gradings and scores of a group, or of all of its step
    trainer     the groups of its step: all of them, or, streaming, a micro-batch's worth
    critic      the same; it trains beside the trainer

A group that the algorithm has remade begins again as a group of the workload, which is drawn.

It emits the events of a real run, so that everything which reads those reads these.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from typing import Any

from tailrace.activity import Activity
from tailrace.config.weights import ONE_VERSION
from tailrace.errors import PlanError
from tailrace.events import Event, Sink
from tailrace.host.collector import spared
from tailrace.planning.admission import oldest_version, staleness
from tailrace.planning.dispatch.factory import make_policy
from tailrace.registers.events import EventKind
from tailrace.registers.phases import Work
from tailrace.simulator.advantages import SimulatedAdvantages
from tailrace.simulator.agenda import Agenda, Change, Process, Turns
from tailrace.simulator.devices import Devices
from tailrace.simulator.engines import SimulatedEngine
from tailrace.simulator.fleet import SimulatedFleet
from tailrace.simulator.lengths import SimulatedLengths
from tailrace.simulator.log import VirtualLog
from tailrace.simulator.prompts import SimulatedPrompts
from tailrace.simulator.samples import Group, Response
from tailrace.simulator.scenario import Elastic, EngineKind, Scenario, Scorer, TrainerKind
from tailrace.simulator.scorer import SeparatedScorer, SharingScorer, SimulatedScorer, tell_reference, tell_values
from tailrace.simulator.service import SimulatedService
from tailrace.simulator.trainer import SimulatedPublisher, SimulatedTrainer
from tailrace.workloads.replay import Replay


def _check_caches(scenario: Scenario, longest: int) -> None:
    """Check that each cache holds the longest sample: a batch relies on it.

    Raises:
        PlanError: one does not.
    """
    kinds = [*scenario.engines, *([] if scenario.elastic is None else [scenario.elastic.joining])]
    for kind in kinds:
        others = [] if kind.adaptive_tp is None else kind.adaptive_tp.cache_tokens.values()
        if (held := min(kind.cache_tokens, *others, longest)) < longest:
            raise PlanError(
                f"the cache of an engine of {kind.name} holds {held:,.0f} tokens, and the longest sample has "
                f"{longest:,}; give it more, such as by engine.kv_cache_gib, or a higher TP degree"
            )


class SimulatedRun:
    """Call `run` once."""

    def __init__(
        self,
        scenario: Scenario,
        replay: Replay,
        *,
        sinks: tuple[Sink, ...] = (),
        samples: bool = True,
        trained: int | None = None,
        drawn: Replay | None = None,
    ) -> None:
        """`replay`: the lengths of all groups, at least as many as the run takes. `samples`: whether each response has
        an event; where the run chooses the number of engines, each has. `trained`: steps after which it ends, by
        default all of the scenario. `drawn`: what the replay repeats, if it does; each time is remade alike.

        Raises:
            PlanError: a cache does not hold the longest sample.
        """
        self.agenda = Agenda()
        self.log = VirtualLog(self.agenda, sinks)
        self._scenario = scenario
        self._trained = scenario.steps if trained is None else trained
        _check_caches(scenario, replay.longest_sample)
        self._lengths = SimulatedLengths(scenario, replay.longest_response)
        self._prompts = SimulatedPrompts(scenario, replay, self._lengths, drawn=drawn)
        self._tells_samples = samples
        self._turned = Change(self.agenda)
        """Told when an engine begins or ends to compute."""
        self._turns = Turns(self.agenda)
        self._counts: Counter[str] = Counter()
        """The engines of each pool that there have been."""
        self._sinks = sinks
        self._chance = random.Random(scenario.seed)
        """Of deaths."""
        self.engines: list[SimulatedEngine] = []
        """All that there have been."""
        for kind in (each for each in scenario.engines for _ in range(each.engines)):
            self._make_engine(kind)
        self._service = self._make_service()
        self._admitted = 0
        """The version whose prompts have been let in last; all models have been trained so far."""
        self._advanced = Change(self.agenda)
        self._model_logs: list[VirtualLog] = []
        """Of the models that are trained."""
        devices = Devices(self.agenda, self._service.engines) if scenario.placement == "colocated" else None
        trainer_log = self._log_of("trainer-0")
        self._trainer = self._make_trainer(scenario.trainer, trainer_log, "trainer", devices)
        self._publisher = SimulatedPublisher(
            self.agenda, scenario, self._service.engines, trainer_log, self._trainer.activity
        )
        self._activities = [self._trainer.activity]
        """Those of all workers but engines."""
        self._free_graders = [0.0] * scenario.graders
        self._groups: dict[int, Group] = {}
        self._advantages = SimulatedAdvantages(self.agenda, scenario, self._let_train, self._remake)
        self._remade = 0
        """Groups that were remade since the last step was told."""
        self._critic: SimulatedTrainer | None = None
        self._scorers: list[SimulatedScorer] = []
        self._make_others(devices)
        self._follow(scenario.elastic)

    def _make_service(self) -> SimulatedService:
        scenario = self._scenario
        policy = make_policy(scenario.dispatch, self._lengths.history, seed=scenario.seed)
        return SimulatedService(
            self.agenda,
            self.engines,
            policy,
            lengths=self._lengths,
            order=scenario.order,
            group_size=scenario.group_size,
            splits=scenario.knows_lengths == "lengths" and policy.plans,
            may_move=scenario.moves and scenario.weights not in ONE_VERSION,
            may_go_on=scenario.weights not in ONE_VERSION,
        )

    def _follow(self, elastic: Elastic | None) -> None:
        """Have the number of engines follow the events, where the run chooses it."""
        if elastic is None:
            return
        name = elastic.joining.name
        prefix = f"{name}: " if any(kind.name != name for kind in self._scenario.engines) else ""
        fleet = SimulatedFleet(self.agenda, elastic, self._service, self.log, self._join, prefix=prefix)
        self._tells_samples = True  # decisions need them
        for log in (self.log, *self._model_logs):
            log.listen(fleet.see)

    def _make_trainer(self, kind: TrainerKind, log: VirtualLog, name: str, devices: Devices | None) -> SimulatedTrainer:
        self._model_logs.append(log)
        return SimulatedTrainer(
            self.agenda,
            self._scenario,
            kind,
            self._service.engines,
            log,
            name=name,
            devices=devices,
            turned=self._turned,
        )

    def _make_others(self, devices: Devices | None) -> None:
        """Make the models beside the policy. `devices`: those that all models have in turns; None where they do not."""
        reference, critic = self._scenario.reference, self._scenario.critic
        if reference is not None:
            self._scorers.append(self._make_reference(reference, devices))
        if critic is not None:
            self._make_critic(critic, devices or Devices(self.agenda))

    def _make_reference(self, kind: Scorer, devices: Devices | None) -> SimulatedScorer:
        if devices is None:
            budget = self._scenario.micro_batch_tokens
            return SeparatedScorer(self.agenda, kind, self.log, budget, self._advantages.take)
        activity = Activity(self.log, "reference", breakdown=True)
        self._activities.append(activity)
        return self._sharing(kind, partial(tell_reference, self.log), devices, activity, "reference")

    def _make_critic(self, kind: TrainerKind, devices: Devices) -> None:
        """Make the critic, which gives values and is trained on its devices in turns."""
        log = self._log_of("critic")
        self._critic = self._make_trainer(kind, log, "critic", devices)
        self._activities.append(self._critic.activity)
        values = Scorer(times=kind.times, workers=kind.ranks, stages=kind.stages)
        tell = partial(tell_values, log)
        self._scorers.append(self._sharing(values, tell, devices, self._critic.activity, "update"))

    def _sharing(
        self,
        kind: Scorer,
        tell: Callable[[Sequence[Group], float], None],
        devices: Devices,
        activity: Activity,
        phase: Work,
    ) -> SharingScorer:
        return SharingScorer(
            self.agenda,
            kind,
            tell,
            self._scenario.micro_batch_tokens,
            self._advantages.take,
            devices=devices,
            most_groups=self._scenario.groups_per_step,
            activity=activity,
            phase=phase,
        )

    @property
    def moved(self) -> int:
        """Running responses that went on in another engine."""
        return self._service.moved

    @property
    def present(self) -> Counter[str]:
        """The engines that there are now, by their pool."""
        return Counter(engine.kind.name for engine in self._service.engines)

    def _log_of(self, worker: str) -> VirtualLog:
        """The log of a worker; colocated, all work is that of one process."""
        return VirtualLog(self.agenda, self._sinks, worker if self._scenario.placement == "separated" else "")

    def _make_engine(self, kind: EngineKind) -> SimulatedEngine:
        name = f"{kind.name}-{self._counts[kind.name]}"
        self._counts[kind.name] += 1
        engine = SimulatedEngine(
            self.agenda,
            name,
            kind,
            self._scenario.weights,
            self._log_of(name),
            turns=self._turns,
            on_ended=self._grade,
            on_turn=self._turned.tell,
        )
        self.engines.append(engine)
        if self._scenario.engine_failures_per_hour:
            self.agenda.start(self._fail(engine, random.Random(self._chance.random())))
        return engine

    def _join(self, kind: EngineKind) -> SimulatedEngine:
        """Make an engine that joins the run: it has loaded, and the newest weights are on their way to it."""
        engine = self._make_engine(replace(kind, starts_s=0.0))
        self._publisher.send_to(engine)
        return engine

    def run(self) -> None:
        """Simulate to the end."""
        self.agenda.start(self._feed())
        self.agenda.start(self._train())
        with spared():  # the lengths of all groups are many objects
            self.agenda.run()

    def _feed(self) -> Process:
        """Let the prompts of each step in as soon as the weights admit them."""
        scenario = self._scenario
        for step in range(scenario.steps):
            needed = oldest_version(step, scenario.max_staleness)
            while self._admitted < needed:
                yield self._advanced
            yield scenario.hop_s
            self._generate([self._prompts.group(step, number, needed) for number in range(scenario.groups_per_step)])

    def _fail(self, engine: SimulatedEngine, chance: random.Random) -> Process:
        """Have an engine die now and then."""
        while True:
            yield chance.expovariate(self._scenario.engine_failures_per_hour / 3600)
            if engine.is_leaving:
                return
            died = self.agenda.now
            lost = engine.die(self._scenario.restart_s, self._service.decide)
            self._emit(EventKind.WORKER_DIED, "rollout", died, worker=engine.name, info={"how": "simulated"})
            self._service.lost(lost)
            yield self._scenario.restart_s
            self._emit(EventKind.WORKER_STARTED, "rollout", died, worker=engine.name)

    def _generate(self, groups: Sequence[Group]) -> None:
        """Have groups generated, each of which needs its gradings and the scores of each model."""
        for group in groups:
            group.needed = 1 + len(self._scorers)
            self._groups[group.number] = group
        self._service.generate([group.responses for group in groups])

    def _remake(self, group: Group) -> None:
        """Have another group generated in the place of one that was thrown away."""
        self._remade += 1
        self._generate([self._prompts.instead_of(group)])

    def _grade(self, response: Response, engine: SimulatedEngine) -> None:
        """Take a response that has ended: the next free grader grades it."""
        self._service.ended(response, engine)
        if self._tells_samples:
            self._tell_sample(response, engine)
        arrived = self.agenda.now + self._scenario.hop_s
        self._score_if_whole(self._groups[response.group], arrived)
        start = max(arrived, self._free_graders[0])
        end = start + (response.script.reward_s or self._scenario.grade_s)
        heapreplace(self._free_graders, end)
        self.agenda.at(end, lambda: self._graded(response, start))

    def _score_if_whole(self, group: Group, arrived: float) -> None:
        """Have a group scored once its last response has ended."""
        group.generating -= 1
        if not group.generating:
            for scorer in self._scorers:
                self.agenda.at(arrived, partial(scorer.score, group))

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
            self._advantages.take(group)

    def _let_train(self, group: Group) -> None:
        """Let every model be trained on a group."""
        self._trainer.let_train(group)
        if self._critic is not None:
            self._critic.let_train(group)

    def _train(self) -> Process:
        """Train every model for one step after the other, at the same time."""
        for step in range(self._trained):
            start = self.agenda.now
            if self._critic is not None:
                self.agenda.start(self._critic.train(step))
            groups = yield from self._trainer.train(step)
            yield from self._publisher.publish(step + 1)
            self._tell_step(step, start, groups)
            while self._critic is not None and self._critic.trained_steps <= step:
                yield self._critic.trained
            self._admitted = step + 1
            self._advanced.tell()
        if self._critic is not None:  # it may have gone on after the last step
            self._tell_times()
        self.agenda.stop()

    def _emit(self, kind: EventKind, actor: str, start: float, **fields: Any) -> None:
        self.log.emit(Event(task=kind, actor=actor, start=start, end=self.agenda.now, **fields))

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

    def _tell_times(self) -> None:
        """Tell where the time of each worker went since the last call."""
        for engine in self.engines:
            if engine.in_hand or not engine.is_leaving:
                engine.activity.emit()
        for activity in self._activities:
            activity.emit()

    def _tell_step(self, step: int, start: float, groups: Sequence[Group]) -> None:
        self._tell_times()
        responses = [response for group in groups for response in group.responses]
        tokens = [sum(turn.generated_tokens for turn in response.script.turns) for response in responses]
        ages = [staleness(step, response.first_version) for response in responses]
        seconds = self.agenda.now - start
        remade: dict[str, float] = {}
        if self._scenario.remaking is not None:
            remade, self._remade = {"remade_groups": float(self._remade)}, 0
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
                **remade,
            },
        )

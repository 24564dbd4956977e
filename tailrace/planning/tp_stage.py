"""When an engine is asked about its TP degree, and what follows from the answers.

A stage begins with the first request of an idle engine. It ends when the engine is idle again. The controller chooses
the degree for the full batch, and may change it as often as that pays. At the end of the stage the engine returns to
the degree of the full batch, since the next stage is likely to be as large. Where requests come all the time, another
stage begins whenever the batch has doubled.

    finished steps ──▶ time of a step ────┐
    finished samples ──▶ lengths ─────────┼──▶ SwitchController ──Decision──▶ whoever has the ranks
    unfinished sequences ─────────────────┘
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.config.engine import AdaptiveTPConfig
from tailrace.planning.dispatch.base import Degree
from tailrace.planning.dispatch.costs import StepCosts, fitted
from tailrace.planning.latency import DecodedStep
from tailrace.planning.remaining import LengthHistory, Unfinished, make_estimate
from tailrace.planning.tp_decision import Candidate, Decision, Snapshot, SwitchTerms
from tailrace.planning.tp_profile import TPProfile
from tailrace.planning.tp_switch import SwitchController
from tailrace.planning.tp_verdict import SwitchReport


@dataclass(slots=True)
class _Stage:
    """The time between an idle engine and the next one; where work comes all the time, until the batch has doubled."""

    home_tp: int
    """The degree that was decided on when most sequences were unfinished."""
    most: int
    """The number of unfinished sequences at that time."""
    fewest: int
    """The smallest number of unfinished sequences at a question."""
    ruled_out: dict[int, str] = field(default_factory=dict)

    def home_of(self, unfinished: int) -> int | None:
        """Return the degree to return to; None where the current decision sets it."""
        return self.home_tp if unfinished < self.most else None


class StagedTP:
    """The questions and answers of one engine. It has no ranks: it is told what they do."""

    def __init__(
        self,
        config: AdaptiveTPConfig,
        profile: TPProfile,
        *,
        max_batch_size: int,
        cache_tokens: Callable[[int], float],
        kv_bytes_per_token: int,
    ) -> None:
        """Start without a stage.

        Args:
            max_batch_size: the most sequences that a replica decodes together, at any degree.
            cache_tokens: returns the context tokens that a replica of a profiled degree has room for.
            kv_bytes_per_token: see `Snapshot`.
        """
        self.degrees = tuple(tp for tp in profile.degrees if config.degrees is None or tp in config.degrees)
        """The degrees that the controller chooses from."""
        self._config = config
        self._slots = max_batch_size
        self._ranks = profile.key.ranks
        self._cache_tokens = {tp: cache_tokens(tp) for tp in profile.degrees}
        self._kv_bytes_per_token = kv_bytes_per_token
        self._history, self._others = LengthHistory(), LengthHistory()
        self._estimate = make_estimate(config.estimate, self._history, self._others)
        self._controller = SwitchController(
            profile,
            self._estimate,
            max_batch_size=max_batch_size,
            least_gain=config.least_gain,
            steps_between=config.steps_between,
            look_ahead=config.look_ahead,
            returns=config.returns,
        )
        self._stage: _Stage | None = None
        self._decision: Decision | None = None
        """The last one: what a change costs depends on what is cached."""
        self._costs = {tp: _costs_of(profile, tp) for tp in self.degrees}

    @property
    def in_stage(self) -> bool:
        """Whether a stage is open."""
        return self._stage is not None

    def stepped(self, step: DecodedStep) -> None:
        """Learn from a decode step of one replica; see `SwitchController.observe`."""
        self._controller.observe(step)

    def ended(self, tokens: int, group: int = 0) -> None:
        """Learn from the length of a finished response. `group`: below 0 where it is not trained on."""
        (self._others if group < 0 else self._history).add(tokens)

    def begin(self) -> None:
        """Note that a request has come to the idle engine."""
        self._controller.begin()

    def asks(self, unfinished: int, tp: int, *, can_switch: bool = True) -> bool:
        """Whether to `decide` now. Call it whenever the engine could change."""
        due = self._controller.due(unfinished)
        if not (due and self._estimate.ready and can_switch):
            return False
        if self._stage is None or unfinished >= 2 * self._stage.fewest:
            self._stage = _Stage(tp, most=unfinished, fewest=unfinished)
        return True

    def unfinished(
        self, prompt: int, generated: int, limit: int, expected: float | None, *, group: int, block: int
    ) -> Unfinished:
        """A sequence as the controller sees it.

        Args:
            limit: the most tokens that its request allows.
            group: those of a group share the whole blocks of their prompt. -1: it shares them with none. Those below 0
                are not trained on.
            block: tokens of a block.
        """
        longest = self._config.max_response_tokens or limit
        return Unfinished(
            context=prompt + generated,
            generated=generated,
            most=max(1, longest - generated),
            expected=expected,
            group=group,
            shared=0 if group == -1 else prompt // block * block,
            trains=group >= 0,
        )

    def decide(
        self,
        tp: int,
        replicas: tuple[tuple[Unfinished, ...], ...],
        waiting: tuple[Unfinished, ...],
        groups: frozenset[int],
    ) -> Decision:
        """Return the controller's decision for a state of the engine; see `Snapshot`."""
        self._decision = self._controller.decide(self._snapshot(tp, replicas, waiting, groups))
        return self._decision

    def _snapshot(
        self,
        tp: int,
        replicas: tuple[tuple[Unfinished, ...], ...],
        waiting: tuple[Unfinished, ...],
        groups: frozenset[int],
    ) -> Snapshot:
        unfinished = sum(map(len, replicas)) + len(waiting)
        return Snapshot(
            tp=tp,
            degrees=self.degrees,
            replicas=replicas,
            waiting=waiting,
            kv_bytes_per_token=self._kv_bytes_per_token,
            cache_tokens=self._cache_tokens,
            groups=groups,
            ruled_out={} if self._stage is None else self._stage.ruled_out,
            home_tp=None if self._stage is None else self._stage.home_of(unfinished),
        )

    def went_on(self, decision: Decision, tp: int) -> None:
        """Note that the engine goes on with degree `tp` after a decision."""
        assert self._stage is not None
        stage, unfinished = self._stage, decision.unfinished
        stage.fewest = min(stage.fewest, unfinished)
        if unfinished >= stage.most:
            stage.most, stage.home_tp = unfinished, tp

    def switched(self, decision: Decision, report: SwitchReport) -> None:
        """Learn from a switch. Where the cache is computed again, the steps that follow do that work."""
        candidate = chosen(decision)
        if candidate.state != "recompute":
            predicted_s = candidate.switch_s - candidate.capture_s - candidate.groups_s
            self._controller.observe_switch(predicted_s, report.total_s - report.groups_s)

    def rule_out(self, tp: int, why: str) -> None:
        """Choose a degree no more in this stage."""
        assert self._stage is not None
        self._stage.ruled_out[tp] = why

    def home_of(self, tp: int) -> int:
        """The degree for the end of the stage, which the engine reaches with degree `tp`."""
        assert self._stage is not None
        return self._stage.home_tp if self._config.returns else tp

    def return_cost(self, tp: int, groups: frozenset[int]) -> SwitchTerms:
        """The terms of the return from degree `tp`, where nothing is cached any more."""
        return self._controller.return_cost(self._snapshot(tp, (), (), groups), self.home_of(tp))

    def close(self) -> None:
        """End the stage."""
        self._stage = None

    def other_degrees(self, tp: int) -> list[Degree]:
        """The degrees that an engine of degree `tp` may change to in this stage, with the costs of the last decision.

        So those who place responses know that a draining engine becomes faster by itself. Callable from any thread.
        """
        decision, stage = self._decision, self._stage
        if decision is None:
            return []
        ruled_out = {} if stage is None else stage.ruled_out
        back_s = sum(candidate.switch_s for candidate in decision.candidates if candidate.tp == tp)
        return [
            Degree(
                times=self._costs[candidate.tp].times(self._controller.predictor.ratio(candidate.tp, replicas)),
                tp=candidate.tp,
                replicas=replicas,
                slots=self._slots,
                cache_tokens=int(self._cache_tokens[candidate.tp]),
                # the degree that it has just left costs about as much as the way here
                switch_s=(back_s if candidate.tp == decision.tp else candidate.switch_s) + candidate.return_s,
            )
            for candidate in decision.candidates
            if candidate.tp != tp and candidate.tp in self._costs and candidate.tp not in ruled_out
            for replicas in (self._ranks // candidate.tp,)
        ]


def chosen(decision: Decision) -> Candidate:
    """The candidate that a decision is for."""
    return next(candidate for candidate in decision.candidates if candidate.tp == decision.chosen)


def _costs_of(profile: TPProfile, tp: int) -> StepCosts:
    """The steps of a degree with all of its replicas at work, as profiled."""
    replicas = profile.key.ranks // tp
    decode = [point for point in profile.decode if point.tp == tp]
    beside = [point for point in decode if point.replicas == replicas] or decode
    return fitted(
        [(point.batch_size, point.context_tokens, point.seconds) for point in beside],
        [(point.batch_size * point.length, point.seconds) for point in profile.prefill if point.tp == tp],
    )

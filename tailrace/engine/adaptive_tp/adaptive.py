"""Adaptive TP: asks the controller for a TP degree as a batch drains, and carries out its decisions.

A stage begins with the first request of an idle engine. It ends when the engine is idle again. The controller chooses
the degree for the full batch, and may change it as often as that pays. At the end of the stage the engine returns to
the degree of the full batch, since the next stage is likely to be as large. Where requests come all the time, another
stage begins whenever the batch has doubled.

    finished steps ──▶ time of a step ────┐
    finished samples ──▶ lengths ─────────┼──▶ SwitchController ──Decision──▶ Arrangement.switch
    unfinished sequences ─────────────────┘
"""

import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tailrace.config.engine import AdaptiveTPConfig
from tailrace.engine.adaptive_tp.profile_key import default_path, profile_key
from tailrace.engine.arrangement import Arrangement, SwitchFailed
from tailrace.engine.kv_cache import DTYPES, token_bytes
from tailrace.engine.lane import Lane
from tailrace.engine.ranks.switch import SwitchRefused, SwitchReport
from tailrace.engine.scheduling.sequence import Sequence as Response
from tailrace.errors import ConfigError, TailraceWarning
from tailrace.models.architecture import Architecture
from tailrace.planning.dispatch.base import Degree
from tailrace.planning.dispatch.costs import StepCosts, fitted
from tailrace.planning.remaining import LengthHistory, Unfinished, make_estimate
from tailrace.planning.tp_decision import Decision, Snapshot
from tailrace.planning.tp_profile import TPProfile
from tailrace.planning.tp_switch import SwitchController
from tailrace.types import FinishReason, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One question to the controller and its outcome, for the event log. Times are those of `time.perf_counter`."""

    began_at: float
    ended_at: float
    waited_s: float = 0.0
    """The part of that time that was spent waiting for steps under way."""
    decision: Decision | None
    """None at the end of a stage: there the engine returns, if it has to, without a question."""
    source_tp: int
    target_tp: int
    report: SwitchReport | None = None
    """The report of the switch; None where there was none."""
    failure: str = ""
    """The reason why a switch that was decided on did not take place."""

    @property
    def unfinished(self) -> int:
        """The number of unfinished sequences when the controller was asked; 0 where it was not asked."""
        return 0 if self.decision is None else self.decision.unfinished


@dataclass(frozen=True, slots=True)
class Wanted:
    """A switch that pays. Times are as in `Verdict`."""

    decision: Decision
    asked_at: float
    decided_at: float


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

    def decided(self, unfinished: int, tp: int) -> None:
        """Record that the engine goes on with degree `tp`."""
        self.fewest = min(self.fewest, unfinished)
        if unfinished >= self.most:
            self.most, self.home_tp = unfinished, tp


class AdaptiveTP:
    """Changes the arrangement of one engine. Not thread-safe; called between two steps."""

    def __init__(
        self, config: AdaptiveTPConfig, profile: TPProfile, arrangement: Arrangement, architecture: Architecture
    ) -> None:
        """Prepare to decide. `architecture` is that of the whole model."""
        self.verdicts: list[Verdict] = []
        """The verdicts since `take` was last called."""
        self._config = config
        self._arrangement = arrangement
        self.degrees = tuple(tp for tp in profile.degrees if config.degrees is None or tp in config.degrees)
        """The degrees that the controller chooses from."""
        self._history = LengthHistory()
        self._estimate = make_estimate(config.estimate, self._history)
        self._controller = SwitchController(
            profile,
            self._estimate,
            max_batch_size=arrangement.config.max_batch_size,
            least_gain=config.least_gain,
            steps_between=config.steps_between,
            look_ahead=config.look_ahead,
        )
        self._kv_bytes_per_token = token_bytes(architecture, DTYPES[arrangement.config.dtype])
        self._stage: _Stage | None = None
        self._decision: Decision | None = None
        """The last one: what a change costs depends on what is cached."""
        self._costs = {tp: _costs_of(profile, tp) for tp in self.degrees}

    def take(self) -> list[Verdict]:
        """Return the verdicts since the last call."""
        verdicts, self.verdicts = self.verdicts, []
        return verdicts

    @property
    def in_stage(self) -> bool:
        """Whether a stage is open. `close_stage` closes it, once nothing is unfinished."""
        return self._stage is not None

    def observe(self, lanes: Iterable[Lane], samples: Iterable[Sample], *, beside: int) -> None:
        """Learn from the steps that these lanes have just completed, and from the samples that finished.

        beside: The number of lanes that computed side by side.
        """
        tp = self._arrangement.config.tp
        for lane in lanes:
            if (step := lane.decoded) is not None:
                self._controller.observe(tp, step.sequences, step.context_tokens, beside, step.seconds)
        for sample in samples:
            if sample.finish_reason is not FinishReason.ABORT:
                self._history.add(len(sample.response_ids))

    def begin(self) -> None:
        """Note that a request has come to the idle engine."""
        self._controller.begin()

    def wanted(self) -> Wanted | None:
        """Ask the controller, if a question is due. Return a switch that pays, or None."""
        unfinished, tp = self._arrangement.unfinished, self._arrangement.config.tp
        due = self._controller.due(unfinished)
        if not (due and self._estimate.ready and self._arrangement.can_switch):
            return None
        if self._stage is None or unfinished >= 2 * self._stage.fewest:
            self._stage = _Stage(tp, most=unfinished, fewest=unfinished)
        asked_at = time.perf_counter()
        decision = self.decide()
        decided_at = time.perf_counter()
        if decision.switch:
            return Wanted(decision, asked_at, decided_at)
        self._stage.decided(unfinished, tp)
        self.verdicts.append(
            Verdict(
                began_at=asked_at,
                ended_at=decided_at,
                decision=decision,
                source_tp=tp,
                target_tp=tp,
            )
        )
        return None

    def decide(self) -> Decision:
        """Return the controller's decision for the current state of the engine."""
        self._decision = self._controller.decide(self._snapshot())
        return self._decision

    def other_degrees(self, cache_tokens_per_rank: int) -> list[Degree]:
        """The degrees that the engine may change to, with the costs of the last decision. Callable from any thread.

        So those who place responses know that a draining engine becomes faster by itself.
        """
        decision, config = self._decision, self._arrangement.config
        if decision is None:
            return []
        ranks = len(self._arrangement.lanes) * config.tp
        back_s = sum(candidate.switch_s for candidate in decision.candidates if candidate.tp == config.tp)
        return [
            Degree(
                times=self._costs[candidate.tp].times(self._controller.predictor.ratio(candidate.tp, replicas)),
                tp=candidate.tp,
                replicas=replicas,
                slots=config.max_batch_size,
                cache_tokens=cache_tokens_per_rank * candidate.tp,
                # the degree that it has just left costs about as much as the way here
                switch_s=(back_s if candidate.tp == decision.tp else candidate.switch_s) + candidate.return_s,
            )
            for candidate in decision.candidates
            if candidate.tp != config.tp and candidate.tp in self._costs
            for replicas in (ranks // candidate.tp,)
        ]

    def switch(self, wanted: Wanted) -> None:
        """Carry out `wanted`. No step may be under way."""
        assert self._stage is not None
        began, decision = time.perf_counter(), wanted.decision
        (candidate,) = (candidate for candidate in decision.candidates if candidate.tp == decision.chosen)
        # Where nothing was cached at the decision (state none), the last steps may have cached something: it moves,
        # too.
        report, failure = self._switch(decision.chosen, move=candidate.state != "recompute")
        if report is not None and candidate.state != "recompute":  # with "recompute" the steps that follow do the work
            predicted_s = candidate.switch_s - candidate.capture_s - candidate.groups_s
            self._controller.observe_switch(predicted_s, report.total_s - report.groups_s)
        self._stage.decided(decision.unfinished, self._arrangement.config.tp)
        self.verdicts.append(
            Verdict(
                began_at=wanted.asked_at,
                ended_at=time.perf_counter(),
                waited_s=began - wanted.decided_at,
                decision=decision,
                source_tp=decision.tp,
                target_tp=decision.chosen,
                report=report,
                failure=failure,
            )
        )

    def close_stage(self) -> None:
        """Return to the degree of the full batch. Nothing may be unfinished."""
        assert self._stage is not None
        began, source_tp, target_tp = time.perf_counter(), self._arrangement.config.tp, self._stage.home_tp
        report, failure = None, ""
        if not self._arrangement.can_switch:
            target_tp = source_tp
        if source_tp != target_tp:
            report, failure = self._switch(target_tp, move=False)
        self.verdicts.append(
            Verdict(
                began_at=began,
                ended_at=time.perf_counter(),
                decision=None,
                source_tp=source_tp,
                target_tp=target_tp,
                report=report,
                failure=failure,
            )
        )
        self._stage = None

    def _switch(self, target: int, *, move: bool) -> tuple[SwitchReport | None, str]:
        """Switch to `target`. Return the report, or None and the reason of the failure."""
        assert self._stage is not None
        source = self._arrangement.config.tp
        try:
            return self._arrangement.switch(target, cache="move" if move else "recompute"), ""
        except (SwitchRefused, SwitchFailed) as error:
            failure = str(error)
        warnings.warn(f"TP stays {source}: {failure}", TailraceWarning, stacklevel=2)
        self._stage.ruled_out[target] = failure
        return None, failure

    def _snapshot(self) -> Snapshot:
        arrangement = self._arrangement
        tp = arrangement.config.tp
        sequences = [lane.scheduler.sequences for lane in arrangement.lanes]
        waiting = sorted((s for own in sequences for s in own if not s.cached), key=lambda s: s.order)
        return Snapshot(
            tp=tp,
            degrees=self.degrees,
            replicas=tuple(tuple(self._unfinished(s) for s in own if s.cached) for own in sequences),
            waiting=tuple(map(self._unfinished, waiting)),
            kv_bytes_per_token=self._kv_bytes_per_token,
            groups=arrangement.groups,
            ruled_out={} if self._stage is None else self._stage.ruled_out,
            home_tp=None if self._stage is None else self._stage.home_of(arrangement.unfinished),
        )

    def _unfinished(self, response: Response) -> Unfinished:
        generated = len(response.log_probs)
        context = response.prompt_length + generated
        longest = self._config.max_response_tokens or response.stop.max_tokens
        return Unfinished(
            context=context,
            generated=generated,
            most=max(1, longest - generated),
            expected=response.request.expected_tokens,
        )


def _costs_of(profile: TPProfile, tp: int) -> StepCosts:
    """The steps of a degree with all of its replicas at work, as profiled."""
    replicas = profile.key.ranks // tp
    decode = [point for point in profile.decode if point.tp == tp]
    beside = [point for point in decode if point.replicas == replicas] or decode
    return fitted(
        [(point.batch_size, point.context_tokens, point.seconds) for point in beside],
        [(point.batch_size * point.length, point.seconds) for point in profile.prefill if point.tp == tp],
    )


def open_adaptive_tp(
    arrangement: Arrangement, architecture: Architecture, *, model: str, device: torch.device
) -> AdaptiveTP | None:
    """Make the adaptive TP that the configuration asks for.

    Return None where it asks for none. Return None with a warning where the profile cannot be used.

    Args:
        architecture: The architecture of the whole model.
        model: The model's name.
    """
    config = arrangement.config
    if config.adaptive_tp is None:
        return None
    key = profile_key(config, architecture, model=model, device=device)
    path = default_path(key) if config.adaptive_tp.profile is None else Path(config.adaptive_tp.profile)
    try:
        profile = TPProfile.read(path)
        if differences := profile.key.mismatch(key):
            raise ConfigError(f"TP profile {path} is of another setting: {'; '.join(differences)}")
        if unknown := sorted(set(config.adaptive_tp.degrees or ()) - set(profile.degrees)):
            warnings.warn(
                f"TP profile {path} lacks TP {unknown[0]}, so that degree is never chosen; profile it, too",
                TailraceWarning,
                stacklevel=2,
            )
        if config.tp not in profile.degrees:
            raise ConfigError(
                f"TP profile {path} has TP {', '.join(map(str, profile.degrees))}, not {config.tp}, which the engine "
                "starts with"
            )
    except ConfigError as error:
        warnings.warn(
            f"{error}: TP stays {config.tp}; `tailrace profile tp` makes a profile", TailraceWarning, stacklevel=2
        )
        return None
    return AdaptiveTP(config.adaptive_tp, profile, arrangement, architecture)

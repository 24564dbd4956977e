"""Adaptive TP: asks for a TP degree as a batch drains, and carries out the decisions.

    lanes ──their sequences, steps and samples──▶ StagedTP ──Decision──▶ Arrangement.switch

`planning.tp_stage` says when it is asked.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tailrace.config.engine import AdaptiveTPConfig
from tailrace.engine.adaptive_tp.profile_key import default_path, profile_key
from tailrace.engine.arrangement import Arrangement, SwitchFailed
from tailrace.engine.kv_cache import DTYPES, token_bytes
from tailrace.engine.lane import Lane
from tailrace.engine.ranks.switch import SwitchRefused
from tailrace.engine.scheduling.sequence import Sequence as Response
from tailrace.errors import ConfigError, TailraceWarning
from tailrace.models.architecture import Architecture
from tailrace.planning.dispatch.base import Degree
from tailrace.planning.latency import DecodedStep
from tailrace.planning.remaining import Unfinished
from tailrace.planning.tp_decision import Decision
from tailrace.planning.tp_profile import TPProfile
from tailrace.planning.tp_stage import StagedTP, chosen
from tailrace.planning.tp_verdict import SwitchReport, Verdict
from tailrace.types import FinishReason, Sample


@dataclass(frozen=True, slots=True)
class Wanted:
    """A switch that pays. Times are as in `Verdict`."""

    decision: Decision
    asked_at: float
    decided_at: float


class AdaptiveTP:
    """Changes the arrangement of one engine. Not thread-safe; called between two steps."""

    def __init__(
        self, config: AdaptiveTPConfig, profile: TPProfile, arrangement: Arrangement, architecture: Architecture
    ) -> None:
        """Prepare to decide. `architecture` is that of the whole model."""
        self.verdicts: list[Verdict] = []
        """The verdicts since `take` was last called."""
        self._arrangement = arrangement
        self._staged = StagedTP(
            config,
            profile,
            max_batch_size=arrangement.config.max_batch_size,
            cache_tokens=arrangement.cache_tokens,
            kv_bytes_per_token=token_bytes(architecture, DTYPES[arrangement.config.dtype]),
        )

    def take(self) -> list[Verdict]:
        """Return the verdicts since the last call."""
        verdicts, self.verdicts = self.verdicts, []
        return verdicts

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees that are chosen from."""
        return self._staged.degrees

    @property
    def in_stage(self) -> bool:
        """Whether a stage is open. `close_stage` closes it, once nothing is unfinished."""
        return self._staged.in_stage

    def observe(self, lanes: Iterable[Lane], samples: Iterable[Sample], *, running: Mapping[Lane, int]) -> None:
        """Learn from the steps that these lanes have just completed, and from the samples that finished.

        running: The running sequences of the lanes that computed side by side.
        """
        for step in decoded_steps(lanes, self._arrangement.config.tp, running=running):
            self._staged.stepped(step)
        for sample in samples:
            if sample.finish_reason is not FinishReason.ABORT:
                self._staged.ended(len(sample.response_ids), sample.group_id)

    def begin(self) -> None:
        """Note that a request has come to the idle engine."""
        self._staged.begin()

    def wanted(self) -> Wanted | None:
        """Ask, if a question is due. Return a switch that pays, or None."""
        arrangement, tp = self._arrangement, self._arrangement.config.tp
        if not self._staged.asks(arrangement.unfinished, tp, can_switch=arrangement.can_switch):
            return None
        asked_at = time.perf_counter()
        decision = self.decide()
        decided_at = time.perf_counter()
        if decision.switch:
            return Wanted(decision, asked_at, decided_at)
        self._staged.went_on(decision, tp)
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
        """Return the decision for the current state of the engine."""
        arrangement = self._arrangement
        sequences = [lane.scheduler.sequences for lane in arrangement.lanes]
        waiting = sorted((s for own in sequences for s in own if not s.cached), key=lambda s: s.order)
        return self._staged.decide(
            arrangement.config.tp,
            tuple(tuple(self._unfinished(s) for s in own if s.cached) for own in sequences),
            tuple(map(self._unfinished, waiting)),
            arrangement.groups,
        )

    def other_degrees(self, tp: int) -> list[Degree]:
        """See `StagedTP`; none where the engine can switch no more. Callable from any thread."""
        return self._staged.other_degrees(tp) if self._arrangement.can_switch else []

    def switch(self, wanted: Wanted) -> None:
        """Carry out `wanted`. No step may be under way."""
        began, decision = time.perf_counter(), wanted.decision
        # Where nothing was cached at the decision (state none), the last steps may have cached something: it moves,
        # too.
        report, failure = self._switch(decision.chosen, move=chosen(decision).state != "recompute")
        if report is not None:
            self._staged.switched(decision, report)
        self._staged.went_on(decision, self._arrangement.config.tp)
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

    def drop(self, wanted: Wanted) -> None:
        """Note that all responses have ended before `wanted` was carried out."""
        decision, now = wanted.decision, time.perf_counter()
        self._staged.went_on(decision, decision.tp)
        self.verdicts.append(
            Verdict.dropped(decision, began_at=wanted.asked_at, ended_at=now, waited_s=now - wanted.decided_at)
        )

    def close_stage(self) -> None:
        """Return to the degree of the full batch, if the configuration says so. Nothing may be unfinished."""
        began, source_tp = time.perf_counter(), self._arrangement.config.tp
        target_tp = self._staged.home_of(source_tp)
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
        self._staged.close()

    def _switch(self, target: int, *, move: bool) -> tuple[SwitchReport | None, str]:
        """Switch to `target`. Return the report, or None and the reason of the failure."""
        source = self._arrangement.config.tp
        try:
            return self._arrangement.switch(target, cache="move" if move else "recompute"), ""
        except (SwitchRefused, SwitchFailed) as error:
            failure = str(error)
        warnings.warn(f"TP stays {source}: {failure}", TailraceWarning, stacklevel=2)
        self._staged.rule_out(target, failure)
        return None, failure

    def _unfinished(self, response: Response) -> Unfinished:
        return self._staged.unfinished(
            response.prompt_length,
            len(response.log_probs),
            response.stop.max_tokens,
            response.request.expected_tokens,
            group=response.request.group_id,
            block=self._arrangement.config.block_size,
        )


def decoded_steps(lanes: Iterable[Lane], tp: int, *, running: Mapping[Lane, int]) -> Iterator[DecodedStep]:
    """The last step of each lane that has decoded alone, as the predictor takes it in; `running` as in `observe`."""
    beside, together = len(running), sum(running.values())
    for lane in lanes:
        if (step := lane.decoded) is not None:
            others = (together - running[lane]) / (beside - 1) if beside > 1 else None
            yield DecodedStep(tp, step.sequences, step.context_tokens, beside, step.seconds, others)


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

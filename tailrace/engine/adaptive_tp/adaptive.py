"""When the ranks of an engine are rearranged: asks the controller as a batch drains, and carries out what it decides.

A stage begins with the first request of an idle engine and ends when it is idle again. The controller chooses the
degree for its full batch, may change it as often as it pays, and the engine returns to that one at the end: the next
stage is likely to be as large.

    finished steps ──▶ what a step takes ─┐
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
from tailrace.engine.adaptive_tp.executor import SwitchRefused, SwitchReport
from tailrace.engine.adaptive_tp.profile_key import default_path, profile_key
from tailrace.engine.architecture import Architecture
from tailrace.engine.arrangement import Arrangement, SwitchFailed
from tailrace.engine.kv_cache import DTYPES, token_bytes
from tailrace.engine.lane import Lane
from tailrace.engine.sequence import Sequence as Response
from tailrace.errors import ConfigError, TailraceWarning
from tailrace.planning.remaining import LengthHistory, Unfinished, make_estimate
from tailrace.planning.tp_profile import TPProfile
from tailrace.planning.tp_switch import Decision, Snapshot, SwitchController
from tailrace.types import FinishReason, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One question, and what came of it; for the event log. Times are those of `time.perf_counter`."""

    began_at: float
    ended_at: float
    unfinished: int
    decision: Decision | None
    """None where the engine returns at the end of a stage, which nobody has to ask about."""
    source_tp: int
    target_tp: int
    report: SwitchReport | None
    """Of the switch; None where there was none."""
    failure: str = ""
    """Why there was none, though it was decided on."""


@dataclass(slots=True)
class _Stage:
    """Between an idle engine and an idle engine."""

    home_tp: int
    """The degree with which it went on when it was asked with most sequences unfinished."""
    most: int = 0
    """How many these were."""
    ruled_out: dict[int, str] = field(default_factory=dict)

    def home_of(self, unfinished: int) -> int | None:
        """The degree to return to; None where that is what is decided on now."""
        return self.home_tp if unfinished < self.most else None

    def decided(self, unfinished: int, tp: int) -> None:
        """It goes on with this degree."""
        if unfinished >= self.most:
            self.most, self.home_tp = unfinished, tp


class AdaptiveTP:
    """Changes the arrangement of one engine. Not thread-safe; called between two steps."""

    def __init__(
        self, config: AdaptiveTPConfig, profile: TPProfile, arrangement: Arrangement, architecture: Architecture
    ) -> None:
        """Decide nothing yet. `architecture`: of the whole model."""
        self.verdicts: list[Verdict] = []
        """Since they were last taken."""
        self._config = config
        self._arrangement = arrangement
        self.degrees = tuple(config.degrees or profile.degrees)
        """That it chooses from."""
        self._history = LengthHistory()
        self._controller = SwitchController(
            profile,
            make_estimate(config.estimate, self._history),
            max_batch_size=arrangement.config.max_batch_size,
            least_gain=config.least_gain,
            steps_between=config.steps_between,
            look_ahead=config.look_ahead,
        )
        self._kv_bytes_per_token = token_bytes(architecture, DTYPES[arrangement.config.dtype])
        self._stage: _Stage | None = None

    def take(self) -> list[Verdict]:
        """The verdicts since the last call."""
        verdicts, self.verdicts = self.verdicts, []
        return verdicts

    @property
    def in_stage(self) -> bool:
        """Whether a stage has begun that `close_stage` has not closed, as it does once nothing is unfinished."""
        return self._stage is not None

    def observe(self, lanes: Iterable[Lane], samples: Iterable[Sample], *, beside: int) -> None:
        """Take in the steps that these lanes have just completed, and the samples that finished.

        beside: Lanes that computed beside each other.
        """
        tp = self._arrangement.config.tp
        for lane in lanes:
            if (step := lane.decoded) is not None:
                self._controller.observe(tp, step.sequences, step.context_tokens, beside, step.seconds)
        for sample in samples:
            if sample.finish_reason is not FinishReason.ABORT:
                self._history.add(len(sample.response_ids))

    def wanted(self) -> Decision | None:
        """A switch that pays, if there is one now."""
        unfinished = self._arrangement.unfinished
        if not self._arrangement.can_switch or not self._controller.due(unfinished):
            return None
        began = time.perf_counter()
        decision = self.decide()
        self._stage = self._stage or _Stage(decision.tp)
        if decision.switch:
            return decision
        self._stage.decided(unfinished, decision.tp)
        self._note(decision, began, unfinished, source=decision.tp, target=decision.tp)
        return None

    def decide(self) -> Decision:
        """What the controller makes of the moment."""
        return self._controller.decide(self._snapshot())

    def switch(self, decision: Decision) -> None:
        """Carry out a decision; no step is under way."""
        assert self._stage is not None
        (candidate,) = (candidate for candidate in decision.candidates if candidate.tp == decision.chosen)
        self._switch(decision.chosen, decision, move=candidate.state == "move")
        self._stage.decided(self._arrangement.unfinished, self._arrangement.config.tp)

    def close_stage(self) -> None:
        """Nothing is unfinished: return to the degree of the full batch, unless that has been refused."""
        assert self._stage is not None
        home_tp = self._stage.home_tp
        if home_tp not in {self._arrangement.config.tp, *self._stage.ruled_out} and self._arrangement.can_switch:
            self._switch(home_tp, None, move=False)
        self._stage = None
        self._controller.begin()

    def _switch(self, target: int, decision: Decision | None, *, move: bool) -> None:
        began, source, report, failure = time.perf_counter(), self._arrangement.config.tp, None, ""
        unfinished = self._arrangement.unfinished
        try:
            report = self._arrangement.switch(target, cache="move" if move else "recompute")
        except (SwitchRefused, SwitchFailed) as error:
            failure = str(error)
            warnings.warn(f"TP stays {source}: {failure}", TailraceWarning, stacklevel=2)
            if self._stage is not None:
                self._stage.ruled_out[target] = failure
        self._note(decision, began, unfinished, source=source, target=target, report=report, failure=failure)

    def _note(
        self,
        decision: Decision | None,
        began: float,
        unfinished: int,
        *,
        source: int,
        target: int,
        report: SwitchReport | None = None,
        failure: str = "",
    ) -> None:
        self.verdicts.append(
            Verdict(
                began_at=began,
                ended_at=time.perf_counter(),
                unfinished=unfinished,
                decision=decision,
                source_tp=source,
                target_tp=target,
                report=report,
                failure=failure,
            )
        )

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


def open_adaptive_tp(
    arrangement: Arrangement, architecture: Architecture, *, model: str, device: torch.device
) -> AdaptiveTP | None:
    """What the configuration asks for; None where it does not, or where the profile cannot be used, with a warning.

    Args:
        architecture: Of the whole model.
        model: Its name.
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

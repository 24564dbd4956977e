"""What came of a question about the TP degree, and how it is told."""

from dataclasses import asdict, dataclass
from typing import Any, Self

import msgspec

from tailrace.events import Event, EventLog
from tailrace.planning.tp_decision import Decision
from tailrace.registers.events import EventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """The seconds and bytes of a switch. Seconds of ranks are those of the slowest rank."""

    groups_s: float
    weights_s: float
    kv_s: float
    total_s: float
    kv_bytes: int
    """Bytes sent by the rank that sent most."""
    made_groups: tuple[int, ...]
    """The degrees of the groups that were made."""

    @property
    def rest_s(self) -> float:
        """Seconds of all else: plans, orders, answers, bookkeeping."""
        return self.total_s - self.groups_s - self.weights_s - self.kv_s


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

    @classmethod
    def dropped(cls, decision: Decision, *, began_at: float, ended_at: float, waited_s: float) -> Self:
        """The outcome of a decided switch for which nothing was left to do."""
        return cls(
            began_at=began_at,
            ended_at=ended_at,
            waited_s=waited_s,
            decision=decision,
            source_tp=decision.tp,
            target_tp=decision.chosen,
            failure="all responses had ended before",
        )

    @property
    def unfinished(self) -> int:
        """The number of unfinished sequences when the controller was asked; 0 where it was not asked."""
        return 0 if self.decision is None else self.decision.unfinished


def adaptive_tp_event(verdict: Verdict, log: EventLog) -> Event:
    """Make the event of a decision with all of its terms, and of the switch that followed, if one did.

    Metrics: `source_tp` and `target_tp`, which are equal where nothing changed, and `unfinished` sequences. With a
    decision also `current_s` and `best_s`: the predicted seconds until all are done and the engine has returned to
    where it began, without a change and as chosen. With a switch also `predicted_s`, `switch_s`, and `waited_s` for the
    steps under way before it. The info has the whole `decision`, the `report` of the switch by part, and its `failure`.
    """
    metrics = {
        "source_tp": float(verdict.source_tp),
        "target_tp": float(verdict.target_tp),
        "unfinished": float(verdict.unfinished),
    }
    info: dict[str, Any] = {}
    if verdict.decision is not None:
        chosen = next(c for c in verdict.decision.candidates if c.tp == verdict.decision.chosen)
        metrics |= {"current_s": verdict.decision.current_s, "best_s": chosen.total_s}
        info["decision"] = msgspec.to_builtins(verdict.decision, str_keys=True)
        if verdict.report is not None:
            metrics["predicted_s"] = chosen.switch_s
    if verdict.report is not None:
        metrics |= {"switch_s": verdict.report.total_s, "waited_s": verdict.waited_s}
        info["report"] = asdict(verdict.report) | {"rest_s": verdict.report.rest_s}
    if verdict.failure:
        info["failure"] = verdict.failure
    return Event(
        task=EventKind.ADAPTIVE_TP,
        actor="engine",
        start=log.at(verdict.began_at),
        end=log.at(verdict.ended_at),
        metrics=metrics,
        info=info,
    )

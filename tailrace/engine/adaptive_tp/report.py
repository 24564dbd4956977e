"""The event of a decision of adaptive TP, with its outcome."""

from dataclasses import asdict
from typing import Any

import msgspec

from tailrace.engine.adaptive_tp.adaptive import Verdict
from tailrace.events import Event, EventLog
from tailrace.registers.events import EventKind


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

"""The trace of a run: its samples, as its events tell them.

    sample    a response: step, group, sample, tokens, versions, times
    graded    its reward and the seconds of its grading, in the event of any task that grades; of several rewards, the
              last is their sum

A response that was made or graded again, since its row was lost, counts as it was the last time. The samples of a step
count when it has ended: of a step that goes on, the short responses are finished first.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from tailrace.errors import TraceError
from tailrace.events import Event
from tailrace.registers.events import EventKind
from tailrace.workloads.trace import COLUMNS, Provenance, Trace

Key = tuple[int, int]
"""A group and the number of a sample in it."""


class RunSamples:
    """Collects the samples of a run from its events."""

    def __init__(self) -> None:
        self._samples: dict[Key, dict[str, Any]] = {}
        self._grades: dict[Key, dict[str, tuple[float | None, float]]] = {}
        """Reward and seconds by the actor that graded, the last one at the end."""
        self.ended_steps = 0
        """The number of steps that have ended."""

    def add(self, event: Event) -> None:
        """Take an event; those that tell nothing of a sample are passed over."""
        if event.task == EventKind.SAMPLE and event.step is not None:
            if missing := [name for name in _TOLD if name not in event.info]:
                raise TraceError(
                    f"the events are of an earlier Tailrace, or of an adapter, and do not tell the {missing[0]} of a "
                    "sample; make the run with this Tailrace"
                )
            self._samples[_key(event.info)] = _sample(event)
        elif "graded" in event.info and not event.info.get("void"):
            for group, sample, reward in event.info["graded"]:
                grades = self._grades.setdefault((group, sample), {})
                grades.pop(event.actor, None)
                grades[event.actor] = reward, event.end - event.start
        elif event.task == EventKind.STEP and event.step is not None:
            self.ended_steps = event.step + 1

    def take(self, *, before_step: int) -> list[dict[str, Any]]:
        """Return the samples of the steps before `before_step` as rows of a trace; they are forgotten."""
        keys = [key for key, sample in self._samples.items() if int(sample["step"]) < before_step]
        rows = [self._samples.pop(key) | _graded(self._grades.pop(key, {})) for key in keys]
        return sorted(rows, key=lambda row: (row["step"], row["group"], row["sample"]))


def trace_of_events(name: str, events: Sequence[Event]) -> Trace:
    """Make the trace of the run of this name of its events, without those of work that was lost (`drop_superseded`).

    Raises:
        TraceError: no step has ended, or the events are of an earlier version.
    """
    samples = RunSamples()
    for event in events:
        samples.add(event)
    rows = samples.take(before_step=samples.ended_steps)
    if not rows:
        raise TraceError(f"{name} has not ended a step yet; a trace needs the samples of one")
    return Trace.of(
        pl.DataFrame(rows, schema={column: COLUMNS[column].dtype for column in _NAMES}), run_provenance(name, events)
    )


def run_provenance(name: str, events: Iterable[Event]) -> Provenance:
    """The provenance of the trace of a run: that of its newest attempt, with the greatest limit of all."""
    infos = [event.info for event in events if event.task == EventKind.RUN]
    info = infos[-1] if infos else {}
    config = info.get("config") or {}
    limits = [(one.get("config") or {}).get("sampling", {}).get("max_new_tokens") for one in infos]
    return Provenance(
        source=name,
        model=str(config.get("model", {}).get("path") or ""),
        hardware=str(info.get("machine") or ""),
        algorithm=str(config.get("algorithm", {}).get("type") or ""),
        max_new_tokens=None if None in limits else max(limits, default=None),
    )


_NAMES = (
    *("step", "group", "sample", "prompt_tokens", "response_tokens", "finish_reason", "reward", "reward_s"),
    *("first_version", "last_version", "start", "end"),
)
"""The columns that the events of a run fill."""
_TOLD = ("group", "sample", "prompt_tokens", "finish_reason", "last_version")
"""What the info of a sample's event has to say."""


def _graded(grades: Mapping[str, tuple[float | None, float]]) -> dict[str, Any]:
    """The reward, and the seconds of the grading that took the longest."""
    if not grades:
        return {}
    *_, (reward, _) = grades.values()
    return {"reward": reward, "reward_s": max(seconds for _, seconds in grades.values())}


def _key(info: Mapping[str, Any]) -> Key:
    return info["group"], info["sample"]


def _sample(event: Event) -> dict[str, Any]:
    return {
        "step": event.step,
        "group": event.info["group"],
        "sample": event.info["sample"],
        "prompt_tokens": event.info["prompt_tokens"],
        "response_tokens": event.tokens,
        "finish_reason": event.info["finish_reason"],
        "first_version": event.version,
        "last_version": event.info["last_version"],
        "start": event.start,
        "end": event.end,
    }

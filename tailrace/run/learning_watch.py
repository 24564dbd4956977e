"""A sink that warns when a run learns nothing: it emits an event `warning` to the sinks before it."""

from collections.abc import Sequence

from tailrace.config.run import RunConfig
from tailrace.events import Event, Sink
from tailrace.planning.signs import Signs, StepFigures
from tailrace.registers.events import EventKind


class LearningWatch:
    """Looks at each `step` event. A warning about a sign is given once, until the sign is over."""

    def __init__(self, config: RunConfig, sinks: Sequence[Sink]) -> None:
        """`sinks`: the sinks that get the warnings."""
        self._group_size = config.algorithm.group_size
        self._sinks = sinks
        self._signs = Signs()

    def __call__(self, event: Event) -> None:
        """Take one event. A new attempt at the run starts with no signs."""
        if event.task == EventKind.RUN:
            self._signs = Signs()
        elif event.task == EventKind.STEP and event.samples:
            groups = max(1, event.samples // self._group_size)
            figures = StepFigures.of(event.metrics, groups=groups, samples=event.samples)
            for sign in self._signs.add(figures):
                self._tell(sign.kind, sign.text, sign.value, event)

    def _tell(self, kind: str, text: str, value: float, step: Event) -> None:
        warning = Event(
            task=EventKind.WARNING,
            actor="driver",
            start=step.end,
            end=step.end,
            step=step.step,
            metrics={kind: value},
            info={"kind": kind, "text": text},
        )
        for sink in self._sinks:
            sink(warning)

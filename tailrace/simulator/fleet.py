"""The number of engines of a pool in simulated time: it changes as `run.fleet` changes it.

    events ──▶ StepWatch ──a step──▶ Elasticity ──one more──▶ it loads ──▶ the service, and the newest weights
                                               └──one less──▶ its responses go on elsewhere ──▶ it ends

No decision is made while a number changes. The decisions are those of `planning.scaling`.
"""

from collections.abc import Callable

from tailrace.events import Event
from tailrace.planning.elasticity import Elasticity, ScaleDecision
from tailrace.planning.scaling import StepWatch, decided, predicted, scale_event, scaled_text
from tailrace.simulator.agenda import Agenda, Process
from tailrace.simulator.engines import SimulatedEngine
from tailrace.simulator.log import VirtualLog
from tailrace.simulator.scenario import Elastic, EngineKind
from tailrace.simulator.service import SimulatedService


class SimulatedFleet:
    """Adds and removes engines."""

    def __init__(
        self,
        agenda: Agenda,
        elastic: Elastic,
        service: SimulatedService,
        log: VirtualLog,
        make: Callable[[EngineKind], SimulatedEngine],
        *,
        prefix: str = "",
    ) -> None:
        """`make`: makes an engine, which the newest weights are on their way to. `prefix`: before what is said."""
        self._agenda = agenda
        self._kind = elastic.joining
        self._service = service
        self._log = log
        self._make = make
        self._prefix = prefix
        self._watch = StepWatch()
        self._elasticity = Elasticity(elastic.limits)
        self._changes = False
        """Whether the number is being changed."""

    def see(self, event: Event) -> None:
        """Take in an event. The last one of a step may have the number changed."""
        step = self._watch.see(event)
        if step is None or not step.jobs or self._changes or any(engine.is_down for engine in self._service.engines):
            return
        states = {engine: engine.state(idle=True) for engine in self._service.engines}
        own = self._own()
        if not own:
            return
        seconds = predicted(list(states.values()), states[own[0]], step.jobs)
        decision, wanted = decided(self._elasticity, step, len(own), seconds)
        if decision.action != "hold":
            self._agenda.start(self._change(decision, wanted))

    def _own(self) -> list[SimulatedEngine]:
        return [engine for engine in self._service.engines if engine.kind.name == self._kind.name]

    def _change(self, decision: ScaleDecision, wanted: int) -> Process:
        self._changes = True
        before, own = len(self._service.engines), self._own()
        if wanted > len(own):
            yield self._kind.starts_s
            self._service.add(self._make(self._kind))
        else:
            yield from self._service.remove(own[-1])
            own[-1].activity.emit()
        self._changes = False
        by = "elasticity"
        event = scale_event(
            self._agenda.now,
            self._prefix + scaled_text(len(own), len(self._own()), by, decision),
            pool=self._kind.name,
            by=by,
            before=before,
            wanted=before + wanted - len(own),
            engines=[engine.name for engine in self._service.engines],
            decision=decision,
        )
        self._log.emit(event)

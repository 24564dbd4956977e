"""The generation service in simulated time: it places groups on engines as `rollout.service` does.

The policies are those of `planning.dispatch`. Running responses do not move here.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from tailrace.planning.dispatch.base import Job, Policy
from tailrace.planning.dispatch.replanning import is_outdated
from tailrace.simulator.engines import Response, SimulatedEngine


@dataclass(eq=False, slots=True)
class _Waiting:
    """Responses of one group that go to one engine together."""

    responses: list[Response]
    arrival: int

    @property
    def turn(self) -> tuple[int, float, int]:
        """The lower begins first."""
        first = self.responses[0]
        return first.step, -first.priority, self.arrival

    @property
    def job(self) -> Job:
        """As a policy sees it."""
        first = self.responses[0]
        return Job(
            group=first.group,
            samples=len(self.responses),
            prompt_tokens=first.script.prompt_tokens,
            expected_tokens=first.expected,
        )


class SimulatedService:
    """Engines, and what waits for them."""

    def __init__(self, engines: Sequence[SimulatedEngine], policy: Policy, *, group_size: int, splits: bool) -> None:
        """`splits`: whether the samples of a group may go to several engines, since different lengths are expected."""
        self._group_size = group_size
        self.engines = list(engines)
        self._policy = policy
        self._splits = splits
        self._arrived: list[_Waiting] = []
        self._planned: dict[SimulatedEngine, deque[_Waiting]] = {engine: deque() for engine in engines}
        self._when_placed = 0
        """Jobs that were planned when jobs were last placed."""
        self._arrivals = count()

    def generate(self, groups: Sequence[Sequence[Response]]) -> None:
        """Have groups generated."""
        for group in groups:
            for part in [[one] for one in group] if self._splits else [list(group)]:
                self._arrived.append(_Waiting(part, next(self._arrivals)))
        self._arrived.sort(key=_turn)
        self._plan()
        self._give(self.engines)

    def ended(self, engine: SimulatedEngine) -> None:
        """Use the room of a response that has ended."""
        if self._policy.plans:
            self._plan()
            self._give(self.engines)
            return
        if self._arrived and self._has_room(engine, len(self._arrived[0].responses), 0):
            self._place(self._arrived[: self._room(engine)], [engine])  # none of the others had room for it
        self._give([engine])

    def _give(self, engines: Sequence[SimulatedEngine]) -> None:
        """Give engines what they have room for, of what is planned for them."""
        for engine in engines:
            planned = self._planned[engine]
            given: list[Response] = []
            while planned and self._has_room(engine, len(planned[0].responses), len(given)):
                given += planned.popleft().responses
            if given:
                engine.give(given)

    def _has_room(self, engine: SimulatedEngine, samples: int, given: int) -> bool:
        room = self._room(engine) - given
        return samples <= room or (room > 0 and not (engine.in_hand or given))

    def _room(self, engine: SimulatedEngine) -> int:
        """Responses that an engine can still be given: a group more than it decodes, see `run.workers.rollout`."""
        return engine.kind.slots * engine.kind.dp + self._group_size - len(engine.in_hand)

    def _plan(self) -> None:
        """Place what has arrived; and what is planned already, where an engine has run dry."""
        if self._policy.plans and self._is_dry():
            waiting = sum(map(len, self._planned.values()))
            idle = any(not engine.in_hand for engine in self.engines)
            if is_outdated(self._when_placed, waiting, any_idle=idle):
                for planned in self._planned.values():
                    self._arrived += planned
                    planned.clear()
                self._arrived.sort(key=_turn)
        if self._arrived:
            self._place(self._arrived, self.engines)
            self._when_placed = sum(map(len, self._planned.values()))

    def _is_dry(self) -> bool:
        return any(not planned and self._room(engine) > 0 for engine, planned in self._planned.items())

    def _place(self, jobs: list[_Waiting], engines: Sequence[SimulatedEngine]) -> None:
        """Have the policy place the first of what has arrived."""
        placement = self._policy.place([job.job for job in jobs], [engine.state() for engine in engines])
        for engine, places in zip(engines, placement.of, strict=True):
            if places:
                planned = self._planned[engine]
                self._planned[engine] = deque(sorted([*planned, *(jobs[place] for place in places)], key=_turn))
        self._arrived[: len(jobs)] = [jobs[place] for place in placement.later]


def _turn(waiting: _Waiting) -> tuple[int, float, int]:
    return waiting.turn

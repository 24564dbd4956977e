"""The generation service in simulated time: it places groups on engines as `rollout.service` does.

The policies are those of `planning.dispatch`, and so are the choices of running responses that move. Where one sample
of a group tells the length of the others, it is a scout, as there.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby

from tailrace.config.rollout import Order
from tailrace.errors import PlanError
from tailrace.planning.dispatch.base import Job, Policy
from tailrace.planning.dispatch.moving import EVERY_S, MoveSeconds, Way, at_once, moves, recompute_s, transfer_s
from tailrace.planning.dispatch.replanning import is_outdated
from tailrace.planning.dispatch.splitting import is_cheap_to_split
from tailrace.planning.lengths.base import Expectation
from tailrace.planning.order import SCOUT, priority
from tailrace.simulator.agenda import Agenda, Process
from tailrace.simulator.engines import SimulatedEngine
from tailrace.simulator.lengths import SimulatedLengths
from tailrace.simulator.samples import Response

_MOST_LOSSES = 50
"""A response that was lost so often will hardly ever end."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """Responses of one group that go to one engine together."""

    responses: list[Response]
    scout: Response | None = None
    """The sample that was to begin before these."""

    @property
    def turn(self) -> tuple[int, float, int]:
        """The lower begins first."""
        first = self.responses[0]
        return first.step, -first.priority, first.arrival

    @property
    def job(self) -> Job:
        """As a policy sees it."""
        first = self.responses[0]
        return Job(
            group=first.group,
            samples=len(self.responses),
            prompt_tokens=first.script.prompt_tokens,
            expected_tokens=min(first.expected.tokens, first.limit),
            deviation=first.expected.deviation,
            most_tokens=first.limit,
        )


class SimulatedService:
    """Engines, and what waits for them."""

    def __init__(
        self,
        agenda: Agenda,
        engines: Sequence[SimulatedEngine],
        policy: Policy,
        *,
        lengths: SimulatedLengths,
        order: Order,
        group_size: int,
        splits: bool,
        may_move: bool = False,
        may_go_on: bool = True,
    ) -> None:
        """`splits`: whether the samples of a group may go to several engines, since different lengths are expected.

        `order`: of the samples of a training step. `may_move`: whether running responses move. `may_go_on`: whether
        those of an engine that leaves keep what they have.
        """
        self._lengths = lengths
        self._order: Order = order
        self._scouted: dict[Response, _Waiting] = {}
        """The others of a group that wait, by the scout that has not ended."""
        self._agenda = agenda
        self._may_move = may_move
        self._may_go_on = may_go_on
        self._moves_after = 0.0
        self.moved = 0
        """Responses that have moved."""
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
            for response in group:
                response.arrival = next(self._arrivals)
        self._wait([part for group in groups for part in self._parts(group)])
        self.decide()

    def _parts(self, group: Sequence[Response]) -> list[_Waiting]:
        """What goes to one engine together: a group, each of its samples, or a scout and the others."""
        if self._splits and self._is_cheap_to_split(group):
            for response in group:
                self._expect([response], response.expected)
            return [_Waiting([response]) for response in group]
        self._expect(group, _together(group))
        if len(group) == 1 or not self._lengths.wants_scout(group[0]):
            return [_Waiting(list(group))]
        scout, *others = group
        scout.priority = SCOUT
        self._scouted[scout] = waiting = _Waiting(others, scout)
        return [_Waiting([scout]), waiting]

    def _is_cheap_to_split(self, group: Sequence[Response]) -> bool:
        prompt, tokens = group[0].script.prompt_tokens, Expectation.together([one.expected for one in group]).tokens
        return is_cheap_to_split(self.engines[0].state(idle=True), prompt_tokens=prompt, response_tokens=tokens)

    def add(self, engine: SimulatedEngine) -> None:
        """Use another engine from now on."""
        self.engines.append(engine)
        self._planned[engine] = deque()
        self.decide()

    def remove(self, engine: SimulatedEngine) -> Process:
        """Use an engine no more: what it has goes on elsewhere. This takes until it has nothing left."""
        self.engines.remove(engine)
        self._wait(self._planned.pop(engine))
        if self._may_go_on:
            engine.leave(self._wait_again)
        else:
            self._begin_anew(engine.drop())
        self.decide()
        while engine.in_hand:
            yield engine.left
            self.decide()

    def lost(self, responses: Sequence[Response]) -> None:
        """Have what a dead engine had made again, from the start.

        Raises:
            PlanError: that has happened to one of them again and again.
        """
        for response in responses:
            response.losses += 1
            if response.losses > _MOST_LOSSES:
                raise PlanError(
                    f"a response of {response.tokens} tokens was lost {_MOST_LOSSES} times: engines die more often "
                    "than it takes; lower engine_failures_per_hour"
                )
        self._begin_anew(responses)
        self.decide()

    def _begin_anew(self, responses: Sequence[Response]) -> None:
        for response in responses:
            response.turn = response.context = response.made = response.cached = 0
            response.arrival = next(self._arrivals)
            response.first_version = -1
        by_group = groupby(sorted(responses, key=_alike), key=_alike)
        self._wait([part for _, group in by_group for part in self._again(list(group))])

    def _again(self, group: list[Response]) -> list[_Waiting]:
        splits = self._splits and self._is_cheap_to_split(group)
        return [_Waiting([response]) for response in group] if splits else [_Waiting(group)]

    def decide(self) -> None:
        """Place what waits: there is more of that, or of engines."""
        self._follow_scouts()
        self._plan()
        self._give(self.engines)

    def ended(self, response: Response, engine: SimulatedEngine) -> None:
        """Learn from a response that has ended, and use its room."""
        self._learn(response)
        if engine.is_leaving:
            return
        if self._policy.plans:
            self._plan()
            self._give(self.engines)
            self._move()
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
                waiting = planned.popleft()
                given += waiting.responses
                if waiting.scout is not None:
                    self._scouted.pop(waiting.scout, None)
            if given:
                engine.give(given)

    def _has_room(self, engine: SimulatedEngine, samples: int, given: int) -> bool:
        room = self._room(engine) - given
        return samples <= room or (room > 0 and not (engine.in_hand or given))

    def _room(self, engine: SimulatedEngine) -> int:
        """Responses that an engine can still be given: a group more than it decodes, see `run.workers.rollout`."""
        if engine.is_down or engine.is_leaving:
            return 0
        return engine.kind.slots * engine.kind.dp + self._group_size - len(engine.in_hand)

    def _plan(self) -> None:
        """Place what has arrived; and what is planned already, where an engine has run dry."""
        if self._policy.plans and self._is_dry():
            waiting = sum(map(len, self._planned.values()))
            idle = any(not engine.in_hand for engine in self.engines)
            if is_outdated(self._when_placed, waiting, any_idle=idle):
                self._wait([one for planned in self._planned.values() for one in planned])
                for planned in self._planned.values():
                    planned.clear()
        there = [engine for engine in self.engines if not engine.is_down]
        if self._arrived and there:
            self._place(self._arrived, there)
            self._when_placed = sum(map(len, self._planned.values()))

    def _move(self) -> None:
        """Move running responses to engines with room, where that is predicted to pay."""
        there = [engine for engine in self.engines if not engine.is_down]
        now = self._agenda.now
        if not self._may_move or self._arrived or now < self._moves_after or not self._is_dry():
            return
        if any(self._planned.values()) or any(engine.is_moving for engine in there):
            return
        self._moves_after = now + EVERY_S
        states, ends = [engine.state() for engine in there], [engine.kind.link for engine in there]
        ways: dict[Way, MoveSeconds] = {"recompute": recompute_s(states), "transfer": transfer_s(ends)}
        for move in at_once(moves(states, ways), states, ends):
            source, target = there[move.source], there[move.target]
            response = list(source.in_hand)[move.sequence]
            seconds = move.seconds if move.way == "transfer" else 0.0
            source.withdraw(response, partial(self._go_on, target, seconds))

    def _go_on(self, target: SimulatedEngine, seconds: float, response: Response) -> None:
        """Have a response go on in another engine, with its keys and values if they take a while to come."""
        self.moved += 1
        response.cached = response.context + response.made if seconds else 0
        self._agenda.after(seconds, lambda: self._take(target, response))

    def _take(self, target: SimulatedEngine, response: Response) -> None:
        if target.is_down:
            self.lost([response])
        elif target.is_leaving:
            self._wait_again(response)
            self.decide()
        else:
            target.give([response])

    def _learn(self, response: Response) -> None:
        self._lengths.learn(response)
        if (others := self._scouted.pop(response, None)) is not None:
            self._expect(others.responses, self._lengths.again(others.responses[0]))
        self._follow_scouts()

    def _follow_scouts(self) -> None:
        """Expect those anew whose scout still runs, by how far it has come."""
        if not self._scouted:
            return
        for engine in self.engines:
            for scout in engine.in_hand.keys() & self._scouted.keys():
                context, left = engine.work(scout)
                others = self._scouted[scout]
                tokens = context - scout.script.prompt_tokens + left
                self._expect(others.responses, self._lengths.suppose(others.responses[0], tokens))
        self._arrived.sort(key=_turn)
        self._planned = {engine: deque(sorted(planned, key=_turn)) for engine, planned in self._planned.items()}

    def _expect(self, responses: Iterable[Response], expected: Expectation) -> None:
        """Expect responses of one group to be so long, and order them by that."""
        turn = priority(expected.tokens, self._order)
        for response in responses:
            response.expected, response.priority = expected, turn

    def _wait(self, waiting: Iterable[_Waiting]) -> None:
        self._arrived += waiting
        self._arrived.sort(key=_turn)

    def _wait_again(self, response: Response) -> None:
        """Have a response that was begun go on wherever there is room."""
        response.cached = 0
        self._wait([_Waiting([response])])

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


def _together(responses: Sequence[Response]) -> Expectation:
    """What is expected of each of some responses that go together."""
    each = [response.expected for response in responses]
    return each[0] if each.count(each[0]) == len(each) else Expectation.together(each)


def _alike(response: Response) -> tuple[int, bool]:
    """What goes together again, by group: a scout is by itself."""
    return response.group, response.priority != SCOUT


def _turn(waiting: _Waiting) -> tuple[int, float, int]:
    return waiting.turn

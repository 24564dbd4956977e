"""Engines in simulated time: replicas with continuous batches, and weights that are installed as the mode says.

    give ──▶ held until the weights may begin it ──▶ the dispatcher's replica ──▶ batch ──▶ tools ──▶ on_ended
                            ▲                                             ▲                     │
    arrive(version) ──▶ (delayed, sub_step: what has begun ends) ──▶ install  │   the next turn ─┘

The rules of the weights are those of `rollout.updater`.
"""

import collections.abc
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from typing import Any

from tailrace.activity import Activity
from tailrace.config.weights import WeightsMode
from tailrace.events import EventLog
from tailrace.planning.dispatch.base import EngineState
from tailrace.planning.drain import Work
from tailrace.planning.order import in_engine
from tailrace.planning.replicas import Dispatcher
from tailrace.registers.events import EventKind
from tailrace.simulator.agenda import Agenda, Change, Process, Turns
from tailrace.simulator.batch import Sequence
from tailrace.simulator.replicas import Replica, rearranged, replicas_of
from tailrace.simulator.samples import Response
from tailrace.simulator.scenario import EngineKind
from tailrace.simulator.tp import SimulatedTP, Wanted


class SimulatedEngine:
    """One engine."""

    def __init__(
        self,
        agenda: Agenda,
        name: str,
        kind: EngineKind,
        mode: WeightsMode,
        log: EventLog,
        *,
        turns: Turns,
        on_ended: Callable[[Response, "SimulatedEngine"], None],
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """`turns`: those to take new weights. `on_ended`: called with each response that has ended. `on_turn`: called
        when it begins or ends to compute."""
        self.name = name
        self.kind = kind
        self.version = 0
        self.in_hand: dict[Response, Sequence | None] = {}
        """Responses that it was given and that have not ended; what its batches have of them."""
        self.is_down = False
        """Whether its process has died and is not back yet."""
        self.left = Change(agenda)
        """Told when it has one response less."""
        self.installed = Change(agenda)
        """Told when it has new weights."""
        self.activity = Activity(log, "engine", breakdown=True)
        self._agenda = agenda
        self._mode = mode
        self._log = log
        self._turns = turns
        self._on_ended = on_ended
        self._on_turn = on_turn
        self._dispatcher = Dispatcher(replicas_of(kind, kind.tp))
        self._tp = None if kind.adaptive_tp is None else SimulatedTP(kind, kind.adaptive_tp, log)
        self._still_until = 0.0
        """The end of a change of its TP degree."""
        self._preemptions = 0
        """Those of replicas that are no more."""
        self._held: list[Response] = []
        """What waits for its weights."""
        self._begun = 0
        """Responses that have begun and have not ended."""
        self._successor: Callable[[Response], None] | None = None
        """Takes what it has, once it leaves."""
        self._is_dropped = False
        self._leaving: dict[Sequence, Callable[[Response], None]] = {}
        """What goes on elsewhere, from the end of the step under way on."""
        self._life = 0
        """How often it has lost all that it had."""
        self._arrived = 0
        self._news = Change(agenda)
        self._pauses = 0
        self._computing = 0
        """Replicas with a stretch under way."""
        self._is_draining = False
        agenda.start(self._update())

    @property
    def _replicas(self) -> List[Replica]:
        return self._dispatcher.replicas

    @property
    def computes(self) -> bool:
        """Whether a step is under way."""
        return self._computing > 0

    @property
    def is_moving(self) -> bool:
        """Whether some of its responses are about to go on elsewhere."""
        return bool(self._leaving)

    @property
    def is_leaving(self) -> bool:
        """Whether it is given nothing any more."""
        return self._is_dropped or self._successor is not None

    @property
    def preemptions(self) -> int:
        """Sequences that were preempted so far."""
        return self._preemptions + sum(replica.batch.preemptions for replica in self._replicas)

    def state(self, *, idle: bool = False) -> EngineState:
        """As a policy sees it. `idle`: as it would be without work."""
        kind, (first, *_) = self.kind, self._replicas
        return EngineState(
            name=self.name,
            times=kind.times,
            tp=first.batch.tp,
            replicas=first.batch.replicas,
            slots=kind.slots,
            cache_tokens=int(first.batch.cache_tokens),
            running=() if idle else _Works(self),
            degrees=() if self._tp is None else self._tp.other_degrees(),
        )

    def give(self, responses: Iterable[Response]) -> None:
        """Have it make responses, each as soon as its weights may begin it."""
        for response in responses:
            if response.context == 0:
                response.start = self._agenda.now
                response.context = response.script.prompt_tokens
            self._held.append(response)
            self.in_hand[response] = None
        self._begin_held()

    def withdraw(self, response: Response, then: Callable[[Response], None]) -> None:
        """Give a response away at the end of the step under way, to `then`, unless it has ended by then."""
        if (sequence := self.in_hand.get(response)) is not None:
            self._leaving[sequence] = then
            self._go()

    def leave(self, successor: Callable[[Response], None]) -> None:
        """Give all that it has to `successor`: what runs at the end of the step under way, what waits for tools when
        they have answered."""
        self._successor = successor
        held, self._held = self._held, []
        for response in held:
            del self.in_hand[response]
            successor(response)
        self._leaving = {sequence: successor for sequence in self.in_hand.values() if sequence is not None}
        self.installed.tell()
        self._go()

    def die(self, away_s: float, on_return: Callable[[], None]) -> list[Response]:
        """Lose all that it has, which is returned, and be back after so many seconds with the newest weights.

        `on_return`: called then.
        """
        lost = self._lose_all()
        self.is_down = True
        self._agenda.start(self._return(away_s, on_return))
        return lost

    def drop(self) -> list[Response]:
        """Leave at once. Return all that it has, which begins anew elsewhere."""
        self._is_dropped = True
        dropped = self._lose_all()
        self.installed.tell()
        return dropped

    def _lose_all(self) -> list[Response]:
        lost = list(self.in_hand)
        for replica in self._replicas:
            if replica.entry is not None:
                replica.entry.cancel()
                self._note(-1)
        self._replace(Dispatcher(replicas_of(self.kind, self.kind.tp)))
        self._still_until = 0.0
        if self._tp is not None:
            self._tp.restart()
        self.in_hand.clear()
        self._held.clear()
        self._leaving.clear()
        self._begun, self._life = 0, self._life + 1
        self.left.tell()
        return lost

    def _return(self, away_s: float, on_return: Callable[[], None]) -> Process:
        self._pauses += 1
        yield away_s
        self._pauses -= 1
        self.version, self.is_down = max(self.version, self._arrived), False
        self.installed.tell()
        on_return()

    def arrive(self, version: int) -> None:
        """Note that weights have arrived."""
        self._arrived = max(self._arrived, version)
        self._news.tell()

    def pause(self) -> float:
        """Begin no further step until `resume`. Return the seconds until the steps under way have ended."""
        self._pauses += 1
        return max(self._still_until - self._agenda.now, *map(self._cut, self._replicas))

    def keep_pace(self, pace: float) -> None:
        """Take so many times longer for a step, from the end of the one under way on."""
        if pace != self._replicas[0].batch.pace:
            for replica in self._replicas:
                replica.batch.pace = pace
            self._go()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._pauses -= 1
        self._go()

    def work(self, response: Response) -> Work:
        """What is left of a response that it has."""
        context, sequence = response.context, self.in_hand[response]
        if sequence is not None:
            replica = next(replica for replica in self._replicas if sequence in replica.responses)
            context += replica.batch.made(sequence, self._agenda.now - replica.since)
        made = context - response.script.prompt_tokens
        return context, max(1, round(response.expected.remaining(made, max(1, response.limit - made))))

    def _begin_held(self) -> None:
        newest = max((response.needed for response in self._held), default=0)
        drains = self._is_draining or (self._mode == "delayed" and newest > self.version)
        if drains or not self._held:
            return
        begun = [response for response in self._held if response.needed <= self.version]
        self._held = [response for response in self._held if response.needed > self.version]
        self._begun += len(begun)
        for response in begun:
            self._add(response)
        self._go()

    def _add(self, response: Response) -> None:
        """Begin a turn of a response, or go on with it."""
        sequence = Sequence(
            prompt=response.context,
            length=response.script.turns[response.turn].generated_tokens,
            group=-1 if response.turn else response.prompt,
            priority=in_engine(response.priority, response.step),
            made=response.made,
            cached=response.cached,
        )
        response.made = response.cached = 0
        if self._tp is not None and not any(each.unfinished for each in self._replicas):
            self._tp.begin()
        self.in_hand[response] = sequence
        replica = self._dispatcher.choose(response.group)
        replica.responses[sequence] = response
        replica.batch.add(sequence)

    def _go(self) -> None:
        """Have what has changed take effect: now, or at the end of the step under way."""
        if self._tp is not None and not self._computing and self._rearranges(self._tp):
            return
        self._dispatcher.balance()
        for replica in self._replicas:
            if replica.batch.is_busy:
                self._cut(replica)
            else:
                self._begin(replica)

    def _cut(self, replica: Replica) -> float:
        """Let the step under way be the last of its stretch. Return the seconds until its end."""
        if replica.entry is None:
            return 0.0
        replica.entry.cancel()
        end = replica.since + replica.batch.cut(self._agenda.now - replica.since)
        replica.entry = self._agenda.at(end, lambda: self._end(replica))
        return replica.entry.time - self._agenda.now

    def _begin(self, replica: Replica) -> None:
        if self._pauses or replica.is_ending or (seconds := replica.batch.begin()) is None:
            return
        self._note(1)
        replica.since = self._agenda.now
        replica.entry = self._agenda.after(seconds, lambda: self._end(replica))
        if self._leaving:
            self._cut(replica)

    def _rearranges(self, tp: SimulatedTP) -> bool:
        """Ask for a TP degree, if a question is due. Return whether the engine changes to another."""
        if self._pauses or any(replica.is_ending for replica in self._replicas):
            return False
        if (switch := tp.wanted(self._replicas, self._agenda.now)) is None:
            return False
        self._note(1)
        self._still_until = self._agenda.now + self.pause() + switch.seconds
        self._agenda.start(self._rearrange(tp, switch, self._life))
        return True

    def _rearrange(self, tp: SimulatedTP, switch: Wanted, life: int) -> Process:
        """Change the TP degree, once the steps under way have ended."""
        while any(replica.batch.is_busy for replica in self._replicas):
            yield max(map(self._cut, self._replicas))
        waited_s = self._agenda.now - switch.asked_at
        if switch.decision is None or any(replica.unfinished for replica in self._replicas):
            yield switch.seconds
            if life == self._life:  # otherwise it has died meanwhile
                old, target = self._replicas, switch.target
                self._replace(rearranged(old, self.kind, source=tp.degree, target=target, move=switch.moves))
                tp.switched(switch, self._agenda.now, waited_s)
        elif life == self._life:
            tp.dropped(switch.decision, switch.asked_at, self._agenda.now)
        self._still_until = 0.0
        self._note(-1)
        self.resume()

    def _replace(self, dispatcher: Dispatcher[Replica]) -> None:
        """Have other replicas, which go on at the same pace."""
        self._preemptions = self.preemptions
        for replica in dispatcher.replicas:
            replica.batch.pace = self._replicas[0].batch.pace
        self._dispatcher = dispatcher

    def _end(self, replica: Replica) -> None:
        replica.entry = None
        if self._tp is not None:
            self._tp.stepped(replica.batch.decoded, self._computing)
        started, ended = replica.batch.end()
        for sequence in started:
            response = replica.responses[sequence]
            if response.first_version < 0:
                response.first_version = self.version
        for sequence in ended:
            self._leaving.pop(sequence, None)
        for sequence in [sequence for sequence in self._leaving if sequence in replica.responses]:
            self._hand_on(replica, sequence)
        replica.is_ending = True
        for sequence in ended:
            self._end_turn(replica.responses.pop(sequence))
        replica.is_ending = False
        if self._tp is None or not self._rearranges(self._tp):
            if self._dispatcher.balance():
                self._go()
            else:
                self._begin(replica)
        self._note(-1)

    def _hand_on(self, replica: Replica, sequence: Sequence) -> None:
        then, response = self._leaving.pop(sequence), replica.responses.pop(sequence)
        replica.batch.remove(sequence)
        response.made = sequence.made
        self._give_away(response, then)

    def _give_away(self, response: Response, then: Callable[[Response], None]) -> None:
        response.cached = 0
        del self.in_hand[response]
        self._begun -= 1
        self.left.tell()
        then(response)

    def _note(self, change: int) -> None:
        """Count the replicas that compute."""
        before, self._computing = self._computing, self._computing + change
        if not before:
            self.activity.enter("generation")
            self._on_turn()
        elif not self._computing:
            self.activity.leave("generation")
            self._on_turn()

    def _end_turn(self, response: Response) -> None:
        turn = response.script.turns[response.turn]
        if self._tp is not None:
            self._tp.ended(turn.generated_tokens)
        response.cached = response.context + turn.generated_tokens - 1
        response.context += turn.generated_tokens + turn.returned_tokens
        response.last_version = self.version
        response.turn += 1
        self.in_hand[response] = None
        if response.turn < len(response.script.turns):
            life = self._life
            self._agenda.after(turn.tool_s, lambda: self._go_on(response, life))
            return
        del self.in_hand[response]
        self._begun -= 1
        response.end = self._agenda.now
        self.left.tell()
        self._on_ended(response, self)

    def _go_on(self, response: Response, life: int) -> None:
        if life != self._life:
            return  # it is made again elsewhere
        if self._successor is not None:
            self._give_away(response, self._successor)
            return
        self._add(response)
        self._go()

    def _update(self) -> Process:
        """Install each version that arrives."""
        if self.kind.starts_s:
            yield from self._install(0, self.kind.starts_s)
        while True:
            while self._arrived <= self.version:
                yield self._news
            if self._mode == "sub_step":
                yield from self._turns.take()
            if self._mode in ("delayed", "sub_step"):
                yield from self._drain()
            yield from self._install(self._arrived, self.kind.install_s)
            self._is_draining = False
            if self._mode == "sub_step":
                self._turns.leave()
            self.installed.tell()
            self._begin_held()

    def _drain(self) -> Process:
        """Let all that has begun end. With `delayed`, others may begin meanwhile until none is left."""
        self._is_draining = self._mode == "sub_step"
        while self._begun:
            yield self.left
        self._is_draining = True

    def _forget(self, *, recompute: bool) -> None:
        """Compute all anew that older weights have computed: what is not under way, or all."""
        for replica in self._replicas:
            replica.batch.forget(recompute=recompute)
        for response, sequence in self.in_hand.items():
            if sequence is None and (recompute or not response.made):
                response.cached = 0

    def _install(self, version: int, seconds: float) -> Process:
        yield self.pause()
        start = self._agenda.now
        self.activity.enter("weight_transfer")
        yield seconds
        self.activity.leave("weight_transfer")
        self.version = version
        self._forget(recompute=self.kind.recomputes)
        self.resume()
        if version:
            with self._log.span(EventKind.UPDATE_WEIGHTS, "engine", version=version) as span:
                span.start = start


class _Works(collections.abc.Sequence[Work]):
    """What an engine has, for a policy that asks for it: most ask for the number alone."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def __len__(self) -> int:
        return len(self._engine.in_hand)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[Work]:
        return map(self._engine.work, list(self._engine.in_hand))

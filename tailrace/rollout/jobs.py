"""What the service keeps: jobs, and what each engine has of them."""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tailrace.engine.base import EngineLoad
from tailrace.planning.dispatch.base import EngineState
from tailrace.planning.dispatch.base import Job as Placed
from tailrace.planning.dispatch.moving import LinkEnd, ObservedLink
from tailrace.planning.lengths.base import Asked, Expectation
from tailrace.planning.order import in_engine
from tailrace.rollout.base import EngineFacts, EnginePort, Parcel
from tailrace.rollout.streams import GeneratedStream
from tailrace.types import Request, WeightVersion

_ANY = 2**40
"""Room without a bound."""


@dataclass(frozen=True, slots=True)
class _SameSteps:
    """The steps of an engine of which nothing is known."""

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """See `StepTimes`."""
        return 1.0

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """See `StepTimes`."""
        return 1.0


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """Requests of one group, of one call of `generate`, that go to one engine together."""

    stream: GeneratedStream
    requests: dict[int, Request]
    """Those that no engine has and that have not ended, by the service's own ids."""
    version: WeightVersion
    """The weights that begin them are of this version or newer."""
    step: int | None
    arrival: int
    is_scout: bool = False
    """Whether its length tells that of the others of its group."""
    priority: float = 0.0
    """The larger begins first, among those of a step."""
    asked: dict[int, Asked] = field(default_factory=dict)
    """What can be told of each, by the same ids; empty where nothing is expected."""
    starts: dict[int, float] = field(default_factory=dict)
    """When those that another engine has begun were given to it, by the same ids; see `Finished`."""
    expected: Expectation | None = None
    """The length of each response; None where nothing is expected."""

    @property
    def turn(self) -> tuple[int, float, int]:
        """The lower begins first: what is of no step, then earlier steps, then the larger priority."""
        return -1 if self.step is None else self.step, -self.priority, self.arrival

    @property
    def placed(self) -> Placed:
        """As a policy sees it."""
        first = next(iter(self.requests.values()))
        most = first.sampling.max_new_tokens
        return Placed(
            group=first.group_id,
            samples=len(self.requests),
            prompt_tokens=len(first.prompt_ids),
            expected_tokens=most if self.expected is None else max(1.0, min(self.expected.tokens, most)),
            deviation=0.0 if self.expected is None else self.expected.deviation,
            most_tokens=most,
        )


@dataclass(frozen=True, slots=True)
class InHand:
    """A request that an engine has."""

    job: Job
    request: Request
    """Without keys and values: only its engine has them."""

    def work(self, made: int) -> tuple[int, int]:
        """Its present tokens, and those that it will still make; see `planning.drain.Work`."""
        if self.request.begun is not None:
            made = max(made, len(self.request.begun.response_ids))
        most = max(1, self.request.sampling.max_new_tokens - made)
        expected = self.job.expected
        left = float(most) if expected is None else expected.remaining(made, most)
        return len(self.request.prompt_ids) + made, max(1, round(left))


@dataclass(eq=False, slots=True)
class Engine:
    """An engine, what is planned for it, and what it has."""

    port: EnginePort
    facts: EngineFacts | None = None
    """None while it is not there."""
    load: EngineLoad | None = None
    """The newest that it has told."""
    planned: deque[Job] = field(default_factory=deque)
    """In the order of their start."""
    in_hand: dict[int, InHand] = field(default_factory=dict)
    """What it was given and has not finished."""
    moving: dict[int, "Engine | None"] = field(default_factory=dict)
    """What was withdrawn from it and has not come back, and the engine that it goes to; None lets the policy choose."""
    is_leaving: bool = False
    """Whether it is given nothing any more."""
    life: int = 0
    """Its deaths so far."""
    link: ObservedLink = field(default_factory=ObservedLink)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is given something, or drops it."""
    tending: asyncio.Task[None] | None = None
    """Waits for its news."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after news of it, and after its death."""

    @property
    def can_move(self) -> bool:
        """Whether its responses can go on elsewhere, it has all that it was to get, and nothing is under way."""
        continues = self.facts is not None and self.facts.continues
        return continues and self.is_measured and not self.planned and not self.moving

    @property
    def room(self) -> float:
        """The number of requests that it can still be given."""
        if self.facts is None or self.is_leaving:
            return 0
        return math.inf if self.facts.room is None else self.facts.room - len(self.in_hand)

    @property
    def link_end(self) -> LinkEnd:
        """What is known of keys and values on their way to it, or from it."""
        if self.facts is None:
            return LinkEnd(form=None)
        return LinkEnd(form=self.facts.cache, datacentre=self.facts.datacentre, byte_s=self.link.byte_s)

    @property
    def is_measured(self) -> bool:
        """Whether its steps can be predicted."""
        return self.load is not None and self.load.costs is not None

    def has_room_for(self, samples: int) -> bool:
        """Whether it can be given so many at once; an engine without any work takes any number."""
        return samples <= self.room or (self.room > 0 and not self.in_hand)

    def state(self, *, idle: bool = False, by_number: bool = False) -> EngineState:
        """As a policy sees it. `idle`: as it would be without work. `by_number`: as if its steps were not measured."""
        load = self.load
        if load is None or load.costs is None or by_number:
            room = _ANY if self.facts is None or self.facts.room is None else self.facts.room
            running = [] if idle else [(0, 1)] * len(self.in_hand)
            return EngineState(name=self.port.name, times=_SameSteps(), slots=room, cache_tokens=_ANY, running=running)
        works = [] if idle else [asked.work(load.made.get(own, 0)) for own, asked in self.in_hand.items()]
        return EngineState(
            name=self.port.name,
            times=load.costs,
            tp=load.tp,
            replicas=load.replicas,
            slots=load.slots,
            cache_tokens=load.cache_tokens,
            running=works,
            degrees=load.degrees,
        )

    def take_planned(self) -> list[Parcel]:
        """Take from what is planned as much as it has room for."""
        taken: list[tuple[Job, list[Request]]] = []
        if len(self.planned) > 1 and self.has_room_for(1):
            self.planned = deque(sorted(self.planned, key=lambda job: job.turn))  # expectations may have changed
        while self.planned and self.has_room_for(len(self.planned[0].requests)):
            job = self.planned.popleft()
            self.in_hand |= {own: InHand(job, request.without_cache()) for own, request in job.requests.items()}
            taken.append((job, [self._own(job, own, request) for own, request in job.requests.items()]))
            job.requests.clear()
        return list(_parcels(taken))

    def _own(self, job: Job, own: int, request: Request) -> Request:
        """A request as the engine gets it. One that starts all anew gets no beginning: it makes the same again."""
        assert self.facts is not None
        begun = request.begun if self.facts.continues else None
        if begun is not None and begun.cache is not None and begun.cache.form != self.facts.cache:
            begun = begun.without_cache()
        return replace(
            request,
            request_id=own,
            priority=in_engine(job.priority, job.step),
            expected_tokens=None if job.expected is None else job.expected.tokens,
            begun=begun,
        )

    def end(self) -> None:
        """Note that it is gone: what is under way with it ends."""
        self.facts = self.load = None
        self.life += 1
        self.news.set()

    def take_back(self) -> list[Job]:
        """Take all that it has, and all that is planned for it, in the order of arrival."""
        jobs = {id(asked.job): asked.job for asked in self.in_hand.values()}
        for own, asked in self.in_hand.items():
            asked.job.requests[own] = asked.request
        self.in_hand.clear()
        self.moving.clear()
        planned, self.planned = self.planned, deque()
        return [*jobs.values(), *planned]


def _parcels(jobs: Iterable[tuple[Job, list[Request]]]) -> Iterator[Parcel]:
    """Put jobs of one training step together. All others are by themselves, so that each is refused for itself."""

    def together(taken: tuple[Job, list[Request]]) -> tuple[int, WeightVersion, int | None]:
        job, _ = taken
        return id(job if job.step is None else job.stream), job.version, job.step

    for (_, version, step), same in itertools.groupby(jobs, key=together):
        requests = tuple(request for _, own in same for request in own)
        yield Parcel(requests=requests, version=version, step=step)

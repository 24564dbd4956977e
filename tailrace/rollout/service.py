"""One object in front of all engines of a run: it places requests on them, and streams their samples.

    generate ──jobs──▶ arrived ──policy──▶ planned for an engine ──as it has room──▶ its port
       ◀──────────────────────────samples, in the order in which they finish────────────┘

A job is a group of requests, which share the cache of their prompt. What an engine has no room for yet stays here, so
that it can still go to another one. A policy (`planning.dispatch`) decides where jobs go: when some arrive, and where
it weighs them against one another, again when an engine runs dry while others have some waiting.

Where one sample of a group tells the length of the others, it is a scout: it begins before those of all groups. The
longer it runs, the longer the others are expected to be, so those of a long one need not wait for its end.

When the process of an engine dies, what it had goes back among the jobs and is generated again, from the same seeds.
So each request ends once, whoever dies. What comes late, of a request that is generated elsewhere or that no one waits
for, is not known here any more and is thrown away.

Source: StreamRL, section 3 (the stream generation service) and section 5.3 (dispatching).
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tailrace.config.rollout import Order
from tailrace.engine.base import EngineLoad
from tailrace.errors import ClusterError, EngineError, WorkerDied
from tailrace.planning.dispatch.base import EngineState, Policy
from tailrace.planning.dispatch.moving import (
    EVERY_S,
    MoveSeconds,
    Way,
    at_once,
    moves,
    recompute_s,
    transfer_s,
)
from tailrace.planning.dispatch.replanning import is_outdated
from tailrace.planning.dispatch.simple import Pull
from tailrace.planning.dispatch.splitting import is_cheap_to_split
from tailrace.planning.lengths.base import Asked, Expectation
from tailrace.planning.order import SCOUT, priority
from tailrace.rollout.base import EngineFacts, EnginePort, Finished, Leaving, News, Parcel, Refused
from tailrace.rollout.foresight import Foresight
from tailrace.rollout.jobs import Engine, InHand, Job
from tailrace.rollout.streams import Generated, GeneratedStream, Samples
from tailrace.types import FinishReason, Piece, Request, Sample, WeightVersion

_log = logging.getLogger(__name__)

_GATHER_S = 0.01
"""Seconds in which further jobs may arrive before they are placed together: claims of one training step come one after
the other."""
_ENDED = "the generation service has ended"


class GenerationService:
    """Generates with whichever engines there are. Use it from one event loop."""

    def __init__(
        self,
        ports: Sequence[EnginePort],
        policy: Policy | None = None,
        *,
        foresight: Foresight | None = None,
        order: Order = "first_in",
        model: str = "",
        one_version: bool = False,
    ) -> None:
        """`policy`: by default `Pull`; with `foresight` it is that one's. `order`: of jobs of a training step.

        `model`: that of the run; an engine that tells of another one is not used. See `EngineFacts.model`.
        `one_version`: whether all tokens of a response are of one version of the weights. Engines may have different
        ones, so no response that has begun goes on in another engine then.
        """
        self._engines = [Engine(port) for port in ports]
        self._own_policy = policy or Pull()
        self._pull = Pull()
        self._foresight = foresight
        self._order = order
        self._model = model
        self._one_version = one_version
        self._arrived: list[Job] = []
        """What no engine is planned for yet."""
        self._scouted: dict[int, Job] = {}
        """The others of a group whose scout has not finished, by the scout's own id."""
        self._planned = 0
        """Jobs that were planned when jobs were last placed: the same ones need not be placed again."""
        self._arrivals = itertools.count()
        self._ids = itertools.count()
        self._streams: set[GeneratedStream] = set()
        self._moves_after = 0.0
        """The loop's time before which no response moves again."""
        self._gathering: asyncio.TimerHandle | None = None
        self._work: set[asyncio.Task[None]] = set()
        self.on_leaving: Callable[[str], None] = lambda name: None
        """Called with the name of an engine whose machine ends soon."""
        self.on_misfit: Callable[[str, str], None] = lambda name, why: _log.warning(why)
        """Called with the name of an engine that is not used, since it has another model, and with that in words."""
        self.on_move: Callable[[str, str, Way], None] = lambda source, target, way: None
        """Called with the names of the two engines of a response that is to move, and the way."""
        self._has_ended = False
        self._failed: asyncio.Future[None] | None = None
        """Gets the error that ends `run`."""

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            TailraceError: an engine has failed, or one that died was not replaced.
        """
        self._failed = asyncio.get_running_loop().create_future()
        for engine in self._engines:
            engine.tending = self._do(self._tend(engine))
        try:
            await self._failed
        finally:
            for work in self._work:
                work.cancel()
            if self._work:
                await asyncio.wait(self._work)
            if self._gathering is not None:
                self._gathering.cancel()
            self._has_ended = True
            for stream in set(self._streams):
                stream.fail(EngineError(_ENDED))

    async def prepare(self, asked: Sequence[Asked]) -> None:
        """Do the slow work that expecting the lengths of these prompts needs. `generate` without it expects less."""
        if self._foresight is not None:
            await self._foresight.prepare(asked)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        version: WeightVersion = 0,
        step: int | None = None,
        asked: Sequence[Asked] | None = None,
    ) -> GeneratedStream:
        """Accept requests, and stream their samples as they finish. Closing the stream ends what it has not yielded.

        Args:
            requests: their ids are unique among themselves. Those of one group stand together.
            version: the weights that begin them are of this version or newer.
            step: the training step that they are for.
            asked: what can be told of each; without it, their lengths are not expected, nor learned from.

        Raises:
            RequestError: from the stream: an engine cannot serve one of them. Others may still come.
            EngineError: from the stream: no further sample will come.
        """
        stream = GeneratedStream(self._close)
        if self._has_ended:
            stream.fail(EngineError(_ENDED))
        self._streams.add(stream)
        told: Iterable[Asked | None] = itertools.repeat(None) if asked is None else asked
        pairs = zip(requests, told, strict=False)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].group_id):
            self._accept(stream, list(group), version, step)
        if self._policy.plans:
            self._decide_soon()
        else:
            self._decide()
        return stream

    @property
    def engines(self) -> list[str]:
        """The names of the engines that it uses."""
        return [engine.port.name for engine in self._engines if not engine.is_leaving]

    @property
    def ready_engines(self) -> int:
        """The number of engines that can be given requests now."""
        return sum(engine.facts is not None and not engine.is_leaving for engine in self._engines)

    def idle_states(self) -> list[EngineState]:
        """Each engine as it would be without work; empty where the steps of one were not measured."""
        used = [engine for engine in self._engines if not engine.is_leaving]
        return [engine.state(idle=True) for engine in used] if all(engine.is_measured for engine in used) else []

    def add(self, port: EnginePort) -> None:
        """Use another engine from now on. It is given requests as soon as it is ready.

        Raises:
            ClusterError: there is one of its name.
        """
        if any(other.port.name == port.name for other in self._engines):
            raise ClusterError(f"there is an engine {port.name} already; names differ")
        engine = Engine(port)
        self._engines.append(engine)
        if self._failed is not None:
            engine.tending = self._do(self._tend(engine))

    def check_model(self, name: str, facts: EngineFacts) -> None:
        """Check that an engine has the model of the run.

        Raises:
            ClusterError: it has another one.
        """
        if self._model and facts.model and facts.model != self._model:
            raise ClusterError(
                f"{name} is not used, since its model is not the run's: it has a {facts.model}, and the run a "
                f"{self._model}; give its machine the run's model"
            )

    async def remove(self, name: str) -> None:
        """Use an engine no more: what it has goes on elsewhere. Return when it has nothing left.

        Raises:
            ClusterError: there is no such engine, or no other.
        """
        engine = next((engine for engine in self._engines if engine.port.name == name), None)
        if engine is None:
            names = [engine.port.name for engine in self._engines]
            raise ClusterError(f"there is no engine {name}; there are {', '.join(names)}")
        if all(other is engine or other.is_leaving for other in self._engines):
            raise ClusterError(f"{name} is the only engine; add another before it is removed")
        engine.is_leaving = True
        self._arrived += engine.planned
        engine.planned.clear()
        if engine.facts is not None and engine.facts.continues and not self._one_version:
            await self._withdraw(engine, dict.fromkeys(engine.in_hand))
        else:  # its responses begin anew elsewhere
            await self._tell_drop(engine, list(engine.in_hand))
        self._engines.remove(engine)
        if engine.tending is not None:
            engine.tending.cancel()
            await asyncio.wait([engine.tending])
        engine.end()
        self._arrived = [*engine.take_back(), *self._arrived]
        self._decide()

    async def _withdraw(self, engine: Engine, moving: Mapping[int, Engine | None], way: Way = "recompute") -> None:
        """Take requests from an engine, by their own ids, and give each to the other that is named. Wait for that."""
        moving = {own: target for own, target in moving.items() if own in engine.in_hand}  # others have just ended
        if not moving or engine.facts is None:
            return
        engine.moving |= moving
        life = engine.life
        async with engine.turn:
            if engine.life == life:
                with suppress(WorkerDied):
                    await engine.port.withdraw(moving.keys(), with_cache=way == "transfer")
        while engine.life == life and engine.moving.keys() & moving.keys():
            engine.news.clear()
            await engine.news.wait()  # it has ended them already, and its news are on their way

    def newest(self, version: Callable[[], WeightVersion]) -> "NewestGenerator":
        """A generator like an engine, for whom the weights of the moment matter. `version`: returns theirs."""
        return NewestGenerator(self, version)

    @property
    def _policy(self) -> Policy:
        return self._own_policy if self._foresight is None else self._foresight.policy

    @property
    def _plans(self) -> bool:
        """Whether jobs may have been planned together, even where they are pulled by now."""
        return self._own_policy.plans if self._foresight is None else self._foresight.plans

    def _accept(
        self,
        stream: GeneratedStream,
        group: Sequence[tuple[Request, Asked | None]],
        version: WeightVersion,
        step: int | None,
    ) -> None:
        """Make the jobs of a group."""

        def job(part: Sequence[tuple[Request, Asked | None]]) -> Job:
            requests = {next(self._ids): request for request, _ in part}
            stream.pending |= requests.keys()
            return Job(
                stream=stream,
                requests=requests,
                version=version,
                step=step,
                arrival=next(self._arrivals),
                asked={own: told for own, (_, told) in zip(requests, part, strict=True) if told is not None},
            )

        foresight, first = self._foresight, group[0][1]
        if foresight is None or first is None:
            self._arrived.append(job(group))
            return
        if foresight.tells_samples_apart and self._is_cheap_to_split(group):
            jobs = [job([one]) for one in group]
        elif len(group) > 1 and foresight.wants_scout(first):
            scout, others = job(group[:1]), job(group[1:])
            self._scouted[next(iter(scout.requests))] = others
            jobs = [scout, others]
            scout.is_scout = True
        else:
            jobs = [job(group)]
        self._expect(jobs)
        self._arrived += jobs

    def _expect(self, jobs: Sequence[Job]) -> None:
        """Expect the lengths of jobs, and order them by these."""
        assert self._foresight is not None
        for job in jobs:
            asked = list(job.asked.values())
            alike = not self._foresight.tells_samples_apart
            self._order_by(job, Expectation.together(self._foresight.expect(asked[:1] if alike else asked)))

    def _is_cheap_to_split(self, group: Sequence[tuple[Request, Asked | None]]) -> bool:
        """Whether it is, for what is known of the engines."""
        assert self._foresight is not None
        used = [engine for engine in self._engines if not engine.is_leaving]
        if not used or not all(engine.is_measured for engine in used):
            return False
        expected = Expectation.together(self._foresight.expect([told for _, told in group if told is not None]))
        prompt = len(group[0][0].prompt_ids)
        return is_cheap_to_split(used[0].state(idle=True), prompt_tokens=prompt, response_tokens=expected.tokens)

    def _order_by(self, job: Job, expected: Expectation) -> None:
        job.expected = expected
        job.priority = SCOUT if job.is_scout else priority(expected.tokens, self._order)

    def _follow_scouts(self) -> None:
        """Expect anew those whose scout still runs, by how far it has come."""
        if not self._scouted or self._foresight is None:
            return
        for engine in self._engines:
            if engine.load is None:
                continue
            for own in engine.load.made.keys() & self._scouted.keys() & engine.in_hand.keys():
                others, scout = self._scouted[own], engine.in_hand[own]
                if others.requests:
                    context, left = scout.work(engine.load.made[own])
                    tokens = context - len(scout.request.prompt_ids) + left
                    self._order_by(others, self._foresight.suppose(next(iter(others.asked.values())), tokens))

    async def _tend(self, engine: Engine) -> None:
        """Wait for news of an engine, through all of its deaths."""
        while True:
            try:
                facts = await engine.port.ready()
                if not self._fits(engine, facts):
                    return
                engine.facts = facts
                self._decide()
                while True:
                    self._take(engine, await engine.port.news())
            except WorkerDied:
                engine.end()
                self._arrived = [*engine.take_back(), *self._arrived]
                self._decide()

    def _fits(self, engine: Engine, facts: EngineFacts) -> bool:
        """Whether an engine has the model of the run. One that has not is forgotten.

        Raises:
            ClusterError: it has not, and there is no other.
        """
        if engine.is_leaving:
            return True
        try:
            self.check_model(engine.port.name, facts)
        except ClusterError as misfit:
            self._engines.remove(engine)
            if all(other.is_leaving for other in self._engines):
                raise
            self.on_misfit(engine.port.name, str(misfit))
            return False
        return True

    def _take(self, engine: Engine, news: Sequence[News]) -> None:
        for item in news:
            match item:
                case EngineLoad():
                    engine.load = item
                case Piece():
                    if (asked := engine.in_hand.get(item.request_id)) is not None:
                        stream = asked.job.stream
                        stream.see(replace(item, request_id=asked.request.request_id))
                case Leaving():
                    self.on_leaving(engine.port.name)
                case Finished():
                    self._finish(engine, item)
                case Refused():
                    self._refuse(engine, item)
        if not all(isinstance(item, Piece) for item in news):
            engine.news.set()
            self._decide()

    def _refuse(self, engine: Engine, item: Refused) -> None:
        for own in item.request_ids:
            if (asked := engine.in_hand.pop(own, None)) is not None:
                engine.moving.pop(own, None)
                asked.job.stream.put(own, item.error)
                self._release(own)

    def _finish(self, engine: Engine, item: Finished) -> None:
        own = item.sample.request_id
        if (asked := engine.in_hand.pop(own, None)) is None:
            return
        start = asked.job.starts.get(own, item.start)
        if own in engine.moving:
            target = engine.moving.pop(own)
            if item.sample.finish_reason is FinishReason.ABORT:
                self._go_on(asked, own, item.sample, start, target)
                return
        sample, job = replace(item.sample, request_id=asked.request.request_id), asked.job
        job.stream.put(own, Generated(sample=sample, worker=engine.port.name, start=start, end=item.end))
        self._learn(job, own, sample)
        self._release(own)

    def _learn(self, job: Job, own: int, sample: Sample) -> None:
        if self._foresight is None or job.expected is None or job.step is None:
            return
        ended = self._foresight.ended(job.step, job.asked[own], job.expected, sample)
        if ended is not None:
            self._do(self._foresight.check(job.step, ended, self.idle_states()))

    def _go_on(self, asked: InHand, own: int, begun: Sample, start: float, target: Engine | None) -> None:
        """Have a response that was withdrawn go on elsewhere."""
        request = asked.request
        if len(begun.response_ids):
            tokens, log_probs = begun.response_ids.tolist(), begun.rollout_log_probs.tolist()
            piece = Piece(request_id=request.request_id, start=0, tokens=tokens, log_probs=log_probs)
            asked.job.stream.see(piece)  # the engine that goes on does not know what was told of it
            request = replace(request, begun=begun)
        starts, version = {}, asked.job.version
        if len(begun.response_ids):
            starts = {own: start}
            version = max(version, int(begun.weight_versions[-1]))  # weights only get newer while it generates
        job = replace(asked.job, requests={own: request}, starts=starts, version=version)
        if target is None or target.is_leaving or target.facts is None:
            self._arrived.append(job)
        else:
            target.planned.appendleft(job)

    def _release(self, scout: int) -> None:
        """Expect those anew whose scout has ended."""
        if (others := self._scouted.pop(scout, None)) is not None:
            self._expect([others])

    def _decide_soon(self) -> None:
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(_GATHER_S, self._decide)

    def _decide(self) -> None:
        """Plan where jobs go, and give the engines what they have room for."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        engines = [engine for engine in self._engines if engine.facts is not None and not engine.is_leaving]
        if not engines:
            return
        self._follow_scouts()
        self._plan(engines)
        for engine in engines:
            if parcels := engine.take_planned():
                self._do(self._give(engine, engine.life, parcels))
        self._move(engines)

    def _move(self, engines: Sequence[Engine]) -> None:
        """Move running responses to engines with room, where that is predicted to pay."""
        now = asyncio.get_running_loop().time()
        if (
            self._one_version
            or not self._policy.plans
            or self._arrived
            or now < self._moves_after
            or not all(engine.can_move for engine in engines)
            or _dry(engines) is None
        ):
            return
        self._moves_after = now + EVERY_S
        states = [engine.state() for engine in engines]
        ends = [engine.link_end for engine in engines]
        ways: dict[Way, MoveSeconds] = {"recompute": recompute_s(states), "transfer": transfer_s(ends)}
        chosen: dict[tuple[int, Way], dict[int, Engine | None]] = {}
        for move in at_once(moves(states, ways), states, ends):
            own = list(engines[move.source].in_hand)[move.sequence]
            chosen.setdefault((move.source, move.way), {})[own] = engines[move.target]
            self.on_move(engines[move.source].port.name, engines[move.target].port.name, move.way)
        for (source, way), moving in chosen.items():
            self._do(self._withdraw(engines[source], moving, way))

    def _plan(self, engines: Sequence[Engine]) -> None:
        """Place what has arrived; and what is planned already, where an engine has run dry."""
        policy, measured = self._policy, all(engine.is_measured for engine in engines)
        if policy.plans and not measured:
            policy = self._pull  # until it is known what steps cost
        waiting = sum(len(engine.planned) for engine in engines)
        idle = any(not engine.in_hand for engine in engines)
        if self._plans and _dry(engines) is not None and is_outdated(self._planned, waiting, any_idle=idle):
            for engine in engines:  # what comes from another engine stays where it was to go
                self._arrived += [job for job in engine.planned if not job.starts]
                engine.planned = deque(job for job in engine.planned if job.starts)
        if not self._arrived:
            return
        jobs = sorted(self._arrived, key=lambda job: job.turn)
        states = [engine.state(by_number=not measured) for engine in engines]  # else the unknown one would get nothing
        placement = policy.place([job.placed for job in jobs], states)
        for engine, places in zip(engines, placement.of, strict=True):
            planned = [*engine.planned, *(jobs[place] for place in places)]
            engine.planned = deque(sorted(planned, key=lambda job: job.turn))
        self._arrived = [jobs[place] for place in placement.later]
        self._planned = sum(len(engine.planned) for engine in engines)

    async def _give(self, engine: Engine, life: int, parcels: Sequence[Parcel]) -> None:
        async with engine.turn:  # in the order of the decisions
            if engine.life == life:
                began = asyncio.get_running_loop().time()
                with suppress(WorkerDied):  # `_tend` meets the death, too
                    await engine.port.give(parcels)
                    engine.link.sent(sum(map(_cache_bytes, parcels)), asyncio.get_running_loop().time() - began)

    async def _close(self, stream: GeneratedStream) -> None:
        """End all that `stream` has not yielded."""
        self._streams.discard(stream)
        self._arrived = [job for job in self._arrived if job.stream is not stream]
        self._scouted = {own: job for own, job in self._scouted.items() if job.stream is not stream}
        await asyncio.gather(*(self._drop(engine, stream) for engine in self._engines))
        self._decide()

    async def _drop(self, engine: Engine, stream: GeneratedStream) -> None:
        engine.planned = deque(job for job in engine.planned if job.stream is not stream)
        dropped = [own for own, asked in engine.in_hand.items() if asked.job.stream is stream]
        for own in dropped:
            del engine.in_hand[own]
            engine.moving.pop(own, None)
        engine.news.set()
        await self._tell_drop(engine, dropped)

    async def _tell_drop(self, engine: Engine, dropped: Sequence[int]) -> None:
        if not dropped or engine.facts is None:
            return
        life = engine.life
        async with engine.turn:
            if engine.life == life:
                with suppress(WorkerDied):
                    await engine.port.drop(dropped)

    def _do(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run something beside; its error ends `run`."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self._failed is not None
            if not self._failed.done():
                self._failed.set_exception(error)


class NewestGenerator:
    """See `GenerationService.newest`."""

    def __init__(self, service: GenerationService, version: Callable[[], WeightVersion]) -> None:
        self._service = service
        self._version = version

    def submit(self, requests: Sequence[Request]) -> Samples:
        """See `Engine.submit`; every error comes from the stream."""
        return Samples(self._service.generate(requests, version=self._version()))


def _cache_bytes(parcel: Parcel) -> int:
    """Bytes of keys and values in a parcel."""
    begun = (request.begun for request in parcel.requests)
    return sum(sample.cache.data.nbytes for sample in begun if sample is not None and sample.cache is not None)


def _dry(engines: Iterable[Engine]) -> Engine | None:
    """An engine that has room, and nothing planned."""
    return next((engine for engine in engines if not engine.planned and engine.has_room_for(1)), None)

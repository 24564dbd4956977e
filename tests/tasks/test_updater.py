"""New weights are installed when the mode says so, and no response begins with weights that are too old for it."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import numpy as np
import pytest

from tailrace.activity import Activity
from tailrace.config.engine import SamplingConfig
from tailrace.config.weights import WeightsMode
from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright
from tailrace.errors import EngineError, WeightsError
from tailrace.events import Event, EventLog
from tailrace.host.virtual_loop import VirtualLoop
from tailrace.rollout.updater import EngineUpdater
from tailrace.types import Request, Sample, WeightVersion
from tests.tasks.schedules import LIMIT_S, MODES, Device, Hub, Source
from tests.transfer.virtual_time import settle, virtual_time

SCHEDULES = 250
"""The number of schedules in each mode."""


class LoopLog(EventLog):
    """An event log with the loop's clock."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class Site:
    """An engine with its updater, and the samples that it has made."""

    def __init__(self, chance: random.Random, source: Source, mode: WeightsMode, *, timeout_s: float = LIMIT_S) -> None:
        self.events: list[Event] = []
        log = LoopLog(sinks=(self.events.append,))
        self.activity = Activity(log, "rollout")
        self.device = Device(chance, chance.choice((0.2, 1.0)))
        self.engine = FakeEngine(executor=self.device, playwright=RandomPlaywright(50))
        self.updater = EngineUpdater(self.engine, source, mode, log=log, activity=self.activity, timeout_s=timeout_s)
        self.source = source
        self.made: list[tuple[WeightVersion, Sample]] = []
        """The samples, each with the version that it needed."""
        self.unfinished = 0
        self._ids = iter(range(10**6))

    async def respond(self, needed: WeightVersion, *, tokens: int, samples: int = 1) -> None:
        """Generate as a rollout worker does."""
        requests = [
            Request(
                request_id=next(self._ids),
                group_id=needed,
                prompt_ids=np.arange(1, 4),
                sampling=SamplingConfig(max_new_tokens=tokens, ignore_eos=True),
                seed=0,
            )
            for _ in range(samples)
        ]
        async with self.updater.generating(needed):
            self.unfinished += 1
            async for sample in self.engine.submit(requests):
                self.made.append((needed, sample))
            self.unfinished -= 1

    def seconds(self) -> dict[str, float]:
        """The seconds in each state since the last call."""
        self.activity.emit()
        return self.events[-1].metrics

    @property
    def versions(self) -> list[list[WeightVersion]]:
        """The weight versions of each sample's tokens."""
        return [sample.weight_versions.tolist() for _, sample in self.made]


@dataclass
class Scene:
    """Engines that update themselves."""

    hub: Hub
    sites: list[Site]


@asynccontextmanager
async def scene(
    mode: WeightsMode, *, engines: int = 1, seed: int = 0, slowest: float = 9.0, timeout_s: float = LIMIT_S
) -> AsyncIterator[Scene]:
    chance = random.Random(seed)
    hub = Hub(chance, engines, wait=mode == "synchronous", slowest=slowest)
    sites = [Site(chance, source, mode, timeout_s=timeout_s) for source in hub.sources]
    updates = [asyncio.create_task(site.updater.run()) for site in sites]
    yield Scene(hub, sites)
    for update in updates:
        update.cancel()
    await asyncio.wait(updates)
    assert all(update.cancelled() for update in updates)


def check_installs(hub: Hub, sites: list[Site], mode: WeightsMode) -> None:
    """Check, at each installation, that the engine may install now."""

    def check(site: Site) -> None:
        assert mode not in ("delayed", "sub_step") or not site.unfinished
        assert mode != "sub_step" or hub.turns == [site.source]

    for site in sites:
        site.source.on_install = lambda version, site=site: check(site)  # type: ignore[misc]


async def random_scene(mode: WeightsMode, seed: int) -> bool:
    """Publish versions while responses begin that need any of them. Return whether a response spans versions."""
    chance = random.Random(f"updater {seed}")
    last = chance.randint(1, 4)
    async with (
        scene(mode, engines=chance.randint(1, 3), seed=seed, slowest=chance.choice((0.5, 9.0))) as made,
        asyncio.TaskGroup() as responses,
    ):
        check_installs(made.hub, made.sites, mode)

        async def prompts(site: Site) -> None:
            while made.hub.published < last or chance.random() < 0.5:
                needed = chance.randint(max(0, made.hub.published - 2), made.hub.published)
                size = {"tokens": chance.randint(1, 12), "samples": chance.randint(1, 3)}
                responses.create_task(site.respond(needed, **size))
                await asyncio.sleep(chance.uniform(0.0, 6.0))

        for site in made.sites:
            responses.create_task(prompts(site))
        for version in range(1, last + 1):
            await asyncio.sleep(chance.uniform(0.0, 12.0))
            await made.hub.publish(version)
        for site in made.sites:
            async with asyncio.timeout(LIMIT_S):
                await site.source.until(lambda site=site: site.source.has == last)  # type: ignore[misc]
    for site in made.sites:
        for needed, sample in site.made:
            versions = sample.weight_versions.tolist()
            assert needed <= versions[0]
            assert versions == sorted(versions)
            assert mode not in ("delayed", "sub_step") or versions[0] == versions[-1]
    return any(len(set(versions)) > 1 for site in made.sites for versions in site.versions)


@pytest.mark.parametrize("mode", MODES)
def test_in_every_schedule_all_engines_take_all_weights_at_their_time(mode: WeightsMode) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        spans = [runner.run(random_scene(mode, seed)) for seed in range(SCHEDULES)]
    assert any(spans) == (mode in ("in_flight", "synchronous"))


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_waits_for_weights_from_their_announcement_until_they_go_in(mode: WeightsMode) -> None:
    """The engine waits although it has nothing to do."""

    @virtual_time
    async def waits() -> None:
        async with scene(mode) as made, asyncio.timeout(LIMIT_S):
            (site,) = made.sites
            await asyncio.sleep(10.0)
            await made.hub.publish(1)
            await site.source.until(lambda: site.source.has == 1)
            took = asyncio.get_running_loop().time() - 10.0
            await asyncio.sleep(5.0)
            installing = site.events[-1].end - site.events[-1].start
            expected = {"busy": installing, "weights": took - installing, "data": 0.0, "idle": 15.0}
            assert site.seconds() == pytest.approx(expected)

    waits()


@virtual_time
async def test_a_response_waits_for_weights_that_nobody_has_announced() -> None:
    async with scene("in_flight") as made, asyncio.timeout(LIMIT_S):
        (site,) = made.sites
        response = asyncio.create_task(site.respond(1, tokens=1))
        await asyncio.sleep(10.0)
        assert site.seconds()["weights"] == 10.0
        await made.hub.publish(1)
        await response


@virtual_time
async def test_an_in_flight_engine_changes_in_the_middle_of_a_response() -> None:
    async with scene("in_flight") as made, asyncio.timeout(LIMIT_S):
        (site,) = made.sites
        response = asyncio.create_task(site.respond(0, tokens=500))
        await made.hub.publish(1)
        await response
    assert set(site.versions[0]) == {0, 1}
    assert site.versions[0] == sorted(site.versions[0])


@virtual_time
async def test_a_delayed_engine_begins_what_its_weights_are_new_enough_for_until_something_needs_newer_ones() -> None:
    async with scene("delayed") as made, asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as responses:
        (site,) = made.sites
        responses.create_task(site.respond(0, tokens=500))
        await made.hub.publish(1)
        await site.source.until(lambda: site.source.received == 1)
        await site.respond(0, tokens=3)  # begins and finishes while the first goes on
        responses.create_task(site.respond(1, tokens=3))
        await settle()
        responses.create_task(site.respond(0, tokens=3))  # comes after the response that needs the new weights
    assert [versions[0] for versions in site.versions] == [0, 0, 1, 1]
    assert all(versions[0] == versions[-1] for versions in site.versions)


@virtual_time
async def test_nothing_begins_while_a_delayed_engine_takes_its_weights() -> None:
    async with scene("delayed") as made, asyncio.timeout(LIMIT_S):
        (site,) = made.sites
        began_with: list[WeightVersion] = []

        async def respond() -> None:
            async with site.updater.generating(0):
                began_with.append(site.updater.version)

        prompted: list[asyncio.Task[None]] = []
        site.source.on_take = lambda: prompted.append(asyncio.create_task(respond()))
        await made.hub.publish(1)
        await site.source.until(lambda: site.source.has == 1)
        await asyncio.wait(prompted)
    assert began_with == [1]


@virtual_time
async def test_engines_in_turns_hold_back_one_at_a_time_while_the_others_begin_responses() -> None:
    async with scene("sub_step", engines=3, slowest=0.1) as made, asyncio.timeout(LIMIT_S):
        sites = made.sites
        responses = [asyncio.create_task(site.respond(0, tokens=300)) for site in sites]
        await settle()
        await made.hub.publish(1)
        await asyncio.sleep(1.0)
        (turn,) = made.hub.turns
        out = next(site for site in sites if site.source is turn)
        held = asyncio.create_task(out.respond(0, tokens=1))
        for site in sites:
            if site is not out:
                await site.respond(0, tokens=1)
        assert (made.hub.turns, held.done(), [site.source.has for site in sites]) == ([turn], False, [0, 0, 0])
        await asyncio.wait([held, *responses])
        for site in sites:
            await site.source.until(lambda site=site: site.source.has == 1)  # type: ignore[misc]
    assert [versions for site in sites for versions in site.versions if len(set(versions)) > 1] == []
    assert out.versions[-1] == [1]


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_do_not_come_are_one_clear_line(mode: WeightsMode) -> None:
    @virtual_time
    async def waits() -> None:
        async with scene(mode, timeout_s=30) as made:
            (site,) = made.sites
            with pytest.raises(WeightsError) as caught:
                await site.respond(2, tokens=1)
            assert str(caught.value) == (
                "weights of version 2 have not been installed within 30 s, and the engine has version 0; "
                "is the trainer alive? If they only take long, raise weights.timeout_s"
            )
            async with asyncio.timeout(30):
                await site.respond(0, tokens=1)

    waits()


@pytest.mark.parametrize("mode", ["delayed", "sub_step"])
def test_that_weights_wait_for_responses_is_a_span_until_they_are_installed(mode: WeightsMode) -> None:
    @virtual_time
    async def drains() -> None:
        async with scene(mode) as made, asyncio.timeout(LIMIT_S):
            (site,) = made.sites
            response = asyncio.create_task(site.respond(0, tokens=300))
            await settle()
            await made.hub.publish(1)
            await site.source.until(lambda: site.source.received == 1)
            arrived = asyncio.get_running_loop().time()
            await response
            finished = asyncio.get_running_loop().time()
            await site.source.until(lambda: site.source.has == 1)
            drain, install = site.events
            assert (drain.task, drain.version, drain.start, drain.end) == ("weights_drain", 1, arrived, finished)
            assert (install.task, install.version, install.start) == ("update_weights", 1, finished)
            on_their_way, going_in = arrived, install.end - install.start
            seconds = site.seconds()
            assert (seconds["weights"], seconds["busy"]) == pytest.approx((on_their_way, going_in))

    drains()


@pytest.mark.parametrize("mode", ["delayed", "sub_step"])
def test_that_responses_finish_first_may_take_longer_than_the_limit(mode: WeightsMode) -> None:
    @virtual_time
    async def waits() -> None:
        async with scene(mode, engines=3, timeout_s=30) as made, asyncio.TaskGroup() as responses:
            for site in made.sites:
                responses.create_task(site.respond(0, tokens=2000))
            await settle()
            began = asyncio.get_running_loop().time()
            await made.hub.publish(1)
            await asyncio.gather(*(site.respond(1, tokens=1) for site in made.sites))
            assert asyncio.get_running_loop().time() - began > 5 * 30
        assert all(site.versions[-1] == [1] for site in made.sites)

    waits()


@pytest.mark.parametrize("mode", ["delayed", "sub_step"])
def test_weights_that_do_not_go_in_after_the_responses_are_one_clear_line(mode: WeightsMode) -> None:
    @virtual_time
    async def waits() -> None:
        async with scene(mode, timeout_s=30) as made:
            (site,) = made.sites
            response = asyncio.create_task(site.respond(0, tokens=2000))
            await settle()
            site.source.on_take = lambda: setattr(site.device, "slowest", LIMIT_S)
            await made.hub.publish(1)
            with pytest.raises(WeightsError, match="weights of version 1 have not been installed within 30 s"):
                await site.respond(1, tokens=1)
            assert response.done()

    waits()


@pytest.mark.parametrize("mode", ["delayed", "sub_step"])
def test_an_engine_that_stands_still_before_it_takes_weights_ends_the_updater(mode: WeightsMode) -> None:
    @virtual_time
    async def waits() -> None:
        chance = random.Random(0)
        hub = Hub(chance, 1, wait=False)
        site = Site(chance, hub.sources[0], mode, timeout_s=30)
        update = asyncio.create_task(site.updater.run())
        response = asyncio.create_task(site.respond(0, tokens=100, samples=2))
        await hub.publish(1)
        await asyncio.sleep(5)
        await site.engine.pause_generation()
        with pytest.raises(WeightsError) as caught:
            await update
        assert str(caught.value) == (
            "new weights wait for 2 responses, and the engine has made no step for them within 30 s; is its device "
            "stuck? If a step takes that long, raise weights.timeout_s"
        )
        assert not hub.lock.locked()
        response.cancel()
        await asyncio.wait([response])

    waits()


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_outlives_a_trainer_that_is_silent_for_longer_than_any_limit(mode: WeightsMode) -> None:
    @virtual_time
    async def waits() -> None:
        async with scene(mode, timeout_s=30) as made:
            (site,) = made.sites
            site.source.lose(lost=True)
            await asyncio.sleep(100)
            site.source.arrive(1)  # it was here before the trainer was lost
            await asyncio.sleep(100)
            assert site.source.has == (0 if mode == "sub_step" else 1), "turns are the trainer's to give"
            site.source.lose(lost=False)
            async with asyncio.timeout(30):
                await site.respond(1, tokens=1)
                await made.hub.publish(2)
                await site.respond(2, tokens=1)

    waits()


@pytest.mark.parametrize("mode", MODES)
def test_a_response_that_is_cancelled_leaves_nobody_waiting(mode: WeightsMode) -> None:
    @virtual_time
    async def cancels() -> None:
        async with scene(mode) as made, asyncio.timeout(100):
            (site,) = made.sites
            begun = asyncio.create_task(site.respond(0, tokens=5000))
            await settle()
            waiting = asyncio.create_task(site.respond(1, tokens=1))
            await settle()
            behind = asyncio.create_task(site.respond(0, tokens=1))
            await settle()
            waiting.cancel()
            await behind
            begun.cancel()
            await asyncio.wait([waiting, begun])
            await made.hub.publish(1)
            await site.respond(1, tokens=2)
        assert site.versions[-1] == [1, 1]

    cancels()


@pytest.mark.parametrize("mode", MODES)
def test_an_updater_that_is_cancelled_lets_its_turn_go_and_holds_nothing_back(mode: WeightsMode) -> None:
    @virtual_time
    async def cancels() -> None:
        chance = random.Random(0)
        hub = Hub(chance, 1, wait=False)
        site = Site(chance, hub.sources[0], mode)
        update = asyncio.create_task(site.updater.run())
        response = asyncio.create_task(site.respond(0, tokens=5000))
        await hub.publish(1)
        await asyncio.sleep(50)
        update.cancel()
        with suppress(asyncio.CancelledError):
            await update
        assert not hub.lock.locked()
        async with asyncio.timeout(100):
            await site.respond(0, tokens=1)
        response.cancel()
        await asyncio.wait([response])

    cancels()


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_refuses_its_weights_ends_the_updater(mode: WeightsMode) -> None:
    @virtual_time
    async def fails() -> None:
        chance = random.Random(0)
        hub = Hub(chance, 1, wait=False)
        site = Site(chance, hub.sources[0], mode)
        update = asyncio.create_task(site.updater.run())
        await site.engine.close()
        await hub.publish(1)
        async with asyncio.timeout(100):
            with pytest.raises(EngineError, match="closed"):
                await update
        assert (site.updater.version, site.source.has, hub.lock.locked()) == (0, 0, False)

    fails()

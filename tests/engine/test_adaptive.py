"""An engine's own decisions to change its TP, by profiles made by hand."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tailrace.config.engine import AdaptiveTPConfig, NativeEngineConfig
from tailrace.conformance.requests import collect, make_request, same_tokens
from tailrace.conformance.tiny import write_tiny_model
from tailrace.engine import arrangement
from tailrace.engine.adaptive_tp.adaptive import AdaptiveTP, Wanted
from tailrace.engine.adaptive_tp.profile_key import profile_key
from tailrace.engine.core import EngineCore
from tailrace.engine.driver import DrivenEngine
from tailrace.errors import RequestError, TailraceWarning
from tailrace.models.architecture import read_architecture
from tailrace.planning.dispatch.base import Degree
from tailrace.planning.latency import CorrectedPredictor
from tailrace.planning.tp_profile import TPProfile
from tailrace.planning.tp_switch import SwitchController
from tailrace.types import Request, Sample
from tests.engine.helpers import TINY_GIB, make_core, run_core
from tests.engine.switching import is_alive, pids
from tests.planning.tp_profiles import made_profile

CPU = torch.device("cpu")
LIMIT_S = 60
LONGEST = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("adaptive") / "llama", seed=0)


def config_of(path: Path) -> NativeEngineConfig:
    settings = {"profile": str(path), "estimate": "bound", "steps_between": 8, "max_response_tokens": LONGEST}
    return NativeEngineConfig(
        dtype="float32",
        block_size=4,
        kv_cache_gib=0.01,
        dp=2,
        threads_per_rank=1,
        adaptive_tp=AdaptiveTPConfig.model_validate(settings),
    )


def with_degrees(config: NativeEngineConfig, degrees: tuple[int, ...]) -> NativeEngineConfig:
    assert config.adaptive_tp is not None
    adaptive_tp = config.adaptive_tp.model_copy(update={"degrees": degrees})
    return config.model_copy(update={"adaptive_tp": adaptive_tp})


def step_s(tp: int, size: int, tokens: int, replicas: int) -> float:
    """Predict a step: TP 2 is quicker than TP 1 for up to three sequences, and slower for more."""
    return 0.1 + 0.001 * size if tp == 1 else 0.03 * size + 0.01


def profile_of(model: Path, config: NativeEngineConfig) -> TPProfile:
    key = profile_key(config, read_architecture(model), model="tiny", device=CPU)
    return msgspec.structs.replace(made_profile(step_s), key=key)


@pytest.fixture(scope="module")
def profile(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    profile_of(model, config_of(path)).write(path)
    return path


@pytest.fixture(scope="module")
def made(model: Path, profile: Path) -> Iterator[EngineCore]:
    with closing(EngineCore(config_of(profile), model, device=CPU)) as core:
        yield core


@pytest.fixture(autouse=True)
def as_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the profile alone decide: times of this machine correct no prediction, and no lane runs ahead of another."""
    monkeypatch.setattr("tailrace.engine.core.first_done", lambda lanes, **_: [lane for lane in lanes if lane.busy])
    monkeypatch.setattr(CorrectedPredictor, "observe", lambda *_: None)
    monkeypatch.setattr(SwitchController, "observe_switch", lambda *_: None)


@pytest.fixture
def core(made: EngineCore) -> EngineCore:
    """An idle core at TP 1, between two stages."""
    assert made.adaptive_tp is not None
    run_core(made, [])
    if made.arrangement.config.tp != 1:
        made.arrangement.switch(1, cache="move")
    made.adaptive_tp.take()
    return made


def skewed(count: int = 8, *, first: int = 0) -> list[Request]:
    """Requests of which the first is much longer than the others."""
    chance = random.Random(0)
    lengths = [100, *(chance.randint(10, 20) for _ in range(count - 1))]
    return [make_request(first + i, max_new_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)]


def uniform() -> list[Request]:
    return [make_request(i, max_new_tokens=24, ignore_eos=True) for i in range(8)]


def changes(core: EngineCore) -> list[tuple[int, int]]:
    assert core.adaptive_tp is not None
    return [(v.source_tp, v.target_tp) for v in core.adaptive_tp.take() if v.report is not None]


def test_tp_rises_as_the_batch_drains_and_returns_at_the_end_of_the_stage(core: EngineCore, model: Path) -> None:
    assert core.adaptive_tp is not None
    samples = run_core(core, skewed())
    assert not core.adaptive_tp.in_stage
    assert core.arrangement.config.tp == 1
    verdicts = core.adaptive_tp.take()
    first, *_, last = verdicts
    assert (first.unfinished, first.source_tp, first.target_tp) == (8, 1, 1), "it begins as the profile favours"
    rise, fall = (verdict for verdict in verdicts if verdict.report is not None)
    assert (rise.source_tp, rise.target_tp) == (1, 2)
    assert 1 <= rise.unfinished <= 3
    assert fall is last
    assert (fall.source_tp, fall.target_tp, fall.unfinished, fall.decision) == (2, 1, 0, None)
    assert same_tokens(samples, run_core(make_core(model), skewed()))


def test_those_who_place_responses_are_told_what_the_other_degree_would_cost(core: EngineCore) -> None:
    for request in skewed():
        core.add(request)
    told: list[tuple[int, Degree]] = []
    while core.has_work:
        core.step()
        load = core.load()
        told += [(load.tp, degree) for degree in load.degrees]
    assert {(tp, degree.tp, degree.replicas) for tp, degree in told} == {(1, 2, 1), (2, 1, 2)}
    fast, slow = (next(degree for tp, degree in told if tp == of) for of in (1, 2))
    assert fast.cache_tokens == pytest.approx(2 * slow.cache_tokens, rel=0.01), "whole blocks"
    for size in (1, 4, 8):
        assert fast.times.step_s(2, size, 50 * size, 1) == pytest.approx(step_s(2, size, 50 * size, 1), rel=0.05)
        assert slow.times.step_s(1, size, 50 * size, 2) == pytest.approx(step_s(1, size, 50 * size, 2), rel=0.05)
    assert fast.switch_s > 0
    assert slow.switch_s > 0


@pytest.mark.filterwarnings("ignore::tailrace.errors.TailraceWarning")
def test_those_who_place_responses_are_not_told_of_a_degree_that_cannot_be_chosen(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert core.adaptive_tp is not None
    for request in skewed():
        core.add(request)
    told: list[tuple[bool, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(arrangement, "switch_bytes", lambda *_: 2**60)
        while core.has_work:
            core.step()
            if core.adaptive_tp.in_stage:
                refused = any(verdict.failure for verdict in core.adaptive_tp.verdicts)
                told.append((refused, len(core.load().degrees)))
    assert {*told} == {(False, 1), (True, 0)}
    run_core(core, skewed(first=100))
    assert core.load().degrees, "another stage is another matter"
    monkeypatch.setattr(core.arrangement, "_failures", arrangement.MAX_FAILURES)
    assert core.load().degrees == []


def test_a_switch_before_which_all_responses_end_is_told(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert core.adaptive_tp is not None
    rearrange = core._rearrange

    def too_late(adaptive_tp: AdaptiveTP, wanted: Wanted) -> list[Sample]:
        core.abort(range(8))
        return rearrange(adaptive_tp, wanted)

    monkeypatch.setattr(core, "_rearrange", too_late)
    run_core(core, skewed())
    dropped = [verdict for verdict in core.adaptive_tp.take() if verdict.failure]
    assert [(v.source_tp, v.target_tp, v.report, v.failure) for v in dropped] == [
        (1, 2, None, "all responses had ended before")
    ]
    assert core.arrangement.config.tp == 1


def test_every_decision_is_told_with_all_its_terms(core: EngineCore) -> None:
    assert core.adaptive_tp is not None
    run_core(core, skewed())
    verdicts = core.adaptive_tp.take()
    assert len(verdicts) > 3, "the question is asked again as the batch shrinks"
    for verdict in verdicts[:-1]:
        assert verdict.decision is not None
        assert verdict.began_at <= verdict.ended_at
        assert [candidate.tp for candidate in verdict.decision.candidates] == [1, 2]
        for candidate in verdict.decision.candidates:
            c = candidate
            parts = c.groups_s + c.reshard_s + c.rest_s + c.capture_s + min(c.move_s, c.recompute_s)
            assert c.switch_s == pytest.approx(parts)
            assert c.total_s == pytest.approx(c.plan_s + c.switch_s + c.return_s)
            assert c.later or c.plan_s == pytest.approx(c.remaining_s)
        assert verdict.decision.switch == (verdict.report is not None)
    assert core.adaptive_tp.take() == []


def test_the_end_of_a_stage_is_told_also_where_nothing_changes(core: EngineCore) -> None:
    assert core.adaptive_tp is not None
    run_core(core, uniform())
    *_, last = core.adaptive_tp.take()
    assert (last.unfinished, last.decision, last.source_tp, last.target_tp) == (0, None, 1, 1)


def test_nothing_changes_where_all_responses_end_together(core: EngineCore) -> None:
    run_core(core, uniform())
    assert changes(core) == []


def test_a_stage_begins_with_the_degree_that_is_best_for_it(core: EngineCore) -> None:
    assert core.adaptive_tp is not None
    run_core(core, [make_request(0, max_new_tokens=20, ignore_eos=True)])
    first, *others = core.adaptive_tp.take()
    assert (first.source_tp, first.target_tp) == (1, 2)
    assert all(verdict.report is None for verdict in others), "it began with TP 2, and keeps it when it ends"
    assert core.arrangement.config.tp == 2
    run_core(core, uniform())
    assert changes(core) == [(2, 1)]


def test_with_the_preset_of_pat_it_stays_where_the_batch_ended(model: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "profile.json")
    profile_of(model, config).write(tmp_path / "profile.json")
    settings = {"preset": "pat", "profile": str(tmp_path / "profile.json"), "max_response_tokens": LONGEST}
    strict = config.model_copy(update={"adaptive_tp": AdaptiveTPConfig.model_validate(settings)})
    with closing(EngineCore(strict, model, device=CPU)) as core:
        run_core(core, skewed())
        assert changes(core) == [(1, 2)]
        assert core.arrangement.config.tp == 2


def test_a_batch_that_comes_in_parts_is_judged_as_a_whole(core: EngineCore) -> None:
    assert core.adaptive_tp is not None
    for request in uniform():
        core.add(request)
        core.step()
    run_core(core, [])
    assert next(verdict.unfinished for verdict in core.adaptive_tp.take()) == 8


def test_it_returns_to_what_the_full_batch_had_whatever_the_stage_began_with(core: EngineCore) -> None:
    first, *others = skewed()
    core.add(first)
    for _ in range(10):
        core.step()
    assert core.arrangement.config.tp == 2
    for request in others:
        core.add(request)
    run_core(core, [])
    assert changes(core) == [(1, 2), (2, 1), (1, 2), (2, 1)]
    assert core.arrangement.config.tp == 1


@pytest.mark.filterwarnings("ignore::tailrace.errors.TailraceWarning")
@pytest.mark.parametrize("requests", [skewed(), skewed(1)], ids=["in the middle", "at the beginning"])
def test_what_was_refused_is_not_tried_again_in_the_stage(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, requests: Sequence[Request]
) -> None:
    assert core.adaptive_tp is not None
    with monkeypatch.context() as patch:
        patch.setattr(arrangement, "switch_bytes", lambda *_: 2**60)
        run_core(core, requests)
    verdicts = core.adaptive_tp.take()
    refused = [verdict for verdict in verdicts if verdict.failure]
    assert len(refused) == 1
    assert refused[0].report is None
    last = [verdict.decision for verdict in verdicts if verdict.decision is not None][-1]
    assert last.ruled_out == {2: refused[0].failure}
    assert core.arrangement.config.tp == 1
    run_core(core, skewed(first=100))
    assert changes(core) == [(1, 2), (2, 1)], "another stage is another matter"


@pytest.mark.filterwarnings("ignore::tailrace.errors.TailraceWarning")
def test_what_was_refused_is_tried_again_where_work_never_ends_once_the_batch_has_doubled(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert core.adaptive_tp is not None

    def join(number: int, new_tokens: int) -> None:
        core.add(make_request(number, max_new_tokens=new_tokens, ignore_eos=True))

    def asked(steps: int) -> list[dict[int, str]]:
        """Make steps, and return the degrees ruled out at each decision that did not switch."""
        assert core.adaptive_tp is not None
        for _ in range(steps):
            core.step()
        return [v.decision.ruled_out for v in core.adaptive_tp.take() if v.decision is not None and not v.report]

    join(0, 100)
    join(1, 100)
    with monkeypatch.context() as patch:
        patch.setattr(arrangement, "switch_bytes", lambda *_: 2**60)
        at_first, *then = asked(8)
    assert at_first == {}
    join(2, 25)
    then += asked(8)
    assert then
    assert all(list(ruled_out) == [2] for ruled_out in then), "three are less than twice as many"
    join(3, 10)
    doubled = asked(8)
    assert doubled
    assert doubled[-1] == {}
    assert core.arrangement.config.tp == 1, "which is best for four"
    run_core(core, [])
    assert changes(core)[0] == (1, 2)


def test_a_refusal_is_a_warning(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(arrangement, "switch_bytes", lambda *_: 2**60)
        with pytest.warns(TailraceWarning, match="^TP stays 1: a switch needs 1073741824"):
            run_core(core, skewed())


async def test_the_asynchronous_engine_pauses_updates_and_closes_the_stage(core: EngineCore, model: Path) -> None:
    assert core.adaptive_tp is not None
    state = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    with ThreadPoolExecutor(max_workers=1) as pool:
        engine = DrivenEngine(core, pool)
        async with asyncio.timeout(LIMIT_S), aclosing(engine.submit(skewed())) as stream:
            samples = {}
            async for sample in stream:
                samples[sample.request_id] = sample
                await engine.pause_generation()
                await engine.update_weights(len(samples), state.items())
                await engine.resume_generation()
            while core.has_work:
                await asyncio.sleep(0)
            later = await collect(engine.submit(skewed(first=50)))
            while core.has_work:
                await asyncio.sleep(0)
    assert not core.adaptive_tp.in_stage
    assert Counter(changes(core)) == {(1, 2): 2, (2, 1): 2}
    alone = run_core(make_core(model), skewed())
    assert same_tokens(samples, alone)
    assert [len(sample.response_ids) for _, sample in sorted(later.items())] == [
        len(sample.response_ids) for _, sample in sorted(alone.items())
    ]
    assert max(samples[0].weight_versions) >= 7


async def test_closing_an_asynchronous_engine_in_the_middle_leaves_no_process(model: Path, profile: Path) -> None:
    core = EngineCore(config_of(profile), model, device=CPU)
    with ThreadPoolExecutor(max_workers=1) as pool:
        engine = DrivenEngine(core, pool)
        async with asyncio.timeout(LIMIT_S):
            stream = engine.submit(skewed())
            while core.arrangement.config.tp == 1 and len(stream.pending) > 1:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            started = pids(core)
            await engine.close()
    assert started
    assert not any(map(is_alive, started))


@pytest.mark.parametrize(
    "fault", ["missing", "torn", "another model", "another dtype", "other ranks", "another degree"]
)
def test_without_a_profile_of_this_engine_tp_stays_and_one_warning_says_why(
    model: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrangement, "make_replicas", lambda *_, **__: [])
    monkeypatch.setattr(EngineCore, "_load_initial_weights", lambda *_: None)
    path = tmp_path / "profile.json"
    good = profile_of(model, config_of(path))
    key = good.key
    profiles = {
        "another model": msgspec.structs.replace(good, key=msgspec.structs.replace(key, architecture={"layers": 9})),
        "another dtype": msgspec.structs.replace(good, key=msgspec.structs.replace(key, dtype="bfloat16")),
        "other ranks": made_profile(step_s, ranks=4, degrees=(1, 2, 4)),
        "another degree": msgspec.structs.replace(made_profile(step_s, degrees=(2,)), key=key),
    }
    says = {
        "missing": "does not exist",
        "torn": "is not valid",
        "another model": r"layers is 2 \(profiled: 9\)",
        "another dtype": r"dtype is 'float32' \(profiled: 'bfloat16'\)",
        "other ranks": r"ranks is 2 \(profiled: 4\)",
        "another degree": "has TP 2, not 1, which the engine starts with",
    }
    if fault in profiles:
        profiles[fault].write(path)
    elif fault == "torn":
        path.write_text('{"format": 1')
    with pytest.warns(TailraceWarning, match=says[fault]) as warned:
        core = EngineCore(config_of(path), model, device=CPU)
    assert [str(warning.message).endswith("`tailrace profile tp` makes a profile") for warning in warned] == [True]
    assert core.adaptive_tp is None


def test_a_degree_that_the_profile_lacks_is_never_chosen_and_a_warning_says_so(model: Path, tmp_path: Path) -> None:
    config = with_degrees(config_of(tmp_path / "profile.json"), (1, 2))
    key = profile_of(model, config).key
    msgspec.structs.replace(made_profile(step_s, degrees=(1,)), key=key).write(tmp_path / "profile.json")
    with pytest.warns(TailraceWarning, match="lacks TP 2, so that degree is never chosen; profile it, too$"):
        core = EngineCore(config, model, device=CPU)
    with closing(core):
        assert core.adaptive_tp is not None
        assert core.adaptive_tp.degrees == (1,)
        run_core(core, skewed())
        verdicts = core.adaptive_tp.take()
    decisions = [verdict.decision for verdict in verdicts if verdict.decision is not None]
    assert len(decisions) > 3
    assert all([candidate.tp for candidate in decision.candidates] == [1] for decision in decisions)
    assert {verdict.target_tp for verdict in verdicts} == {1}


def test_a_request_has_to_fit_the_cache_under_every_degree_that_can_be_chosen(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At TP 2 each rank has half of the heads, so the cache has twice as many blocks as at TP 1."""
    monkeypatch.setattr(arrangement, "make_replicas", lambda *_, **__: [object()])
    monkeypatch.setattr(EngineCore, "_load_initial_weights", lambda *_: None)
    sizes = {"dp": 1, "tp": 2, "kv_cache_gib": 10 * 4 * TINY_GIB["llama"]}
    config = config_of(tmp_path / "profile.json").model_copy(update=sizes)
    with pytest.warns(TailraceWarning, match="does not exist"):
        fixed = EngineCore(config, model, device=CPU)
    profile_of(model, config).write(tmp_path / "profile.json")
    adaptive = EngineCore(config, model, device=CPU)
    kept = EngineCore(with_degrees(config, (2,)), model, device=CPU)
    fits = make_request(0, prompt=9, max_new_tokens=10 * 4 - 8)
    longer = make_request(0, prompt=9, max_new_tokens=10 * 4 - 7)
    for core in (fixed, adaptive, kept):
        core.check(fits)
    for core in (fixed, kept):
        core.check(longer)
    said = "needs up to 11 blocks of 4 tokens, and the cache has 10 under one of TP 1, 2; raise kv_cache"
    with pytest.raises(RequestError, match=said):
        adaptive.check(longer)


def test_an_engine_that_cannot_open_its_profile_leaves_no_process(
    model: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def interrupted(made: arrangement.Arrangement, *_: object, **__: object) -> None:
        started.extend(pid for lane in made.lanes for pid in lane.replica.pids)
        raise KeyboardInterrupt

    monkeypatch.setattr("tailrace.engine.core.open_adaptive_tp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EngineCore(config_of(profile), model, device=CPU)
    assert len(started) == 2
    assert not any(map(is_alive, started))

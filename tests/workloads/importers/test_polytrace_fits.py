"""Samples are drawn from PolyTrace's published distributions, and a damaged file is named."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tailrace.errors import TraceError
from tailrace.workloads.importers.factory import import_trace
from tailrace.workloads.parts import turns_of
from tailrace.workloads.trace import Provenance, Trace

HERE = Provenance(source="here")
MIXTURE = {
    "weights": [0.4, 0.6],
    "means": [[100.0, 3000.0], [200.0, 9000.0]],
    "covariances": [[[100.0, 500.0], [500.0, 40000.0]], [[400.0, 0.0], [0.0, 1e6]]],
}
ONE = {"feature_names": ["input_1", "output_1", "std_input"], "mean_vector": [300.0, 1300.0, 0.0]}
TWO = {
    "feature_names": ["input_1", "input_2", "output_1", "output_2"],
    "mean_vector": [250.0, 470.0, 110.0, 1000.0],
    "covariance_matrix": np.outer([30.0, 50.0, 90.0, 800.0], [30.0, 50.0, 90.0, 800.0])
    * np.array([[1, 0, 0.2, 0], [0, 1, 0, 0], [0.2, 0, 1, 0.4], [0, 0, 0.4, 1]]),
}
FILE: dict[str, Any] = {
    "math_task": {"gmm_parameters": MIXTURE},
    "tool_calling_task": {
        "call_count_distribution": {"2": 300, "1": 100},
        "sequence_models": {
            "1": ONE | {"covariance_matrix": [[900.0, 0.0, 0.0], [0.0, 2e6, 0.0], [0.0, 0.0, 0.0]]},
            "2": TWO | {"covariance_matrix": TWO["covariance_matrix"].tolist()},
        },
    },
}


def imported(folder: Path, task: str, content: Any = FILE, *, max_new_tokens: int | None = None) -> Trace:
    path = folder / "parameters.json"
    path.write_text(json.dumps(content, indent=2))
    return import_trace([path], Provenance(source="here", max_new_tokens=max_new_tokens), format=f"polytrace-{task}")


def test_mathematics_has_the_moments_of_its_components(tmp_path: Path) -> None:
    trace = imported(tmp_path, "math")
    assert (len(trace), trace.groups, trace.steps) == (50_000, 50_000, [0])
    short = trace.samples.filter(pl.col("response_tokens") < 5000)
    assert len(short) / len(trace) == pytest.approx(0.4, abs=0.01)
    assert short.select(pl.mean("prompt_tokens", "response_tokens")).row(0) == pytest.approx((100, 3000), rel=0.01)
    assert short.select(pl.corr("prompt_tokens", "response_tokens")).item() == pytest.approx(0.25, abs=0.02)


def test_responses_of_mathematics_end_at_the_limit(tmp_path: Path) -> None:
    trace = imported(tmp_path, "math", max_new_tokens=9000)
    assert (trace.samples["response_tokens"] == 9000).mean() == pytest.approx(0.3, abs=0.01)


def test_sessions_have_the_moments_of_each_turn(tmp_path: Path) -> None:
    trace = imported(tmp_path, "tools")
    turns = turns_of(trace)
    assert trace.samples["turns"].list.len().value_counts(normalize=True).sort("turns")["proportion"].to_list() == (
        pytest.approx([0.25, 0.75], abs=0.001)
    )
    two = turns.filter(pl.col("count") == 2)
    pairs = two.pivot("turn", index="row", values="generated_tokens")
    found = [two.filter(turn=0)["prompt_tokens"], two["added"].drop_nulls(), pairs["0"], pairs["1"]]
    assert [each.mean() for each in found] == pytest.approx(TWO["mean_vector"], rel=0.02)
    assert [each.std() for each in found] == pytest.approx([30, 50, 90, 800], rel=0.06)
    assert pairs.select(pl.corr("0", "1")).item() == pytest.approx(0.4, abs=0.03)
    calls = trace.samples["tool_calls"].drop_nulls().explode().struct.unnest()
    assert (len(calls), calls["returned_tokens"].to_list()) == (len(pairs), two["added"].drop_nulls().to_list())
    assert trace.samples.filter(pl.col("turns").list.len() == 1)["tool_calls"].null_count() == 12_500


def test_the_same_samples_are_drawn_each_time_and_everywhere(tmp_path: Path) -> None:
    for task, some in (("math", [2974, 3023, 9884, 7798]), ("tools", [783, 965, 484, 349])):
        found = imported(tmp_path, task).samples
        assert found.equals(imported(tmp_path, task).samples)
        assert found["response_tokens"][[0, 1, -2, -1]].to_list() == some


@pytest.mark.parametrize(
    ("task", "place", "value", "message"),
    [
        ("math", "math_task", 3, r"parameters\.json: Expected `object`, got `int` - at `\$\.math_task`"),
        (
            "math",
            "math_task.gmm_parameters.weights",
            [0.4],
            "gmm_parameters: weights, means and covariances are not as many",
        ),
        ("math", "math_task.gmm_parameters.weights", [0.4, -1.0], r"Expected `float` > 0.0 .*weights"),
        ("math", "math_task.gmm_parameters.means", [[1.0], [2.0]], "component 1: expected a mean of 2 numbers"),
        (
            "math",
            "math_task.gmm_parameters.means",
            [[-900.0, 9.0], [1.0, 2.0]],
            "component 1: most lengths are below 1",
        ),
        ("math", "math_task.gmm_parameters.covariances", [[[1.0, 9.0], [9.0, 1.0]]] * 2, "component 1: .*covariance"),
        ("tools", "tool_calling_task.sequence_models", {}, r"sequence_models\.1 is missing, and .* has 100 of them"),
        ("tools", "tool_calling_task.sequence_models.2.mean_vector", [1.0], r"models\.2: expected a mean of 4 numbers"),
        (
            "tools",
            "tool_calling_task.sequence_models.2.feature_names",
            ["input_1"] * 4,
            r"\.2: feature_names has no input_2",
        ),
        ("tools", "tool_calling_task.sequence_models.2.mean_vector", [0.0] * 4, r"\.2: a mean or a variance of tokens"),
        ("tools", "tool_calling_task.call_count_distribution", {"many": 3}, "call_count_distribution"),
        ("tools", "tool_calling_task.call_count_distribution", {}, "call_count_distribution, has no sessions"),
    ],
)
def test_a_damaged_file_is_named_with_its_field(
    task: str, place: str, value: Any, message: str, tmp_path: Path
) -> None:
    content = copy.deepcopy(FILE)
    *path, last = place.split(".")
    part = content
    for name in path:
        part = part[name]
    part[last] = value
    with pytest.raises(TraceError, match=message) as caught:
        imported(tmp_path, task, content)
    assert "\n" not in str(caught.value)


def test_one_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(FILE))
    with pytest.raises(TraceError, match="is a second file; polytrace-math reads one"):
        import_trace([path, path], HERE, format="polytrace-math")


DATA = Path(os.environ.get("TAILRACE_DATA", "/nonexistent"))


@pytest.mark.skipif(not DATA.is_dir(), reason="TAILRACE_DATA does not name the folder of public traces")
def test_mathematics_comes_near_the_figures_that_the_paper_prints() -> None:
    file = DATA / "polytrace" / "task_distribution_parameters.json"
    lengths = import_trace([file], HERE, format="polytrace-math").samples["response_tokens"]
    assert [lengths.mean(), lengths.median(), lengths.quantile(0.9)] == pytest.approx([9839, 8388, 18543], rel=0.04)

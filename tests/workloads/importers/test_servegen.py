"""Requests are drawn from ServeGen's rates and distributions, and a file that is not of it is named."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tailrace.errors import TraceError
from tailrace.workloads.importers.factory import import_trace
from tailrace.workloads.trace import Provenance, Trace

HERE = Provenance(source="here")
TRACE = "0,0,0,,0,0\n600,0.5,1.2,Gamma,0.8,2.5\n1200,1.0,1.0,Weibull,1.0,1.0\n21600,0.01,0,,0,0\n"
IDLE = {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"}
DATASET: dict[str, Any] = {
    "0": IDLE | {"input_tokens": "{9: 0.25, 10: 0.75}", "output_tokens": "{400: 1.0}"},
    "21600": IDLE | {"input_tokens": "{7: 1.0}", "output_tokens": "{8: 0.5, 9: 0.5}"},
}


def client(folder: Path, trace: str = TRACE, dataset: Any = DATASET, name: str = "chunk-1") -> list[Path]:
    files = [folder / f"{name}-trace.csv", folder / f"{name}-dataset.json"]
    files[0].write_text(trace)
    files[1].write_text(dataset if isinstance(dataset, str) else json.dumps(dataset, indent=2))
    return files


def test_requests_come_at_the_rate_and_with_the_lengths_of_their_window(tmp_path: Path) -> None:
    trace = import_trace(client(tmp_path), HERE)
    windows = trace.samples.with_columns(
        window=(pl.col("start") + 600) // 600 * 600
    )  # start is since the first request
    assert len(trace) == 300 + 600 + 6
    assert trace.provenance.is_service
    early, late = windows.filter(pl.col("response_tokens") == 400), windows.filter(pl.col("response_tokens") < 400)
    assert (len(early), len(late)) == (900, 6)
    assert early["prompt_tokens"].value_counts(normalize=True).sort("prompt_tokens")["proportion"].to_list() == (
        pytest.approx([0.25, 0.75], abs=0.05)
    )
    assert late["prompt_tokens"].unique().to_list() == [7]
    assert (trace.samples["start"].min(), trace.samples["start"].is_sorted()) == (0.0, True)
    assert early["start"].max() < 1200 <= 20_000 < late["start"].min()  # type: ignore[operator]


@pytest.mark.parametrize(("rate", "requests"), [(0.0008, 69), (0.0009, 78)])
def test_a_rate_of_half_a_request_a_line_gives_one_in_two_lines(tmp_path: Path, rate: float, requests: int) -> None:
    trace = "".join(f"{600 * line},{rate},0,,0,0\n" for line in range(144))
    dataset = {"0": IDLE | {"input_tokens": "{7: 1.0}", "output_tokens": "{8: 1.0}"}}
    assert len(import_trace(client(tmp_path, trace, dataset), HERE)) == requests


def test_the_same_requests_are_drawn_each_time_and_clients_are_one_service(tmp_path: Path) -> None:
    files = client(tmp_path)
    assert import_trace(files, HERE).samples.equals(import_trace(files, HERE).samples)
    both = import_trace([*files, *client(tmp_path, name="chunk-2")], HERE)
    assert len(both) == 2 * 906
    (tmp_path / "other").mkdir()
    assert len(import_trace([*files, *client(tmp_path / "other")], HERE)) == 2 * 906


def test_the_file_that_tells_the_format_need_not_be_the_first(tmp_path: Path) -> None:
    trace, dataset = client(tmp_path)
    assert import_trace([dataset, trace], HERE).samples.equals(import_trace([trace, dataset], HERE).samples)


def test_files_may_be_packed(tmp_path: Path) -> None:
    plain = client(tmp_path)
    packed = [file.with_name(f"{file.name}.gz") for file in plain]
    for file, other in zip(plain, packed, strict=True):
        other.write_bytes(gzip.compress(file.read_bytes()))
    expected = import_trace(plain, HERE).samples
    assert import_trace(packed, HERE).samples.equals(expected)
    assert import_trace([plain[0], packed[1]], HERE).samples.equals(expected)


def test_gaps_have_the_variation_of_their_family(tmp_path: Path) -> None:
    def variation(family: str, shape: float) -> float:
        trace = import_trace(client(tmp_path, f"0,20,1,{family},{shape},1\n"), HERE)
        gaps = np.diff(trace.samples["start"].to_numpy())
        return float(gaps.std() / gaps.mean())

    assert variation("Gamma", 0.25) == pytest.approx(2.0, rel=0.1)
    assert variation("Weibull", 2.0) == pytest.approx(0.5227, rel=0.1)
    assert variation("", 0.0) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    ("trace", "dataset", "message"),
    [
        ("0,1,1,Gamma,1\n", DATASET, r"trace\.csv, record 1, has 5 fields; expected start, rate"),
        ("0,x,1,Gamma,1,1\n", DATASET, r"trace\.csv, record 1: .*\$\.rate"),
        ("0,1,1,Gauss,1,1\n", DATASET, r"record 1: the family is 'Gauss'; expected Gamma or Weibull"),
        ("0,0,0,,0,0\n", DATASET, "has no requests; give a client that is not idle all day"),
        ("0,1,1,,0,0\n", {"0": IDLE}, r"record 1: the rate is 1 at 0 s, where .*dataset\.json has no lengths"),
        ("0,1,1,,0,0\n", {"600": DATASET["0"]}, "where .* has no lengths"),
        (TRACE, "[]", r"dataset\.json: "),
        (TRACE, {"noon": IDLE}, r"dataset\.json: "),
        (TRACE, {"0": IDLE | {"input_tokens": "{9: x}"}}, r"window 0, input_tokens: "),
        (TRACE, {"0": IDLE | {"output_tokens": "{0: 1.0}"}}, r"window 0, output_tokens: "),
        (TRACE, {"0": IDLE | {"output_tokens": "{9: 0.4}"}}, "the shares add up to 0.4; expected 1"),
        (TRACE, {"0": IDLE | {"output_tokens": "__import__('os')"}}, "is no text such as"),
    ],
)
def test_what_is_not_of_servegen_is_named(trace: str, dataset: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        import_trace(client(tmp_path, trace, dataset), HERE, format="servegen")
    assert "\n" not in str(caught.value)


def test_a_client_needs_both_of_its_files(tmp_path: Path) -> None:
    files = client(tmp_path)
    with pytest.raises(TraceError, match=r"needs chunk-1-dataset\.json beside it; give both files of a client"):
        import_trace(files[:1], HERE)
    other = tmp_path / "other.csv"
    other.write_text(TRACE)
    with pytest.raises(TraceError, match=r"other\.csv is named neither NAME-trace\.csv nor NAME-dataset\.json"):
        import_trace([other], HERE)


DATA = Path(os.environ.get("TAILRACE_DATA", "/nonexistent"))


@pytest.mark.skipif(not DATA.is_dir(), reason="TAILRACE_DATA does not name the folder of public traces")
@pytest.mark.parametrize(("number", "requests", "means"), [(66, 41_230, (75, 8430)), (13, 68_084, (130, 1000))])
def test_clients_have_the_figures_of_their_readme(number: int, requests: int, means: tuple[int, int]) -> None:
    trace: Trace = import_trace(
        sorted((DATA / "lengths/servegen_deepseek_r1").glob(f"chunk-{number}-*")), HERE, format="servegen"
    )
    assert len(trace) == requests
    assert trace.samples["prompt_tokens"].mean() == pytest.approx(means[0], rel=0.05)
    assert trace.samples["response_tokens"].mean() == pytest.approx(means[1], rel=0.05)

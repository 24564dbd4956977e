"""Parameters are read as they were written, and what is none of them is named."""

from pathlib import Path

import msgspec
import pytest

from tailrace.errors import TraceError
from tailrace.workloads.parameter_files import read_parameters, write_parameters
from tailrace.workloads.parameters import Parameters, Regime
from tailrace.workloads.trace import Provenance
from tests.workloads.samplers.test_fitted import LENGTHS, TALK, parameters, single

WHOLE = parameters(
    single(prompt_share=0.1, rank_correlation=0.2, capped_share=0.01),
    provenance=Provenance(source="a: source", max_new_tokens=900),
    drift=Regime(step=3, change=1.5),
    kept_share=0.25,
    reward_s=LENGTHS,
    about="010: it's",
)


@pytest.mark.parametrize("known", [WHOLE, parameters(TALK)], ids=["single", "turns"])
def test_parameters_are_read_as_they_were_written(known: Parameters, tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    write_parameters(known, path)
    assert read_parameters(path) == known
    json = tmp_path / "w.json"
    json.write_bytes(msgspec.json.encode(known))
    assert read_parameters(json) == known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tailrace_workload: 2", r"has tailrace_workload 2; expected 1, as `tailrace trace fit` writes it"),
        ("- 3", "has tailrace_workload None; expected 1"),
        ("a: [", "is not YAML: .*"),
        ("tailrace_workload: 1", "has no valid parameters: .*missing required field `name`"),
    ],
)
def test_what_is_no_workload_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_parameters(path)


def test_a_wrong_field_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    write_parameters(WHOLE, path)
    path.write_text(path.read_text().replace("log_deviation: 0.6", "log_deviation: -0.6", 1))
    with pytest.raises(TraceError, match=r"w.yaml has no valid parameters: .* at `\$\.response\.tokens\.distribution"):
        read_parameters(path)


def test_lengths_beyond_what_can_be_computed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    write_parameters(WHOLE, path)
    path.write_text(path.read_text().replace("log_deviation: 0.6", "log_deviation: 51", 1))
    with pytest.raises(TraceError, match=r"w.yaml has no valid parameters: Expected `float` <= 50\.0 - at .*distrib"):
        read_parameters(path)


def test_a_share_at_the_limit_needs_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    write_parameters(WHOLE, path)
    path.write_text(path.read_text().replace(", max_new_tokens: 900", ""))
    with pytest.raises(TraceError, match=r"`response\.capped_share` needs `provenance\.max_new_tokens`"):
        read_parameters(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.yaml does not exist"):
        read_parameters(tmp_path / "none.yaml")
    with pytest.raises(TraceError, match="cannot be written: No such file"):
        write_parameters(WHOLE, tmp_path / "no" / "w.yaml")

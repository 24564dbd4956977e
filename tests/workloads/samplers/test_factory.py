"""A workload is opened by a name or a file, and those that ship give the figures that they state."""

from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import TraceError
from tailrace.workloads.files import write_trace
from tailrace.workloads.parameter_files import write_parameters
from tailrace.workloads.samplers.factory import library, open_workload
from tailrace.workloads.samplers.fitted import Fitted
from tailrace.workloads.samplers.recorded import Recorded
from tests.workloads.samplers.test_fitted import draw, parameters, single

LIBRARY = Path(__file__).parents[3] / "tailrace" / "workloads" / "library"


@pytest.mark.parametrize("name", sorted(path.stem for path in LIBRARY.glob("*.yaml")))
def test_a_workload_that_ships_has_the_figures_that_it_states(name: str) -> None:
    stated = library()[name]
    drawn = open_workload(name).sample(steps=1, groups=3000, group_size=8, seed=0)
    assert stated.name == drawn.provenance.source == name
    assert drawn.provenance.max_new_tokens == stated.provenance.max_new_tokens
    for column, figures in (("prompt_tokens", stated.prompt_figures), ("response_tokens", stated.response_figures)):
        tokens = drawn.samples[column].to_numpy()
        assert tokens.mean() == pytest.approx(figures.mean, rel=0.06)
        for share, value in ((0.5, figures.p50), (0.9, figures.p90), (0.99, figures.p99)):
            assert value is None or np.quantile(tokens, share) == pytest.approx(value, rel=0.1)


def test_the_library_says_what_each_workload_rests_on() -> None:
    for name, workload in library().items():
        assert len(workload.about) < 100, name
        assert workload.rests_on.endswith("."), name
        assert workload.provenance.source.startswith("PolyTrace"), name
        assert workload.task, name


def test_a_file_is_opened_by_its_ending(tmp_path: Path) -> None:
    write_parameters(parameters(single()), tmp_path / "w.yaml")
    write_trace(draw(parameters(single()), groups=2), tmp_path / "t.parquet")
    assert isinstance(open_workload(str(tmp_path / "w.yaml")), Fitted)
    assert isinstance(open_workload(str(tmp_path / "t.parquet")), Recorded)
    with pytest.raises(TraceError, match=r"no\.json does not exist"):
        open_workload(str(tmp_path / "no.json"))


def test_a_wrong_name_is_answered_with_those_that_ship() -> None:
    with pytest.raises(TraceError, match=r"workload 'math-32' is none of code-14b, .*did you mean 'math-32b'\?"):
        open_workload("math-32")

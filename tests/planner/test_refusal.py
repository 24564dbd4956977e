"""Claims on what is said about what cannot be planned."""

import re
from pathlib import Path

import pytest

from tailrace.errors import PlanError
from tailrace.planner import plan
from tailrace.planner.candidates import Candidates
from tailrace.planner.modes import USUAL
from tailrace.planning.hardware.clusters import open_cluster
from tests.planner.problems import problem_of

APART = """
pools:
  near: {device: H20, nodes: 1, datacentre: here}
  far: {device: H800, nodes: 1, datacentre: there}
"""


def test_a_model_that_fits_on_no_split_is_refused_with_what_it_lacks_and_what_would_do() -> None:
    with pytest.raises(PlanError) as caught:
        plan(problem_of("8xH100", model="Qwen2.5-72B"))
    text = str(caught.value)
    assert re.match(r"the trainer of Qwen2\.5-72B lacks [\d.]+ GiB on each of 8 H100", text)
    smallest = re.search(r"the smallest cluster of H100 that would do is (\d+)xH100$", text)
    assert smallest is not None
    devices = int(smallest[1])
    assert any(Candidates(problem_of(f"{devices}xH100", model="Qwen2.5-72B")).fits(mode) for mode in USUAL)
    assert not any(Candidates(problem_of(f"{devices - 8}xH100", model="Qwen2.5-72B")).fits(mode) for mode in USUAL)
    assert "\n" not in text


def test_a_cluster_of_a_part_of_a_node_is_told_how_many_devices_would_do() -> None:
    with pytest.raises(PlanError) as caught:
        plan(problem_of("1xRTX-4090", model="Qwen2.5-7B"))
    smallest = re.search(r"the smallest cluster of RTX-4090 that would do is (\d+)xRTX-4090$", str(caught.value))
    assert smallest is not None
    assert any(Candidates(problem_of(f"{smallest[1]}xRTX-4090", model="Qwen2.5-7B")).fits(mode) for mode in USUAL)


def test_an_engine_that_no_node_holds_is_refused() -> None:
    with pytest.raises(PlanError, match=r"an engine of DeepSeek-V3 .* lacks .*; no number of A40 would do"):
        plan(problem_of("16xA40", model="DeepSeek-V3"))


def test_two_parts_that_fit_one_at_a_time_are_refused_together() -> None:
    separated = ("pipeline.placement=separated", "queue.type=service")
    with pytest.raises(PlanError, match="the smallest cluster of H100 that would do is"):
        plan(problem_of("1xH100", *separated))


@pytest.mark.parametrize(
    ("given", "model", "said"),
    [
        (
            ("sampling.max_new_tokens=100",),
            "Qwen2.5-7B",
            r"of \d+ tokens, and sampling.max_new_tokens is 100",
        ),
        ((), "Qwen2.5-Math-7B", r"a sample of \d+ tokens, and the context of Qwen2.5-Math-7B is 4096"),
    ],
)
def test_a_workload_that_is_too_long_is_refused(given: tuple[str, ...], model: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        problem_of("8xH100", "trainer.train_batch_size=512", *given, model=model)


def test_a_cluster_whose_datacentres_have_no_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "apart.yaml"
    path.write_text(APART)
    with pytest.raises(PlanError, match=r"no link between the datacentres 'here' .* and 'there'"):
        plan(problem_of(open_cluster(str(path))))

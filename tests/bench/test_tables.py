"""The tables of a benchmark."""

import pytest

from tailrace.bench.figures import Figures, StepFigures, WorkerFigures
from tailrace.bench.single import Result
from tailrace.bench.tables import print_result


def result_of(worker: WorkerFigures) -> Result:
    stages = {"generation": 3.0, "reward": 0.0, "reference": 0.0, "advantage": 0.0, "update": 1.0, "weights": 0.0}
    step = StepFigures(step=1, seconds=4.0, stages=stages, samples=8, response_tokens=90, tail_share=0.5)
    figures = Figures(
        steps=[step],
        seconds=4.0,
        step_s=4.0,
        stages=stages,
        samples_per_s=2.0,
        tokens_per_s=22.5,
        tokens_per_s_device=22.5,
        training_tokens_per_s=90.0,
        tail_share=0.5,
        workers=[worker],
    )
    return Result(
        workload="search-7b",
        system="tailrace",
        samples=8,
        prompt_tokens=80,
        response_tokens=90,
        longest_response=30,
        limit=30,
        cut=0,
        warm_up=1,
        figures=figures,
    )


def test_waiting_for_tools_is_shown_beside_the_work_and_what_takes_no_percent_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker = WorkerFigures(
        worker="rollout-0",
        shares={"busy": 0.5, "weights": 0.0, "data": 0.48, "idle": 0.02},
        phases={"generation": 0.495, "other": 0.005, "tools": 0.4, "data": 0.08, "idle": 0.02},
        parts={"generation": {"decode": 0.3}},
        peak_memory_gib=None,
    )
    print_result(result_of(worker))
    _, _, phases = capsys.readouterr().out.partition("phase")
    rows = [line.split() for line in phases.splitlines()[1:] if line.strip()]
    assert [" ".join(row) for row in rows] == [
        "rollout-0 generation 49.5 %",
        "decode 30.0 %",
        "rollout-0 waiting for tools 40.0 %",
    ]

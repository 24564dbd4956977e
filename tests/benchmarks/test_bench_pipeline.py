"""The figures that `make bench-pipeline` computes from its turns, and the order of these turns."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_pipeline
import msgspec
import pytest
from bench_pipeline import ALL, DELAYED, MODES, Look, Workload, beside_trl, figures_of, prompt_length
from pipeline_figures import Turn

from tailrace.events import Event

CORES = {"rollout": 0, "trainer": 1}


def turn(directory: Path, step_s: float, cpu: dict[str, float]) -> Turn:
    """A turn of two steps, of which the first is the warm-up. The trainer is busy half of the time."""
    directory.mkdir(parents=True)
    events = [
        Event(task="step", actor="driver", start=i * step_s, end=(i + 1) * step_s, step=i, samples=8) for i in range(2)
    ]
    for worker, busy in (("rollout-0", step_s), ("trainer", step_s / 2)):
        metrics = {"busy": busy, "idle": step_s - busy}
        events.append(
            Event(task="activity", actor="worker", worker=worker, start=step_s, end=2 * step_s, metrics=metrics)
        )
    (directory / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    (directory / "cpu.json").write_text(json.dumps(cpu))
    return Turn(directory, 1)


def test_figures_are_medians_of_all_rounds_and_name_the_modes_that_they_are_of(tmp_path: Path) -> None:
    turns = {
        mode: [
            turn(tmp_path / mode / str(number), step_s * (2 if mode == "sequential" else 1), cpu)
            for number, (step_s, cpu) in enumerate(
                ((2.0, {"driver": 1.0, "ray": 3.0}), (1.0, {"driver": 2.0}), (4.0, {"driver": 9.0, "ray": 1.0}))
            )
        ]
        for mode in ALL
    }
    figures = figures_of(turns)
    assert figures["normalized_throughput"] == {mode: 1.0 if mode == "sequential" else 2.0 for mode in MODES}
    assert figures["samples_per_s"][DELAYED] == 4.0
    assert figures["idle_fraction"] == {"rollout": 0.0, "trainer": 0.5}
    assert figures["measured_in"] == {"idle_fraction": "fully_async", "weight_sync_exposed_fraction": DELAYED}
    assert figures["cpu_s"] == {mode: {"driver": 2.0, "ray": 1.0} for mode in ALL}


def test_what_a_machine_may_lack_is_found_before_the_first_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def no_right() -> dict[str, Any]:
        raise RuntimeError("not root")

    monkeypatch.setattr(bench_pipeline, "BUILD", tmp_path)
    monkeypatch.setattr(bench_pipeline, "two_cores", lambda: CORES)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(bench_pipeline, "peer_python", lambda *_: done.append("peer"))
    monkeypatch.setattr(bench_pipeline, "weight_transfer", no_right)
    monkeypatch.setattr(bench_pipeline, "choose_slots", lambda *_: done.append("balance"))
    with pytest.raises(RuntimeError, match="not root"):
        bench_pipeline.main()
    assert done == ["peer"]


def test_each_turn_beside_trl_is_compared_with_the_steps_of_trl_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"grpo-colocated": iter((8.0, 2.0, 30.0)), "grpo-fully_async": iter((4.0, 3.0, 16.0))}
    seconds = iter((99.0, *[8.0] * 4, *[32.0] * 4, *[4.0] * 4))  # 4, 1 and 8 samples/s after the warm-up
    order: list[str] = []

    def take_turn(name: str, *_: Any, **__: Any) -> SimpleNamespace:
        order.append(name)
        return SimpleNamespace(samples_per_s=next(rates[name]))

    def step() -> dict[str, float]:
        order.append("trl")
        return {"seconds": next(seconds)}

    monkeypatch.setattr(bench_pipeline, "take_turn", take_turn)
    monkeypatch.setattr(
        bench_pipeline, "start_trl", lambda *_: SimpleNamespace(step=step, stop=lambda: order.append("stop"))
    )
    monkeypatch.setattr(bench_pipeline, "resolve_model", lambda _: Path("model"))
    assert beside_trl(CORES, 3) == {
        "tailrace_vs_trl_samples_per_s": 2.0,
        "beside_trl": {
            "best": "colocated",
            "ratio": {"colocated": 2.0, "fully_async": 2.0},
            "samples_per_s": {"trl": 4.0, "colocated": 8.0, "fully_async": 4.0},
        },
    }
    assert order == ["trl", *["grpo-colocated", "trl", "trl", "grpo-fully_async", "trl", "trl"] * 3, "stop"]


@pytest.mark.parametrize(
    ("dtype", "cases", "expected"),
    [
        (
            "bfloat16",
            {"bfloat16": 0.5, "float32": 0.6},
            {"same_host_over_memcpy": 0.5, "same_host_from_float32_over_casting_copy": 0.6},
        ),
        ("float32", {"float32": 0.7}, {"same_host_over_memcpy": 0.7}),
    ],
)
def test_a_publication_is_set_beside_a_copy_in_the_dtype_in_which_weights_travel(
    monkeypatch: pytest.MonkeyPatch, dtype: str, cases: dict[str, float], expected: dict[str, float]
) -> None:
    def output_of(command: list[str], *, timeout_s: float) -> str:
        assert command[2:] == ["slow_link", f"same_host_{dtype}"]
        host = {model: {"rate_of_copy": rate} for model, rate in cases.items()}
        return json.dumps({"slow_link": {"time_ratio": 0.25, "bytes_ratio": 1.0}, f"same_host_{dtype}": host}) + "\n"

    monkeypatch.setattr(bench_pipeline, "DTYPE", dtype)
    monkeypatch.setattr(bench_pipeline, "output_of", output_of)
    others = {"wire_dtype": dtype, "tree_over_one_by_one": 0.25, "link_bytes_over_model": 1.0}
    assert bench_pipeline.weight_transfer() == expected | others


@pytest.mark.parametrize("token_s", [0.002, 0.02, 0.06])
def test_prompts_get_the_length_that_balances_whatever_a_token_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_s: float
) -> None:
    def look(load: Workload, cores: dict[str, int], slots: int, tokens: int) -> Look:
        return Look(tokens, 14.0 + 0.1 * token_s * tokens, 7.0 + token_s * tokens)

    monkeypatch.setattr(bench_pipeline, "look", look)
    load = Workload({}, [], tmp_path, "")
    chosen = look(load, CORES, 2, prompt_length(load, CORES, 2, look(load, CORES, 2, 8)))
    at_most = bench_pipeline.MOST_PROMPT_TOKENS
    assert chosen.is_balanced or (chosen.tokens == at_most and chosen.excess_s > 0)

"""A contestant of `make bench-adaptive-tp`: MODEL_DIR ENGINE, the engine's configuration as JSON. Steps are made by
hand.

{"task": "stage", "prompts": [[…]], "lengths": […], "group_size": 8}   generate responses of these lengths
{"task": "switch", …, "steps": n, "target": tp}                        after n steps of that, change TP and back
{"task": "restart", …, "steps": n, "target": tp}                       the same by tearing the engine down
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import gate
import numpy as np
import torch

from tailrace.config.engine import NativeEngineConfig, SamplingConfig
from tailrace.engine.core import EngineCore
from tailrace.planning.latency import CorrectedPredictor, DecodedStep, LatencyPredictor
from tailrace.planning.tp_profile import TPProfile
from tailrace.types import Request

CPU = torch.device("cpu")
WINDOW = 16
"""Number of steps whose median is compared with a prediction."""


def requests(prompts: list[list[int]], lengths: list[int], group_size: int) -> list[Request]:
    """Make a batch of requests; `lengths` are those of its responses."""
    return [
        Request(
            request_id=index,
            group_id=index // group_size,
            prompt_ids=np.array(prompts[index // group_size], np.int64),
            sampling=SamplingConfig(max_new_tokens=length, ignore_eos=True),
            seed=index,
        )
        for index, length in enumerate(lengths)
    ]


class Trajectory:
    """Decode steps as the engine measured them, beside their predictions."""

    def __init__(self, profile: TPProfile | None) -> None:
        self._predictor = None if profile is None else CorrectedPredictor(LatencyPredictor(profile))
        self._steps: list[tuple[float, float, float]] = []
        self.drain: list[tuple[float, int, int]] = []
        """Points of the drain: seconds since the start, sequences unfinished, TP."""

    def see(self, core: EngineCore, beside: int, began: float) -> None:
        """Record a step of the core; before it, `beside` replicas had work."""
        unfinished = sum(len(lane.scheduler.sequences) for lane in core.lanes)
        self.drain.append((time.perf_counter() - began, unfinished, core.arrangement.config.tp))
        for lane in core.lanes:
            if self._predictor is None or (step := lane.decoded) is None:
                continue
            what = core.arrangement.config.tp, step.sequences, step.context_tokens, beside
            self._steps.append((step.seconds, self._predictor.base.step_s(*what), self._predictor.step_s(*what)))
            self._predictor.observe(DecodedStep(*what, step.seconds))
            lane.decoded = None

    def errors(self) -> list[list[float]]:
        """Return the relative errors of each window: of the profile's prediction, and of the one corrected on the
        way."""
        whole = len(self._steps) // WINDOW * WINDOW
        windows = np.array(self._steps[:whole]).reshape(-1, WINDOW, 3)
        measured, *predicted = np.median(windows, axis=1).T
        return [(np.abs(p - measured) / measured).tolist() for p in predicted]


def run_stage(core: EngineCore, batch: list[Request], profile: TPProfile | None) -> dict[str, Any]:
    """Generate a batch, and return its figures."""
    trajectory = Trajectory(profile)
    began = time.perf_counter()
    for request in batch:
        core.add(request)
    tokens = 0
    while core.has_work:
        beside = sum(bool(lane.scheduler.sequences) for lane in core.lanes)
        tokens += sum(len(sample.response_ids) for sample in core.step())
        trajectory.see(core, beside, began)
    seconds = time.perf_counter() - began
    plain, corrected = trajectory.errors()
    verdicts = [] if core.adaptive_tp is None else core.adaptive_tp.take()
    switches = [
        {
            "at_s": verdict.began_at - began,
            "unfinished": verdict.unfinished,
            "from": verdict.source_tp,
            "to": verdict.target_tp,
            "seconds": None if verdict.report is None else verdict.report.total_s,
            "predicted_s": None
            if verdict.decision is None
            else next(c.switch_s for c in verdict.decision.candidates if c.tp == verdict.target_tp),
        }
        for verdict in verdicts
        if verdict.source_tp != verdict.target_tp
    ]
    return {
        "seconds": seconds,
        "tokens": tokens,
        "errors": plain,
        "corrected_errors": corrected,
        "switches": switches,
        "drain": trajectory.drain,
    }


def advance(core: EngineCore, batch: list[Request], steps: int) -> None:
    """Bring a batch forward by so many steps."""
    for request in batch:
        core.add(request)
    for _ in range(steps):
        core.step()
    core.settle()


def clear(core: EngineCore, batch: list[Request]) -> None:
    """Abort the batch."""
    core.abort([request.request_id for request in batch])


def peak_rss(core: EngineCore, *, reset: bool) -> int:
    """Return the bytes of all ranks together: the most since the last reset or, with `reset`, the present ones."""
    total = 0
    for pid in (pid for lane in core.lanes for pid in lane.replica.pids):
        if reset:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        status = Path(f"/proc/{pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        total += int(line.split()[1]) * 1024
    return total


def measure_switch(core: EngineCore, batch: list[Request], steps: int, target: int) -> dict[str, Any]:
    """Measure a switch in the middle of a batch."""
    source = core.arrangement.config.tp
    advance(core, batch, steps)
    assert core.adaptive_tp is not None
    (predicted,) = (c for c in core.adaptive_tp.decide().candidates if c.tp == target)
    before = peak_rss(core, reset=True)
    report = core.arrangement.switch(target, cache="recompute" if predicted.state == "recompute" else "move")
    extra = peak_rss(core, reset=False) - before
    clear(core, batch)
    back = core.arrangement.switch(source, cache="recompute")
    return {
        "seconds": report.total_s,
        "predicted_s": predicted.switch_s - predicted.capture_s,  # the capture comes with the first step
        "unfinished": sum(predicted.batch_sizes),
        "back_s": back.total_s,
        "breakdown": {
            "weights": report.weights_s,
            "kv": report.kv_s,
            "groups": report.groups_s,
            "rest": report.rest_s,
        },
        "extra_bytes": max(0, extra),
    }


def restart(core: EngineCore, config: NativeEngineConfig, model: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Measure a change of TP without a switch: new processes, weights from disk, everything prefilled again."""
    batch = requests(task["prompts"], task["lengths"], task["group_size"])
    advance(core, batch, task["steps"])
    unfinished = [sequence for lane in core.lanes for sequence in lane.scheduler.sequences]
    began = time.perf_counter()
    core.close()
    target = config.model_copy(update={"tp": task["target"], "dp": config.ranks // task["target"]})
    again = EngineCore(target, model, device=CPU)
    for number, sequence in enumerate(unfinished):
        again.add(
            Request(
                request_id=number,
                group_id=number,
                prompt_ids=np.array(sequence.tokens, np.int64),
                sampling=SamplingConfig(max_new_tokens=8, ignore_eos=True),
                seed=number,
            )
        )
    while again.stats().generated_tokens < len(unfinished):
        again.step()
    seconds = time.perf_counter() - began
    again.close()
    return {"seconds": seconds}


def main(model: Path, config: NativeEngineConfig) -> None:
    """Do the tasks of the benchmark, until it has had enough."""
    torch.set_num_threads(1)
    core = EngineCore(config, model, device=CPU)
    profile = None
    try:
        for task in gate.turns():
            batch = requests(task["prompts"], task["lengths"], task["group_size"])
            if task.get("profile"):
                profile = TPProfile.read(Path(task["profile"]))
            match task["task"]:
                case "stage":
                    gate.done(**run_stage(core, batch, profile))
                case "switch":
                    gate.done(**measure_switch(core, batch, task["steps"], task["target"]))
                case "restart":
                    gate.done(**restart(core, config, model, task))
                    core = EngineCore(config, model, device=CPU)
    finally:
        core.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), NativeEngineConfig.model_validate(json.loads(sys.argv[2])))

"""A contestant of `make bench-adaptive-tp`: MODEL_DIR ENGINE, the engine's configuration as JSON. Steps are made by
hand.

{"task": "stage", "prompts": [[…]], "lengths": […], "group_size": 8}   generate responses of these lengths
{"task": "switch", …, "left": n, "target": tp}                         when n of them are left, change TP and back
{"task": "restart", …, "left": n, "target": tp}                        the same by tearing the engine down
{"task": "warm"}                                                      write all of the cache, as a profile does first
{"task": "measure", "decode": [[replicas, B, L, others], …], "prefill": [[B, L], …], "steps": n}   see `Bench`
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gate
import numpy as np
import torch

from tailrace.config.engine import NativeEngineConfig, SamplingConfig
from tailrace.engine.adaptive_tp.adaptive import decoded_steps
from tailrace.engine.adaptive_tp.measure import Bench, shortest_length
from tailrace.engine.core import EngineCore
from tailrace.engine.lane import Lane
from tailrace.models.architecture import read_architecture
from tailrace.planning.latency import DecodedStep
from tailrace.types import Request

CPU = torch.device("cpu")
MEASURED_STEPS = 8
"""Steps of a measurement."""


def batch_of(task: dict[str, Any]) -> list[Request]:
    """The requests of a task."""
    return [
        Request(
            request_id=index,
            group_id=index // task["group_size"],
            prompt_ids=np.array(task["prompts"][index // task["group_size"]], np.int64),
            sampling=SamplingConfig(max_new_tokens=length, ignore_eos=True),
            seed=index,
        )
        for index, length in enumerate(task["lengths"])
    ]


class Trajectory:
    """Decode steps as the engine measured them."""

    def __init__(self) -> None:
        self.steps: list[DecodedStep] = []
        self.drain: list[tuple[float, int, int]] = []
        """Points of the drain: seconds since the start, sequences unfinished, TP."""

    def see(self, core: EngineCore, running: Mapping[Lane, int], began: float) -> None:
        """Record a step of the core. `running`: the sequences that each lane with work had before it."""
        tp = core.arrangement.config.tp
        unfinished = sum(len(lane.scheduler.sequences) for lane in core.lanes)
        self.drain.append((time.perf_counter() - began, unfinished, tp))
        self.steps += decoded_steps(core.lanes, tp, running=running)
        forget_steps(core)


def forget_steps(core: EngineCore) -> None:
    """Forget the last step of each lane, so that one that rests does not tell it again."""
    for lane in core.lanes:
        lane.decoded = None


def run_stage(core: EngineCore, batch: list[Request]) -> dict[str, Any]:
    """Generate a batch, and return its figures."""
    trajectory = Trajectory()
    began = time.perf_counter()
    for request in batch:
        core.add(request)
    tokens = 0
    while core.has_work:
        running = {lane: len(lane.scheduler.sequences) for lane in core.lanes if lane.scheduler.sequences}
        tokens += sum(len(sample.response_ids) for sample in core.step())
        trajectory.see(core, running, began)
    seconds = time.perf_counter() - began
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
        "steps": trajectory.steps,
        "switches": switches,
        "drain": trajectory.drain,
    }


def measure(core: EngineCore, model: Path, task: dict[str, Any]) -> list[float]:
    """Measure the seconds of decode steps and prefills, as a profile does."""
    bench, steps = Bench(core.arrangement, read_architecture(model), seed=0), task.get("steps", MEASURED_STEPS)
    decode = [
        bench.decode_s(replicas, size, max(length, shortest_length(steps)), steps=steps, others=others)
        for replicas, size, length, others in task.get("decode", ())
    ]
    prefill = [bench.prefill_s(size, length) for size, length in task.get("prefill", ())]
    forget_steps(core)
    return [*decode, *prefill]


def advance(core: EngineCore, batch: list[Request], left: int) -> None:
    """Bring a batch forward until so many of its responses are left."""
    for request in batch:
        core.add(request)
    while core.arrangement.unfinished > left:
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


def measure_switch(core: EngineCore, batch: list[Request], left: int, target: int) -> dict[str, Any]:
    """Measure a switch in the middle of a batch."""
    source = core.arrangement.config.tp
    advance(core, batch, left)
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
    advance(core, batch_of(task), task["left"])
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
    if config.adaptive_tp is not None and core.adaptive_tp is None:
        raise RuntimeError("the profile is not one of this engine; the warning above says why")
    try:
        for task in gate.turns():
            match task["task"]:
                case "warm":
                    blocks = core.lanes[0].scheduler.blocks.total
                    Bench(core.arrangement, read_architecture(model), seed=0).write_cache(blocks)
                    gate.done()
                case "measure":
                    gate.done(seconds=measure(core, model, task))
                case "stage":
                    gate.done(**run_stage(core, batch_of(task)))
                case "switch":
                    gate.done(**measure_switch(core, batch_of(task), task["left"], task["target"]))
                case "restart":
                    figures = restart(core, config, model, task)
                    core = EngineCore(config, model, device=CPU)
                    gate.done(**figures)
    finally:
        core.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), NativeEngineConfig.model_validate(json.loads(sys.argv[2])))

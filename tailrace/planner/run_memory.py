"""The memory that a recipe takes on the devices that it names: that of each worker at its worst instant.

It depends on no device. Each worker has one of its own, or its part of the machine's memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tailrace.config.cluster import ROLLOUT
from tailrace.planner.sized_run import SizedRun, padded
from tailrace.planning.engine_size import PROCESS_BYTES, EngineSize
from tailrace.planning.memory import Memory, engine_memory, in_turns, reference_memory, trainer_memory
from tailrace.planning.step_times.generation import ELEMENT_BYTES
from tailrace.planning.step_times.training_setup import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Workers that are alike, and what each of their devices holds."""

    name: str
    count: int
    """Devices, or parts of the machine's memory."""
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """The memory that a recipe takes. That of adapters is not known."""

    workers: tuple[Worker, ...]
    others: Mapping[str, float]
    """Bytes of the machine's memory beside those of workers, by purpose."""

    @property
    def total_bytes(self) -> float:
        """All workers' at their worst instants, and the others."""
        return sum(one.count * one.memory.peak for one in self.workers) + sum(self.others.values())


def memory_of(run: SizedRun) -> RunMemory:
    """Return the memory that a recipe takes."""
    parts = tuple(_workers(run))
    if parts and not run.separated and all(part.count == 1 for part in parts):
        together = in_turns({part.name: part.memory for part in parts})
        parts = (Worker(name=" and ".join(part.name for part in parts), count=1, memory=together),)
    return RunMemory(workers=parts, others=_others(run))


def _workers(run: SizedRun) -> Iterator[Worker]:
    if run.has_known_trainer:
        yield Worker(name="trainer", count=1, memory=trainer_memory(run.setup, run.load.batches.largest))
    for name, size in run.sizes.items():
        if size is not None and size.has_model:
            called = "engine" if name == ROLLOUT else f"engine of {name}"
            yield Worker(name=called, count=run.rollout_workers[name] * size.ranks, memory=_rank(run, size))
    if run.scoring:
        tokens = run.load.batches.largest.tokens
        memory = reference_memory(run.setup, MicroBatch(tokens=tokens, squares=0.0))
        count = sum(run.pools[name].workers for name in run.scoring) if run.separated else 1
        yield Worker(name="reference", count=count, memory=memory)
    if run.critic is not None:
        yield Worker(name="critic", count=1, memory=trainer_memory(run.critic, run.load.batches.largest))


def _rank(run: SizedRun, size: EngineSize) -> Memory:
    """Of a rank of an engine."""
    shape, element = padded(run.shape, size.tp), ELEMENT_BYTES[size.dtype]
    load, batch = run.load, min(size.slots, run.load.samples)
    cached = (load.prompt + load.longest) * batch
    if size.cache_bytes is not None:
        cached = size.cache_bytes / shape.cache_bytes(tp=size.tp, element_bytes=element)
    return engine_memory(
        shape,
        tp=size.tp,
        cache_tokens=cached,
        step_tokens=max(batch, min(size.step_tokens or load.prompt, load.read)),
        batch_size=batch,
        dtype=size.dtype,
    )


def _others(run: SizedRun) -> dict[str, float]:
    """Processes, and weights on their way between them: a version in use and the next one.

    Weights that are staged for the ranks of an engine are in the machine's memory, whatever the ranks compute on.
    """
    processes = sum(run.rollout_workers[name] * size.processes for name, size in run.sizes.items() if size is not None)
    found: dict[str, float] = {}
    if run.separated:
        processes += sum(pool.workers for pool in run.pools.values())
        apart = not run.here or run.config.weights.medium not in ("auto", "shared_memory")
        holders = 1 + (sum(run.rollout_workers.values()) if apart else 0)  # others use the trainer's memory
        element = ELEMENT_BYTES[run.config.wire_dtype]
        found["published weights"] = 2.0 * holders * element * run.shape.parameters
    staged = sum(run.rollout_workers[name] * size.staged_bytes for name, size in run.sizes.items() if size is not None)
    if staged:
        found["staged weights"] = staged * run.shape.parameters
    if processes:
        found["processes"] = float(processes * PROCESS_BYTES)
    return found

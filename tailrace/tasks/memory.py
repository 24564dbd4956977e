"""What the memory of a worker's process holds, by purpose (PolyTrace, section 4.3).

Engine, trainer and scorers say what they hold. What is left of the whole is the rest. On a CUDA device the whole is the
peak of PyTorch's allocator, and the rest are activations. On a CPU nobody counts tensors, so the whole is the resident
memory of the process. It never shrinks, since freed memory is kept (`host/allocator.py`).
"""

from collections import Counter
from collections.abc import Callable, Mapping

from tailrace.events import Event, EventLog
from tailrace.host.memory import ProcessMemory, take_peak
from tailrace.registers.events import EventKind

Holder = Callable[[], Mapping[str, int]]
"""Returns the bytes that a part of the worker holds, by purpose (`PURPOSES`): the most at once since its last call."""


class MemoryUse:
    """Writes the events `memory` of one process."""

    def __init__(self, log: EventLog, actor: str, device: str) -> None:
        """`actor`: the owner of the memory. `device`: the torch device that the worker computes on."""
        self._log = log
        self._actor = actor
        self._device = device
        self._process = ProcessMemory()
        self._holders: list[Holder] = []

    def add(self, holder: Holder) -> None:
        """From now on, count what this holder has."""
        self._holders.append(holder)

    def emit(self) -> None:
        """Write an event with the bytes of each purpose, their sum `peak`, and the memory of the host."""
        held: Counter[str] = Counter()
        for holder in self._holders:
            held.update(holder())
        shared_out, resident = self._process.shared_out(), self._process.resident()
        metrics = {**held, "resident": resident, **_with_rest(held.total(), take_peak(self._device), resident)}
        if shared_out is not None:
            metrics["host"] = shared_out
        now = self._log.now()
        self._log.emit(Event(task=EventKind.MEMORY, actor=self._actor, start=now, end=now, metrics=dict(metrics)))


def _with_rest(held: int, peak: int | None, resident: int) -> dict[str, int]:
    """The peak, and what of it no holder has.

    Ranks in processes of their own have memory of a CUDA device that this process does not see. Then the parts alone
    are known, and the peak is their sum.
    """
    if peak is None:
        return {"peak": max(held, resident), "other": max(0, resident - held)}
    return {"peak": max(held, peak), "activations": max(0, peak - held)}

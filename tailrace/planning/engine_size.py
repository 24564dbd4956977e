"""What an engine of a type has, before it exists; its backend says so."""

from dataclasses import dataclass

from tailrace.config.engine import DType
from tailrace.planning.step_times.generation import ELEMENT_BYTES

PROCESS_BYTES = 350 * 2**20
"""Memory of a worker's process without weights and cache: Python with torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """The ranks of an engine, and what each of them holds."""

    dtype: DType = "bfloat16"
    """Of weights, keys and values."""
    tp: int = 1
    """Ranks that hold one copy of the model together."""
    dp: int = 1
    """Copies of the model."""
    slots: int = 1
    """Sequences that a copy decodes together."""
    cache_bytes: float | None = None
    """Of the KV cache on each rank; None where it grows with the sequences."""
    step_tokens: int = 0
    """Tokens of prompts in a step, at most."""
    processes: int = 0
    """Processes beside that of the engine."""
    staged_bytes: float = 0.0
    """Bytes of each parameter of new weights on their way to those processes, in the machine's memory."""
    has_model: bool = True
    """Whether it computes at all."""

    def held(self, parameters: int) -> dict[str, float]:
        """Bytes by purpose that all ranks together hold at any time, with a model of so many parameters."""
        if not self.has_model:
            return {}
        memory = {"engine weights": self.dp * ELEMENT_BYTES[self.dtype] * parameters}
        if self.cache_bytes is not None:
            memory["KV cache"] = self.ranks * self.cache_bytes
        if self.processes:
            memory["worker processes"] = float(self.processes * PROCESS_BYTES)
        return memory

    @property
    def ranks(self) -> int:
        """Ranks of the whole engine."""
        return self.tp * self.dp

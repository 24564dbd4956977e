"""The decoder that a rank computes with: its share of the model, and its cache."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from tailrace.engine.collectives.base import Collective
from tailrace.engine.decoder.packing import Group, Packing
from tailrace.engine.kv_cache import KVCache
from tailrace.engine.sampling.drawing import Drawing
from tailrace.engine.scheduling.step import Chunk
from tailrace.models.architecture import Architecture

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The chunks of a step as packed arrays on the CPU: T tokens in C chunks, without padding."""

    tokens_T: Ints
    positions_T: Ints
    starts_C: Ints
    """Cached tokens of each chunk's sequence before the chunk."""
    lengths_C: Ints
    """Tokens of each chunk; chunk c's are rows sum(lengths_C[:c]) … of the packed arrays."""
    tables_CN: Ints
    """Blocks of each chunk's sequence, as many as its last token needs; rows are padded with block 0."""
    drawn_N: Ints
    """Packed rows whose logits are wanted: the last one of each chunk that has a draw."""

    @classmethod
    def of(cls, chunks: list[Chunk], block_size: int) -> Self:
        """Pack the chunks."""
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        lengths = np.array([len(chunk.tokens) for chunk in chunks], np.int64)
        ends = lengths.cumsum()
        widths = -(-(starts + lengths) // block_size)
        tables = np.zeros((len(chunks), int(widths.max(initial=0))), np.int64)
        for table, width, chunk in zip(tables, widths, chunks, strict=True):
            table[:width] = chunk.blocks[:width]
        return cls(
            tokens_T=np.array([token for chunk in chunks for token in chunk.tokens], np.int64),
            positions_T=np.arange(int(lengths.sum())) + np.repeat(starts - ends + lengths, lengths),
            starts_C=starts,
            lengths_C=lengths,
            tables_CN=tables,
            drawn_N=np.array(
                [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.draw is not None], np.int64
            ),
        )


class Decoder(ABC):
    """A Llama, Qwen2 or Qwen3 decoder, or the share of it that one TP rank holds. Without weights until `load`.

    Weights come and go by group (`Packing`), so that those of another degree can take their place one by one.
    """

    def __init__(self, packing: Packing, cache: KVCache, drawing: Drawing) -> None:
        self.packing = packing
        """The layout of the weights in memory."""
        self.cache = cache
        self.drawing = drawing
        """Draws tokens from the logits."""
        self._memory: dict[Group, torch.Tensor] = {}

    @torch.no_grad()
    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight. `named` has this rank's (`sharding.shard_weights`) under HF names, any float dtype."""
        for group in self.packing.groups:
            memory = self._memory.get(group)
            if memory is None:
                memory = self.packing.make(group, self.cache.data.device)
            self.packing.write(group, memory, named)  # in place, if there was one: CUDA graphs know its address
            self.adopt(group, memory)

    def adopt(self, group: Group, memory: torch.Tensor) -> None:
        """Compute with the weights in this memory from now on."""
        self._memory[group] = memory
        self._use(group, self.packing.fused(group, memory))

    def give_up(self, group: Group) -> torch.Tensor:
        """Return the memory of the group, and hold it no longer. The decoder cannot compute without it."""
        self._forget(group)
        return self._memory.pop(group)

    @property
    def is_loaded(self) -> bool:
        """Whether the decoder has all its weights."""
        return len(self._memory) == len(self.packing.groups)

    @abstractmethod
    def reshaped(self, architecture: Architecture, collective: Collective) -> Self:
        """Make a decoder of another shard, without weights.

        It shares the cache's memory, and all that does not depend on TP. This decoder may not compute any more, since
        the caches overlap.

        Args:
            architecture: The architecture of the shard.
            collective: The collective of the ranks that hold the other shards.

        Raises:
            ConfigError: the cache cannot hold a block of that shard.
        """

    @abstractmethod
    def _use(self, group: Group, fused: Mapping[str, torch.Tensor]) -> None:
        """Keep a group's weights (`Packing.fused`) for `forward`."""

    @abstractmethod
    def _forget(self, group: Group) -> None:
        """Drop every view of the group's weights."""

    @abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch: keys and values of all its tokens go to the cache.

        Returns:
            [N, V_local] fp32 logits of `batch.drawn_N`; V_local is this rank's padded share of the vocabulary.
        """

    @abstractmethod
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks (source, target), in all layers."""

    @abstractmethod
    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of the forward passes since the last call, by `profile.PARTS`, as far as measured.

        On CUDA they are the seconds to launch the kernels, not to run them.
        """

"""The decoder in PyTorch: any device, fp32 or bf16."""

from collections.abc import Mapping

import numpy as np
import torch

from tailrace.engine.collectives.base import Collective
from tailrace.engine.decoder.attention import StepAttention
from tailrace.engine.decoder.base import Batch, Decoder, Ints
from tailrace.engine.decoder.graphs import DecodeGraphs
from tailrace.engine.decoder.model import Model, RopeTables
from tailrace.engine.decoder.packing import Group, Packing, RowMajor
from tailrace.engine.kv_cache import KVCache
from tailrace.engine.sampling.drawing import TorchDrawing
from tailrace.models.architecture import Architecture


class TorchDecoder(Decoder):
    """See `Decoder`."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        cache: KVCache,
        rope: RopeTables,
        collective: Collective,
        cuda_graphs: bool = False,
    ) -> None:
        """Make a decoder that computes in the cache's dtype, on its device.

        Args:
            architecture: The rank's own (`sharding.local_architecture`).
            rope: The tables of `model.rope_tables`.
            cuda_graphs: Capture steps that only decode; needs CUDA, and NCCL between the ranks.

        Raises:
            ConfigError: `cuda_graphs` is set, and the device is not CUDA.
        """
        dtype = cache.data.dtype
        super().__init__(Packing(architecture, RowMajor(dtype, dtype)), cache, TorchDrawing(collective))
        self._device = cache.data.device
        self._rope = rope
        self._model = Model(architecture, rope=rope, collective=collective)
        self._graphs = DecodeGraphs(self._decode, self._device) if cuda_graphs else None

    def reshaped(self, architecture: Architecture, collective: Collective) -> "TorchDecoder":
        """See `Decoder`."""
        # Graphs are captured again, each size when it first occurs. While a batch drains these are small (PAT, section
        # 4.4); after the return to the first degree they are all that the next batch has.
        return TorchDecoder(
            architecture,
            cache=self.cache.reshaped(architecture),
            rope=self._rope,
            collective=collective,
            cuda_graphs=self._graphs is not None,
        )

    def _use(self, group: Group, fused: Mapping[str, torch.Tensor]) -> None:
        """See `Decoder`."""
        self._model.use(group, fused)

    def _forget(self, group: Group) -> None:
        """See `Decoder`."""
        self._graphs = None  # the graphs read these weights, and hold this decoder, which would keep both alive
        self._model.forget(group)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `Decoder`."""
        if (batch.lengths_C == 1).all():
            inputs_BX = decode_inputs(batch)
            logits_BV = self._graphs(inputs_BX) if self._graphs else self._decode(self._place(inputs_BX))
            return logits_BV if len(batch.drawn_N) == len(logits_BV) else logits_BV[self._place(batch.drawn_N)]
        attention = StepAttention.of_batch(self.cache, batch, self._device)
        hidden_TH = self._model.hidden(self._place(batch.tokens_T), self._place(batch.positions_T), attention)
        return self._model.logits(hidden_TH[self._place(batch.drawn_N)]).float()

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See `Decoder`."""
        self.cache.copy(pairs)

    def take_seconds(self) -> dict[str, float]:
        """See `Decoder`."""
        return self._model.stopwatch.take()

    def _decode(self, inputs_BX: torch.Tensor) -> torch.Tensor:
        """Return [B, V_local] fp32 logits of a `decode_inputs`. Nothing here waits for the device or copies to it."""
        tokens_B, positions_B, tables_BW = inputs_BX[:, 0], inputs_BX[:, 1], inputs_BX[:, 2:]
        attention = StepAttention.of_decode(self.cache, positions_B, tables_BW)
        return self._model.logits(self._model.hidden(tokens_B, positions_B, attention)).float()

    def _place(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def decode_inputs(batch: Batch) -> Ints:
    """Put all that a step of single tokens needs in one array, [B, 2 + W]: token, position, and block table of each."""
    return np.column_stack((batch.tokens_T, batch.positions_T, batch.tables_CN))

"""One rank: its share of the model, its cache and its sampler. It executes what the driver has scheduled."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Collective
from tailrace.engine.decoder.base import Batch
from tailrace.engine.decoder.factory import local_sizes, make_decoder
from tailrace.engine.model.shard import Shard
from tailrace.engine.model.sharding import head_slots, shard_weights
from tailrace.engine.ranks.reshard import Meeting, SwitchTimes, reshard
from tailrace.engine.sampling.sampler import Sampler, SamplingRows, uniforms
from tailrace.engine.scheduling.migration import Migration
from tailrace.engine.scheduling.step import Draw, StepInput, StepOutput
from tailrace.models.architecture import Architecture
from tailrace.types import CacheBytes


class Rank:
    """One rank. Not thread-safe; one call at a time. Without weights until `load`."""

    def __init__(
        self,
        config: NativeEngineConfig,
        architecture: Architecture,
        shard: Shard,
        *,
        device: torch.device,
        collective: Collective,
    ) -> None:
        """Allocate the cache. `architecture` is that of the whole model.

        Raises:
            ModelError: the model cannot be split into so many shards.
            ConfigError: the configured kernels are not available.
            ConfigError: the cache cannot hold a block, or the device cannot hold the cache.
        """
        self._config = config
        self._shard = shard
        self._architecture = architecture
        self._block_size = config.block_size
        self._device = device
        self._decoder = make_decoder(config, architecture, shard, device=device, collective=collective)
        self._sampler = Sampler(architecture.vocab_size, collective, self._decoder.drawing)

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight by this rank's share of these full, checked tensors."""
        self._decoder.load(shard_weights(self._architecture, self._shard, named))

    @torch.no_grad()
    def switch(self, target: Shard, migrations: Sequence[Migration], group: Callable[[int], Collective]) -> SwitchTimes:
        """Become another shard, with the weights that the ranks have and the blocks that the migrations name.

        All ranks of the engine do so at the same time. Other blocks hold any finite numbers afterwards.

        Args:
            migrations: One among the lcm(source, target) ranks that exchange weights. Another one may follow, among all
                ranks of the engine.
            group: Returns the rank's collective of a degree (`Groups.get`): its own, the target's, and those of the
                migrations.

        Raises:
            ModelError: the model cannot be split into so many shards; nothing has changed.
            EngineError: a group or a block does not exist, and nothing has changed; or a rank did not take part, and
                this one is of no further use.
        """
        replica, near = group(self._shard.degree), math.lcm(self._shard.degree, target.degree)
        sizes = [near, *(len(across.sources) * self._shard.degree for across in migrations[1:])]
        meetings = [Meeting(self._shard, target, replica=replica, everyone=group(size)) for size in sizes]
        local, _ = local_sizes(self._config, self._architecture, target.degree)
        collective = group(target.degree)
        decoder = self._decoder.reshaped(local, collective)
        times = reshard(self._architecture, meetings, migrations, self._decoder, decoder)
        self._shard, self._decoder = target, decoder
        self._sampler = Sampler(self._architecture.vocab_size, collective, decoder.drawing)
        return times

    @torch.no_grad()
    def read_cache(self, blocks: Sequence[int]) -> CacheBytes:
        """Return copies of the keys and values in these blocks, of the shard's own KV heads."""
        taken = self._decoder.cache.data[:, :, list(blocks), : self._heads]
        bytes_of: CacheBytes = taken.cpu().contiguous().view(torch.uint8).numpy()
        return bytes_of

    @torch.no_grad()
    def write_cache(self, blocks: Sequence[int], data: CacheBytes) -> None:
        """Put keys and values of the shard's own KV heads into these blocks. `data` may be flat."""
        cache = self._decoder.cache.data
        layers, parts, _, _, width = cache.shape
        came = torch.from_numpy(np.ascontiguousarray(data).reshape(-1)).view(cache.dtype)
        heads = self._heads
        cache[:, :, list(blocks), :heads] = came.to(cache.device).view(layers, parts, len(blocks), heads, width)

    @property
    def _heads(self) -> int:
        """The shard's KV heads, without those of zeros."""
        return len(head_slots(self._architecture, self._shard))

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """Compute the chunks and draw the tokens after them. The result is the same on every rank of the replica.

        Raises:
            EngineError: logits are not finite, or another rank did not take part.
        """
        began = time.perf_counter()
        self._decoder.copy_blocks(step.copies)
        batch = Batch.of(step.chunks, self._block_size)
        packed = time.perf_counter()
        logits_NV = self._decoder.forward(batch)
        computed = time.perf_counter()
        draws = [chunk.draw for chunk in step.chunks if chunk.draw is not None]
        tokens, log_probs = self._draw(logits_NV, draws) if draws else ([], [])
        ended = time.perf_counter()
        seconds = {**self._decoder.take_seconds(), "pack": packed - began, "sample": ended - computed}
        seconds["other"] = max(0.0, ended - began - sum(seconds.values()))
        return StepOutput(tokens, log_probs, seconds)

    def _draw(self, logits_NV: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
        rows = SamplingRows.of(draws, self._device)
        where = uniforms([draw.seed for draw in draws], [draw.position for draw in draws])
        return self._sampler.sample(logits_NV, rows, where)

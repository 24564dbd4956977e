"""The synchronous engine: add, abort, step, load weights. The asynchronous driver drives it.

One step is schedule → run → admit → sample → finish. A prompt that is complete after `run` lets its sequences in at
once: their first tokens are sampled together with the next tokens of those that decode.
"""

from collections.abc import Iterable
from pathlib import Path

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.architecture import read_architecture
from tailrace.engine.base import EngineStats
from tailrace.engine.driver import check_length
from tailrace.engine.kv_cache import BlockManager, KVCache, blocks_that_fit
from tailrace.engine.model import Model
from tailrace.engine.runner import Runner, mark_computed
from tailrace.engine.sampler import SamplingRows, sample, uniforms
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.sequence import Sequence
from tailrace.engine.stopping import StopRules
from tailrace.engine.weights import check_weights, read_weights
from tailrace.errors import EngineError, ModelError, RequestError
from tailrace.types import Request, Sample, WeightVersion


class EngineCore:
    """One rank: model, cache, scheduler and sampler. Not thread-safe; one call at a time."""

    def __init__(self, config: NativeEngineConfig, model_dir: Path, *, device: torch.device) -> None:
        """Read the model, with its weights as version 0, and allocate the cache.

        Raises:
            ModelError: the directory holds no model that the engine runs.
            EngineError: the cache cannot hold a block, or the device cannot hold the cache.
        """
        self.version: WeightVersion = 0
        architecture = read_architecture(model_dir)
        self.max_model_len = min(config.max_model_len or architecture.max_positions, architecture.max_positions)
        self._stop_rules = StopRules(model_dir, eos_ids=architecture.eos_ids, max_model_len=self.max_model_len)
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._model = Model(architecture, max_model_len=self.max_model_len, dtype=dtype, device=device)
        try:
            self._model.load(check_weights(architecture, read_weights(model_dir)))
        except EngineError as error:
            raise ModelError(f"{model_dir}: the weights do not fit config.json: {error}") from error
        blocks = blocks_that_fit(architecture, gib=config.kv_cache_gib, block_size=config.block_size, dtype=dtype)
        cache = KVCache(architecture, blocks=blocks, block_size=config.block_size, dtype=dtype, device=device)
        self._runner = Runner(self._model, cache)
        self._scheduler = Scheduler(
            BlockManager(blocks),
            block_size=config.block_size,
            max_batch_size=config.max_batch_size,
            prefill_tokens=config.prefill_tokens,
        )
        self._weights_are_whole = True
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def check(self, request: Request) -> None:
        """Whether the request can be served; reads nothing that a step changes.

        Raises:
            RequestError: it can never be.
        """
        check_length(request, self.max_model_len)
        length = min(len(request.prompt_ids) + request.sampling.max_new_tokens, self.max_model_len)
        block_size, total = self._runner.cache.block_size, self._runner.cache.blocks
        needed = -(-length // block_size) + 1  # the prompt's partial last block exists twice for a moment
        if needed > total:
            raise RequestError(
                f"request {request.request_id} needs up to {needed} blocks of {block_size} tokens, and the cache has "
                f"{total}; raise kv_cache_gib or lower max_new_tokens"
            )
        last = self._model.architecture.vocab_size - 1
        if int(request.prompt_ids.max()) > last or int(request.prompt_ids.min()) < 0:
            raise RequestError(f"request {request.request_id} has a prompt token outside the vocabulary, 0 … {last}")
        self._stop_rules.rule(request)

    def add(self, request: Request) -> None:
        """Queue a request that `check` accepted."""
        self._scheduler.add(request, self._stop_rules.rule(request))

    def abort(self, request_ids: Iterable[int]) -> list[Sample]:
        """Finish these requests with what they have; unknown ids are ignored."""
        return self._scheduler.abort(set(request_ids))

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Compute one token of each decoding sequence and a share of the waiting prompts; the samples that finished.

        Raises:
            EngineError: the logits are not finite, or copying the last weights failed halfway.
        """
        if not self._weights_are_whole:
            raise EngineError("copying the last weights failed halfway, so there are none to generate with")
        plan = self._scheduler.schedule()
        logits_BV = self._runner.run(plan)
        self._prefilled_tokens += mark_computed(plan)
        admission = self._scheduler.admit()
        self._runner.cache.copy(admission.copies)
        self._steps += 1
        sequences = plan.decodes + admission.fresh
        if not sequences:
            return []
        if admission.logits:
            fresh_BV = torch.stack(admission.logits)
            logits_BV = fresh_BV if logits_BV is None else torch.cat((logits_BV, fresh_BV))
        assert logits_BV is not None
        return self._sample(sequences, logits_BV)

    @torch.no_grad()
    def load_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Install new weights, all or none. Cached prompts are not used for sequences that start afterwards.

        Raises:
            EngineError: a name is unknown or missing, or a shape differs; the old weights stay.
        """
        named = check_weights(self._model.architecture, tensors)
        self._weights_are_whole = False  # and stay torn if a copy fails, for want of memory: no step may use them
        self._model.load(named)
        self._weights_are_whole = True
        self._scheduler.forget_prompts()
        self.version = version

    def stats(self) -> EngineStats:
        """Counts; may be called while a step is under way elsewhere."""
        blocks = self._scheduler.blocks
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            steps=self._steps,
            preemptions=self._scheduler.preemptions,
            used_blocks=blocks.used,
            total_blocks=blocks.total,
            version=self.version,
        )

    def _sample(self, sequences: list[Sequence], logits_BV: torch.Tensor) -> list[Sample]:
        """Give each sequence its next token; finish those that it ends."""
        rows = SamplingRows.of([s.request.sampling for s in sequences], logits_BV.device)
        draws = uniforms([s.request.seed for s in sequences], [len(s.tokens) for s in sequences])
        finished = []
        for sequence, token, log_prob in zip(sequences, *sample(logits_BV, rows, draws), strict=True):
            reason = sequence.append(token, log_prob, self.version)
            if reason is not None:
                finished.append((sequence, reason))
        self._generated_tokens += len(sequences)
        return self._scheduler.finish(finished)

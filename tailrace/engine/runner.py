"""Runs the model over what the scheduler chose: from plain lists to tensors and back."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from tailrace.engine.attention import DecodePlan, DecodeRow, PrefillChunk, PrefillPlan, StepAttention
from tailrace.engine.kv_cache import KVCache
from tailrace.engine.model import Model
from tailrace.engine.scheduler import StepPlan
from tailrace.engine.sequence import PromptCache, Sequence

Ints = npt.NDArray[np.int64]


class Runner:
    """One rank: a model and its cache."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model = model
        self.cache = cache

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Compute the plan's tokens in one packed pass.

        Returns:
            [B, V] logits of the decoding sequences, None without any. A prompt that is complete now keeps its own.
        """
        if not plan.prefills and not plan.decodes:
            return None
        tokens, positions, slots = (self._place(parts) for parts in zip(*self._columns(plan), strict=True))
        attention = self._attention(plan, slots)
        hidden = self.model.hidden(tokens, positions, attention)
        ending, rows = self._ending_prompts(plan)
        rows += range(len(hidden) - len(plan.decodes), len(hidden))
        if not rows:
            return None
        logits = self.model.logits(hidden[rows])
        for prompt, prompt_logits_V in zip(ending, logits, strict=False):
            prompt.logits_V = prompt_logits_V.clone()
        return logits[len(ending) :]

    def _columns(self, plan: StepPlan) -> Iterable[tuple[Ints, Ints, Ints]]:
        """(token, position, slot) arrays of each chunk, then of the decoding sequences."""
        for prefill in plan.prefills:
            positions = np.arange(prefill.start, prefill.start + len(prefill.tokens))
            yield prefill.tokens, positions, self._slots(np.array(prefill.blocks), positions)
        block_size = self.cache.block_size
        positions = np.array([sequence.length - 1 for sequence in plan.decodes], np.int64)
        newest = np.array([sequence.blocks[-1] for sequence in plan.decodes], np.int64)
        tokens = np.array([sequence.tokens[-1] for sequence in plan.decodes], np.int64)
        yield tokens, positions, newest * block_size + positions % block_size

    def _slots(self, blocks: Ints, positions: Ints) -> Ints:
        block_size = self.cache.block_size
        slots: Ints = blocks[positions // block_size] * block_size + positions % block_size
        return slots

    def _place(self, parts: Iterable[Ints]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(self.model.device)

    def _attention(self, plan: StepPlan, slots_T: torch.Tensor) -> StepAttention:
        block_size, device = self.cache.block_size, self.model.device
        chunks = [PrefillChunk(start=p.start, tokens=len(p.tokens), blocks=p.blocks) for p in plan.prefills]
        prefills = [PrefillPlan(chunk, block_size, device) for chunk in chunks]
        rows = [self._decode_row(sequence) for sequence in plan.decodes]
        decode = DecodePlan(rows, block_size, device) if rows else None
        return StepAttention(self.cache, prefills, decode, slots_T)

    def _decode_row(self, sequence: Sequence) -> DecodeRow:
        last_block_tokens = (sequence.length - 1) % self.cache.block_size + 1
        return DecodeRow(
            prompt_blocks=sequence.prompt_blocks, blocks=sequence.blocks, last_block_tokens=last_block_tokens
        )

    @staticmethod
    def _ending_prompts(plan: StepPlan) -> tuple[list[PromptCache], list[int]]:
        """Prompts whose last token is computed in this step, and the packed row of that token."""
        ends = np.cumsum([len(prefill.tokens) for prefill in plan.prefills]).tolist()
        prompts, rows = [], []
        for prefill, end in zip(plan.prefills, ends, strict=True):
            if isinstance(prefill.target, PromptCache) and prefill.start + len(prefill.tokens) == prefill.target.length:
                prompts.append(prefill.target)
                rows.append(end - 1)
        return prompts, rows


def mark_computed(plan: StepPlan) -> int:
    """Note in prompts and sequences what is in the cache now. Returns the prompt tokens among it."""
    prompt_tokens = 0
    for prefill in plan.prefills:
        end = prefill.start + len(prefill.tokens)
        if isinstance(prefill.target, PromptCache):
            prefill.target.computed = end
            prompt_tokens += len(prefill.tokens)
        else:
            prefill.target.cached = end
    for sequence in plan.decodes:
        sequence.cached = sequence.length
    return prompt_tokens

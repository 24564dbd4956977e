"""Which tokens the next step computes, and who gives way when blocks run out.

Dataflow of a sequence:  waiting ──admit──▶ running ──▶ finished
                            ▲                  │
                            └─────preempt──────┘   (its tokens are kept, its blocks are not)

A step first reserves a block for every running sequence that needs one, then fills the prefill budget: running
sequences that were preempted before recompute what they lost, then the prompts of the first waiting ones. Sequences are
admitted in the order of arrival once their prompt is in the cache. A shortage of blocks is met, in this order, by
dropping prompt tails that nobody waits for, prompts that nobody runs on, and the youngest running sequence.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
import torch

from tailrace.engine.kv_cache import BlockManager
from tailrace.engine.sequence import PromptCache, PromptKey, Sequence
from tailrace.engine.stopping import StopRule
from tailrace.types import FinishReason, IntArray, Request, Sample


@dataclass(frozen=True, slots=True)
class Prefill:
    """Consecutive tokens to compute: of a prompt, or of a sequence that lost its cache."""

    target: PromptCache | Sequence
    start: int
    tokens: IntArray
    blocks: list[int]
    """Of positions 0 … start + len(tokens) - 1 at least."""


@dataclass(slots=True)
class StepPlan:
    """What one step computes: chunks of prefill, and one token of each decoding sequence."""

    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Admission:
    """What has just been started. Its prompt may be dropped by now, to make room for the next; hence the details."""

    fresh: list[Sequence] = field(default_factory=list)
    """Sequences that sample their first token now."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """[V] for each of them, to sample it from."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks to copy, all at once, before the next step: a source may be another copy's target."""


class Scheduler:
    """Owns the sequences and the blocks; knows nothing of tensors but the logits that prompts keep."""

    def __init__(self, blocks: BlockManager, *, block_size: int, max_batch_size: int, prefill_tokens: int) -> None:
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of arrival."""
        self.preemptions = 0
        self._block_size = block_size
        self._max_batch_size = max_batch_size
        self._prefill_tokens = prefill_tokens
        self._prompts: dict[PromptKey, PromptCache] = {}
        self._arrivals = 0

    def add(self, request: Request, stop: StopRule) -> None:
        """Queue a request behind all others."""
        self._arrivals += 1
        prompt = self._attach(request)
        self.waiting.append(Sequence(request=request, stop=stop, arrival=self._arrivals, prompt=prompt))

    def schedule(self) -> StepPlan:
        """Choose the next step's tokens and reserve their blocks."""
        plan = StepPlan()
        for sequence in list(self.running):
            if sequence.blocks:  # not preempted by an older one in this loop
                self._reserve(sequence)
        budget = self._prefill_tokens
        for sequence in self.running:
            if sequence.missing:
                budget -= self._prefill_sequence(plan, sequence, budget)
            else:
                plan.decodes.append(sequence)
        self._prefill_prompts(plan, budget)
        return plan

    def admit(self) -> Admission:
        """Start the first waiting sequences whose prompts are ready, as far as places and blocks allow."""
        admission = Admission()
        while self.waiting and self._places() > 0:
            sequence = self.waiting[0]
            logits_V = sequence.prompt.logits_V
            needed = sequence.blocks_for(sequence.length + (not sequence.tokens))
            if logits_V is None or not self._make_room(needed, newcomer=sequence.prompt):
                break
            self.waiting.popleft()
            admission.copies += self._start(sequence, needed)
            if not sequence.tokens:
                admission.fresh.append(sequence)
                admission.logits.append(logits_V)
        self.running.sort(key=lambda sequence: sequence.arrival)
        return admission

    def finish(self, sequences: Iterable[tuple[Sequence, FinishReason]]) -> list[Sample]:
        """Let go of these running sequences."""
        samples, gone = [], set()
        for sequence, reason in sequences:
            self._release(sequence)
            sequence.prompt.running -= 1
            self._drop_unused(sequence.prompt)
            gone.add(sequence)
            samples.append(sequence.finish(reason))
        if gone:
            self.running = [sequence for sequence in self.running if sequence not in gone]
        return samples

    def abort(self, request_ids: set[int]) -> list[Sample]:
        """Finish these requests with what they have."""
        leaving = [sequence for sequence in self.waiting if sequence.request.request_id in request_ids]
        if leaving:
            self.waiting = deque(s for s in self.waiting if s.request.request_id not in request_ids)
        for sequence in leaving:
            sequence.prompt.waiting -= 1
            self._drop_unused(sequence.prompt)
        running = [sequence for sequence in self.running if sequence.request.request_id in request_ids]
        aborted = [sequence.finish(FinishReason.ABORT) for sequence in leaving]
        return aborted + self.finish((sequence, FinishReason.ABORT) for sequence in running)

    def forget_prompts(self) -> None:
        """The weights have changed: sequences that start from now on compute their prompts anew."""
        self._prompts, old = {}, list(self._prompts.values())
        for sequence in self.waiting:
            sequence.prompt = self._attach(sequence.request)
        for prompt in old:
            prompt.waiting = 0
            self._evict(prompt)

    # prompts

    def _attach(self, request: Request) -> PromptCache:
        key = (request.group_id, request.prompt_ids.tobytes())
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = PromptCache(key, request.prompt_ids, self._block_size)
        prompt.waiting += 1
        return prompt

    def _drop_unused(self, prompt: PromptCache) -> None:
        if prompt.waiting or prompt.running:
            return
        self._evict(prompt)
        if self._prompts.get(prompt.key) is prompt:
            del self._prompts[prompt.key]

    def _evict(self, prompt: PromptCache) -> None:
        """Give the prompt's own references back; sequences that run on it keep theirs."""
        self.blocks.release(prompt.blocks)
        prompt.blocks, prompt.computed, prompt.logits_V = [], 0, None

    def _prefill_prompts(self, plan: StepPlan, budget: int) -> None:
        if self.waiting and self.waiting[0].prompt.ready:
            return  # the first could start but for its blocks; prompts behind it would take them
        for prompt in self._next_prompts():
            if budget <= 0:
                return
            if prompt.ready:
                continue
            if not prompt.blocks:
                if not self._make_room(prompt.size, newcomer=prompt):
                    return
                prompt.blocks = self.blocks.allocate(prompt.size, prompt=True)
            tokens = prompt.prompt_ids[prompt.computed : prompt.computed + budget]
            plan.prefills.append(Prefill(prompt, prompt.computed, tokens, prompt.blocks))
            budget -= len(tokens)

    def _next_prompts(self) -> Iterable[PromptCache]:
        """The prompts of the waiting sequences that there are places for, each once."""
        return dict.fromkeys(sequence.prompt for sequence in islice(self.waiting, max(0, self._places())))

    # sequences

    def _places(self) -> int:
        return self._max_batch_size - len(self.running)

    def _start(self, sequence: Sequence, own_blocks: int) -> list[tuple[int, int]]:
        prompt = sequence.prompt
        prompt.waiting -= 1
        prompt.running += 1
        sequence.prompt_blocks = prompt.blocks[: prompt.full_blocks]
        self.blocks.share(sequence.prompt_blocks)
        sequence.blocks = self.blocks.allocate(own_blocks, prompt=False)
        sequence.cached = prompt.length
        self.running.append(sequence)
        return [(prompt.blocks[-1], sequence.blocks[0])] if prompt.has_tail else []

    def _reserve(self, sequence: Sequence) -> None:
        """Give `sequence` the block of its newest token, if need be by preempting the youngest, maybe itself."""
        while sequence.blocks_for(sequence.length) > len(sequence.blocks):
            if self._reclaim(1, chain(self._unwaited_prompts(), self._idle_prompts())):
                sequence.blocks += self.blocks.allocate(1, prompt=False)
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        sequence.prompt.running -= 1
        self._drop_unused(sequence.prompt)
        sequence.prompt = self._attach(sequence.request)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.prompt_blocks)
        self.blocks.release(sequence.blocks)
        sequence.prompt_blocks, sequence.blocks, sequence.cached = [], [], 0

    def _prefill_sequence(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        first = sequence.cached - sequence.prompt.length
        tokens = np.array(sequence.tokens[first : first + min(budget, sequence.missing)], np.int64)
        if len(tokens):
            blocks = sequence.prompt_blocks + sequence.blocks
            plan.prefills.append(Prefill(sequence, sequence.cached, tokens, blocks))
        return len(tokens)

    # room

    def _make_room(self, needed: int, *, newcomer: PromptCache) -> bool:
        """Whether `needed` blocks are free for a newcomer, with one left for each running sequence to grow into.

        What came before the newcomer keeps its place.
        """
        wanted = needed + len(self.running)
        return self._reclaim(wanted, chain(self._unwaited_prompts(), self._idle_prompts(behind=newcomer)))

    def _reclaim(self, wanted: int, candidates: Iterable[PromptCache]) -> bool:
        """Drop cached prompts, which can be computed again, until `wanted` blocks are free."""
        if self.blocks.free >= wanted:
            return True
        for prompt in candidates:
            self._evict(prompt)
            if self.blocks.free >= wanted:
                return True
        return False

    def _unwaited_prompts(self) -> Iterator[PromptCache]:
        """Those that nobody waits for: running sequences hold what they need."""
        return (prompt for prompt in self._prompts.values() if prompt.blocks and not prompt.waiting)

    def _idle_prompts(self, *, behind: PromptCache | None = None) -> Iterator[PromptCache]:
        """Those that nobody runs on, the last in the queue first, down to `behind`."""
        for prompt in reversed(dict.fromkeys(sequence.prompt for sequence in self.waiting)):
            if prompt is behind:
                return
            if not prompt.running:
                yield prompt

"""Chooses the tokens that the next step of a replica computes, and the sequence to preempt when blocks run out.

Dataflow of a sequence:  waiting ──start──▶ running ──▶ finished
                            ▲                  │
                            └─────requeue──────┘   (its tokens are kept; its blocks are not, but may be found again)

A step holds the newest token of each sequence that decodes. Within the prefill budget it also holds the next uncomputed
tokens of the others: first of those that run, then of waiting ones that start. The order is always by priority, then
arrival. A sequence starts when there is a place, budget, and room for all its tokens and one more block for each
running sequence. It shares or copies the part of its first tokens that is cached, or takes over the keys and values
that came with its request. While another sequence computes them, it waits. When a running sequence needs a block and
none is free, the last one in the order goes back to waiting.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from tailrace.engine.scheduling.blocks import BlockManager, Match
from tailrace.engine.scheduling.prefixes import PrefixIndex
from tailrace.engine.scheduling.sequence import Sequence
from tailrace.engine.scheduling.step import Chunk, StepInput, StepOutput
from tailrace.engine.scheduling.stopping import StopRule
from tailrace.engine.scheduling.waiting import WaitingQueue
from tailrace.types import CacheBytes, FinishReason, Piece, Request, Sample, SequenceCache, WeightVersion

_order = attrgetter("order")


@dataclass(slots=True)
class Counts:
    """Counts of an engine's work so far. The schedulers that come and go in an engine share one."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens computed for the first time."""
    shared_tokens: int = 0
    """Prompt tokens found in the cache instead."""
    preemptions: int = 0
    steps: int = 0
    restarts: int = 0
    """Restarts of ranks that died."""
    switches: int = 0
    """Changes of the TP degree."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The chunks that one step computes, and their sequences."""

    input: StepInput
    sequences: list[Sequence]
    """The sequence of each chunk."""
    arrivals: list[tuple[list[int], CacheBytes]] = field(default_factory=list)
    """Blocks that get keys and values from elsewhere before the step, as in `SequenceCache.data`."""
    gone: set[Sequence] = field(default_factory=set)
    """The sequences that lost their blocks since. Results for them are dropped."""


class Scheduler:
    """Owns the sequences of a replica and its blocks. Each `schedule` is followed by `complete` or `restart`.

    Between the two, requests may be added and aborted, and weights may be replaced.
    """

    def __init__(
        self, blocks: BlockManager, *, max_batch_size: int, prefill_tokens: int, counts: Counts | None = None
    ) -> None:
        self.blocks = blocks
        self.counts = Counts() if counts is None else counts
        self._max_batch_size = max_batch_size
        self._prefill_tokens = prefill_tokens
        self._prefixes = PrefixIndex(blocks)
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        """Sorted by order."""
        self._arrivals = 0
        self._plan: StepPlan | None = None
        """The plan of the step under way."""

    @property
    def max_batch_size(self) -> int:
        """The most sequences that run together."""
        return self._max_batch_size

    @property
    def running(self) -> int:
        """The number of sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of sequences that have not begun, or were preempted."""
        return len(self._waiting)

    def made(self) -> dict[int, int]:
        """The tokens so far of each response in the batch, by request. Callable from any thread."""
        return {sequence.request.request_id: len(sequence.log_probs) for sequence in list(self._running)}

    def pieces(self, told: Mapping[int, int]) -> list[Piece]:
        """The tokens of responses in the batch beyond those of `told`, by request."""
        new = []
        for sequence in self._running:
            request_id = sequence.request.request_id
            known = told.get(request_id)
            if known is not None and len(sequence.log_probs) > known:
                tokens = sequence.tokens[sequence.prompt_length + known :]
                log_probs = sequence.log_probs[known:]
                new.append(Piece(request_id=request_id, start=known, tokens=tokens, log_probs=log_probs))
        return new

    def blocks_needed(self, prompt_tokens: int, response_tokens: int) -> int:
        """The fewest blocks that serve such a request. Its last token needs none, since no other follows it."""
        return self.blocks.blocks_for(prompt_tokens + response_tokens - 1)

    def add(self, request: Request, stop: StopRule) -> None:
        """Queue a request, behind those of the same priority."""
        head = request.prompt_ids[: self.blocks.block_size]
        prefixes = hash(head.tobytes()), hash(request.prompt_ids.tobytes())
        self.give([Sequence(request, stop, prefixes)])

    def schedule(self) -> StepPlan:
        """Choose the next step's tokens and reserve their blocks. The plan has a chunk, unless there is no sequence."""
        assert self._plan is None, "the step before has been neither completed nor given up"
        self._make_room()
        plan = self._plan = StepPlan(StepInput(copies=[], chunks=[]), [])
        budget = self._prefill_tokens
        for sequence in self._running:
            budget -= _compute(plan, sequence, budget)
        self._start_waiting(plan, budget)
        return plan

    def complete(self, plan: StepPlan, output: StepOutput, version: WeightVersion) -> list[Sample]:
        """Take in the results of the step, made with weights of `version`. Return the samples that finished."""
        assert plan is self._plan, "the plan was given up, or completed before"
        self._plan = None
        drawn = zip(output.tokens, output.log_probs, strict=True)
        finished = []
        for sequence, chunk in zip(plan.sequences, plan.input.chunks, strict=True):
            result = None if chunk.draw is None else next(drawn)
            if sequence in plan.gone:
                continue
            self._note_computed(sequence, chunk.start + len(chunk.tokens))
            if result is not None:
                self.counts.generated_tokens += 1
                reason = sequence.append(*result, version)
                if reason is not None:
                    finished.append((sequence, reason))
        return self._finish(finished)

    def abort(self, request_ids: Collection[int]) -> list[Sample]:
        """Finish these requests with what they have; unknown ids are ignored. Return their samples."""
        ids = set(request_ids)
        leaving = [sequence for sequence in self._waiting if sequence.request.request_id in ids]
        self._waiting.remove(leaving)
        running = [(s, FinishReason.ABORT) for s in self._running if s.request.request_id in ids]
        return [sequence.finish(FinishReason.ABORT) for sequence in leaving] + self._finish(running)

    def new_weights(self, *, recompute: bool) -> None:
        """Let sequences that start from now on use nothing that older weights computed.

        Running sequences keep their cache. With `recompute` they go back to waiting, to have it computed again. It is
        the same with what came with those that wait.
        """
        if recompute:
            for sequence in reversed(self._running):
                self._requeue(sequence)
        for sequence in self._running:
            sequence.tip = None
        for sequence in self._waiting:
            sequence.age(recompute=recompute)
        self.blocks.forget()

    def restart(self) -> None:
        """Send all running sequences back to waiting: the caches are lost, and a step under way with them."""
        self.new_weights(recompute=True)
        self._plan = None

    def take_waiting(self, count: int) -> list[Sequence]:
        """Hand over up to `count` waiting sequences, see `WaitingQueue.take_groups`."""
        return self._waiting.take_groups(count, here={sequence.request.group_id for sequence in self._running})

    def give(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences, such as another scheduler's, behind those of the same priority."""
        for sequence in sequences:
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self._waiting.push(sequence)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences; a running one has blocks."""
        return [*self._running, *self._waiting]

    def resume(self, sequence: Sequence, blocks: list[int]) -> None:
        """Let a sequence of another scheduler run on here, behind those of the same priority.

        blocks: Blocks of this scheduler, held for the sequence, as many as its tokens need. The first of them have the
            keys and values of its `cached` tokens.
        """
        self._arrivals += 1
        sequence.arrival, sequence.blocks = self._arrivals, blocks
        self._prefixes.add_again(sequence)
        insort(self._running, sequence, key=_order)

    def _start_waiting(self, plan: StepPlan, budget: int) -> None:
        """Start waiting sequences in order, until one has no room. Pass over those whose prompt is being computed.

        A sequence that is passed over keeps its place in the batch from later ones.
        """
        places = min(self._max_batch_size - len(self._running), len(self._waiting))
        if places <= 0 or budget == 0 or self.blocks.free <= len(self._running):
            return
        computing = {prefix for sequence in self._running for prefix in self._prefixes.being_computed(sequence)}
        passed = []
        while places > 0 and budget > 0:
            places -= 1
            sequence = self._waiting.pop()
            if sequence.came is None and not computing.isdisjoint(sequence.prefixes):
                passed.append(sequence)
            elif self._start(plan, sequence):
                budget -= _compute(plan, sequence, budget)
                computing.update(self._prefixes.being_computed(sequence))
            else:
                passed.append(sequence)
                break
        for sequence in passed:
            self._waiting.push(sequence)
        self.blocks.release([source for source, _ in plan.input.copies])

    def _start(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Give the sequence blocks for all its tokens, cached ones where there are. Return False without room."""
        blocks, came = self.blocks, sequence.came
        sequence.open()
        found = blocks.match(sequence.tokens, limit=len(sequence.tokens) - 1)  # the last one gives the logits
        if came is not None and came.is_mixed:
            found = Match([], blocks.root, None, 0)
        blocks.share(found.blocks)
        needed = blocks.blocks_for(len(sequence.tokens)) - len(found.blocks)
        spare = blocks.free - needed - len(self._running)
        if spare < 0:
            blocks.release(found.blocks)
            return False
        sequence.tip, sequence.indexed = found.tip, len(found.blocks)
        sequence.cached = sequence.indexed * blocks.block_size
        sequence.came = None
        takes_over = came is not None and came.tokens > sequence.cached + found.tail
        source = found.source if spare > 0 and not takes_over else None
        if source is not None:
            blocks.share([source])  # until all blocks of this step are handed out
        sequence.blocks = found.blocks + blocks.allocate(needed)
        if source is not None:
            plan.input.copies.append((source, sequence.blocks[sequence.indexed]))
            sequence.cached += found.tail
        if came is not None and takes_over:
            self._take_over(plan, sequence, came)
        self.counts.shared_tokens += sequence.count_prompt(sequence.cached)
        insort(self._running, sequence, key=_order)
        return True

    def _take_over(self, plan: StepPlan, sequence: Sequence, came: SequenceCache) -> None:
        """Have the blocks that are not shared get the keys and values that came."""
        start, sequence.cached = sequence.cached, came.tokens
        if came.is_mixed:
            sequence.tip = None
        self._prefixes.add_computed(sequence, start)
        places = slice(start // self.blocks.block_size, self.blocks.blocks_for(came.tokens))
        plan.arrivals.append((sequence.blocks[places], came.data[:, :, places]))

    def _make_room(self) -> None:
        """Give each running sequence the block of its newest token. Where none is free, preempt the last one."""
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            if len(sequence.tokens) <= len(sequence.blocks) * self.blocks.block_size:
                index += 1
            elif self.blocks.free:
                sequence.blocks += self.blocks.allocate(1)
            else:
                self.counts.preemptions += 1
                self._requeue(self._running[-1])

    def _requeue(self, sequence: Sequence) -> None:
        """Move a sequence from running back to waiting."""
        self._running.remove(sequence)
        self._release(sequence)
        self._waiting.push(sequence)

    def _finish(self, sequences: list[tuple[Sequence, FinishReason]]) -> list[Sample]:
        """Release these running sequences. Return their samples."""
        if sequences:
            for sequence, _ in sequences:
                self._release(sequence)
            gone = {sequence for sequence, _ in sequences}
            self._running = [sequence for sequence in self._running if sequence not in gone]
        return [sequence.finish(reason) for sequence, reason in sequences]

    def _release(self, sequence: Sequence) -> None:
        """Take the sequence's blocks away. Their contents can be found until the blocks are needed."""
        self._prefixes.add_tail(sequence)
        self.blocks.release(sequence.blocks)
        sequence.drop_cache()
        if self._plan is not None:
            self._plan.gone.add(sequence)

    def _note_computed(self, sequence: Sequence, end: int) -> None:
        """Note that `end` tokens are cached, and let them be found."""
        start, sequence.cached = sequence.cached, end
        if start < sequence.prompt_length:
            self.counts.prefilled_tokens += sequence.count_prompt(end)
        self._prefixes.add_computed(sequence, start)


def _compute(plan: StepPlan, sequence: Sequence, budget: int) -> int:
    """Add the sequence's next chunk to the plan. Return its share of the prefill budget; decoding takes none."""
    start, missing = sequence.cached, len(sequence.tokens) - sequence.cached
    count = 1 if missing == 1 else min(missing, budget)
    if count == 0:
        return 0
    draw = sequence.draw() if count == missing else None
    plan.input.chunks.append(Chunk(start, sequence.tokens[start : start + count], list(sequence.blocks), draw))
    plan.sequences.append(sequence)
    return 0 if missing == 1 else count

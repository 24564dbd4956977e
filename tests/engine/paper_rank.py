"""A rank without a model. Each slot of its cache holds what a token's keys and values depend on."""

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from tailrace.config.engine import SamplingConfig
from tailrace.engine.scheduling.blocks import BlockManager
from tailrace.engine.scheduling.scheduler import Scheduler, StepPlan
from tailrace.engine.scheduling.sequence import Sequence
from tailrace.engine.scheduling.step import Draw, StepOutput
from tailrace.engine.scheduling.stopping import StopRule
from tailrace.types import CacheForm, Request, Sample, SequenceCache

VOCABULARY = 50


def contexts(tokens: list[int]) -> list[int]:
    """A number for each token that depends on it and on all tokens before it."""
    return list(accumulate(tokens, lambda context, token: hash((context, token)), initial=0))[1:]


def next_token(context: int, draw: Draw) -> int:
    """The token that follows a context, which the context, the request's seed and the position decide."""
    return hash((context, draw.seed, draw.position)) % VOCABULARY


def expected_response(request: Request, length: int) -> list[int]:
    """The first `length` tokens of the response to `request`."""
    tokens: list[int] = request.prompt_ids.tolist()
    context = contexts(tokens)[-1]
    for position in range(length):
        token = next_token(context, Draw(request.seed, position, 1.0, 0, 1.0, 0.0))
        tokens.append(token)
        context = hash((context, token))
    return tokens[len(request.prompt_ids) :]


@dataclass
class PaperRank:
    """A rank that executes steps and asserts that they read and write only what they may."""

    block_size: int
    weights: int = 0
    """The number of weight updates so far."""
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(block, offset) → the token's context, and the weights that computed it."""

    def execute(self, plan: StepPlan, blocks: BlockManager) -> StepOutput:
        """Compute one step."""
        self._take_over(plan, blocks)
        self._copy(plan.input.copies)
        written: set[tuple[int, int]] = set()
        tokens = []
        for sequence, chunk in zip(plan.sequences, plan.input.chunks, strict=True):
            known = contexts(sequence.tokens)
            end = chunk.start + len(chunk.tokens)
            assert chunk.tokens == sequence.tokens[chunk.start : end] != []
            places = [(chunk.blocks[p // self.block_size], p % self.block_size) for p in range(end)]
            for place, context in zip(places[: chunk.start], known, strict=False):
                assert self.slots[place][0] == context, "a slot holds another token than the chunk needs"
            for place, context in zip(places[chunk.start :], known[chunk.start :], strict=False):
                assert blocks.references(place[0]) == 1, "nobody writes to a shared block"
                assert place not in written
                written.add(place)
                self.slots[place] = context, self.weights
            if chunk.draw is not None:
                assert end == len(sequence.tokens)
                tokens.append(next_token(known[-1], chunk.draw))
        return StepOutput(tokens, [-float(token) for token in tokens])

    def cache_of(self, sequence: Sequence) -> SequenceCache:
        """What a sequence leaves with: for each slot of its blocks the context and the weights, as bytes."""
        size = self.block_size
        used = sequence.blocks[: -(-sequence.cached // size)]
        slots = [[self.slots.get((block, offset), (0, 0)) for offset in range(size)] for block in used]
        data = np.array(slots, np.int64).reshape(1, 1, len(used), size, 2).view(np.uint8)
        return SequenceCache(
            form=CacheForm(name="paper", token_bytes=16),
            tokens=sequence.cached,
            version=self.weights,
            is_mixed=sequence.tip is None,
            data=data,
        )

    def _take_over(self, plan: StepPlan, blocks: BlockManager) -> None:
        for targets, data in plan.arrivals:
            slots = np.ascontiguousarray(data).view(np.int64)
            for number, block in enumerate(targets):
                assert blocks.references(block) >= 1
                for offset, (context, weights) in enumerate(slots[0, 0, number].tolist()):
                    self.slots[block, offset] = context, weights

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not {source for source, _ in copies} & set(targets)
        for source, target in copies:
            for offset in range(self.block_size):
                self.slots.pop((target, offset), None)
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]


@dataclass
class PaperReplica:
    """A scheduler with a paper rank, driven step by step."""

    scheduler: Scheduler
    rank: PaperRank
    version: int = 0

    @classmethod
    def of(cls, blocks: int, *, block_size: int = 4, batch: int = 8, prefill_tokens: int = 64) -> "PaperReplica":
        scheduler = Scheduler(BlockManager(blocks, block_size), max_batch_size=batch, prefill_tokens=prefill_tokens)
        return cls(scheduler, PaperRank(block_size))

    def add(self, request: Request) -> Request:
        self.scheduler.add(request, StopRule(request.sampling, eos_ids=(), room=1000, detokenize=None))
        return request

    def step(self) -> list[Sample]:
        plan = self.scheduler.schedule()
        return self.scheduler.complete(plan, self.rank.execute(plan, self.scheduler.blocks), self.version)

    def started(self) -> list[int]:
        """Make one step, and return the ids of the requests in it."""
        plan = self.scheduler.schedule()
        self.scheduler.complete(plan, self.rank.execute(plan, self.scheduler.blocks), self.version)
        return [sequence.request.request_id for sequence in plan.sequences]

    def run(self) -> dict[int, Sample]:
        """Make steps until no request is left, and return the samples by request id."""
        samples: list[Sample] = []
        for _ in range(5000):
            if not (self.scheduler.running or self.scheduler.waiting):
                return {sample.request_id: sample for sample in samples}
            samples += self.step()
        raise AssertionError("the scheduler does not finish")


def request_of(
    request_id: int, prompt: list[int], tokens: int = 8, *, group_id: int | None = None, priority: float = 0.0
) -> Request:
    """A request for `tokens` tokens."""
    return Request(
        request_id=request_id,
        group_id=request_id if group_id is None else group_id,
        prompt_ids=np.array(prompt, np.int64),
        sampling=SamplingConfig(max_new_tokens=tokens),
        seed=1000 + request_id,
        priority=priority,
    )

"""Which tokens the next step of a replica computes, and who gives way when blocks run out.

Dataflow of a sequence:  waiting ──start──▶ running ──▶ finished
                            ▲                  │
                            └─────requeue──────┘   (its tokens are kept; its blocks are not, but may be found again)

A step holds the newest token of each sequence that decodes and, within the prefill budget, the next uncomputed tokens
of the others, first of those that run, then of waiting ones that start. Order is everywhere by priority, then arrival.
A sequence starts when there is a place, budget, and room for all its tokens and one more block for each that runs. What
the cache has of its first tokens it shares or copies; while another one computes them, it waits. When a running
sequence needs a block and none is free, the last one in the order goes back to waiting.
"""

from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter

from tailrace.engine.blocks import BlockManager
from tailrace.engine.sequence import Sequence
from tailrace.engine.step import Chunk, StepInput, StepOutput
from tailrace.engine.stopping import StopRule
from tailrace.types import FinishReason, Request, Sample, WeightVersion

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, and for whom."""

    input: StepInput
    sequences: list[Sequence]
    """Of each chunk."""
    gone: set[Sequence] = field(default_factory=set)
    """Those that lost their blocks since; what is computed for them counts for nothing."""


class Scheduler:
    """Owns the sequences of a replica and its blocks. Each `schedule` is followed by `complete` or `restart`.

    Between the two requests may be added and aborted, and weights be replaced.
    """

    def __init__(self, blocks: BlockManager, *, max_batch_size: int, prefill_tokens: int) -> None:
        self.blocks = blocks
        self.preemptions = 0
        self.prefilled_tokens = 0
        """Prompt tokens computed, for the first time."""
        self.shared_tokens = 0
        """Prompt tokens found in the cache instead."""
        self.generated_tokens = 0
        self._max_batch_size = max_batch_size
        self._prefill_tokens = prefill_tokens
        self._waiting: list[tuple[tuple[float, int], Sequence]] = []
        """A heap."""
        self._running: list[Sequence] = []
        """Sorted."""
        self._arrivals = 0
        self._plan: StepPlan | None = None
        """Under way."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def blocks_needed(self, prompt_tokens: int, response_tokens: int) -> int:
        """The least cache that serves such a request: all its tokens but the last, whose successor nobody draws."""
        return self.blocks.blocks_for(prompt_tokens + response_tokens - 1)

    def add(self, request: Request, stop: StopRule) -> None:
        """Queue a request, behind those of the same priority."""
        self._arrivals += 1
        self._wait(Sequence(request, stop, self._arrivals))

    def schedule(self) -> StepPlan:
        """Choose the next step's tokens and reserve their blocks. It holds a chunk, unless there is no sequence."""
        raise NotImplementedError

    def complete(self, plan: StepPlan, output: StepOutput, version: WeightVersion) -> list[Sample]:
        """Take in what the step computed, with weights of `version`; the samples that finished."""
        raise NotImplementedError

    def abort(self, request_ids: Collection[int]) -> list[Sample]:
        """Finish these requests with what they have; unknown ids are ignored."""
        raise NotImplementedError

    def new_weights(self, *, recompute: bool) -> None:
        """Share nothing that older weights computed with sequences that start from now on.

        Those that run keep their cache or, with `recompute`, go back to waiting to have it computed anew.
        """
        raise NotImplementedError

    def restart(self) -> None:
        """The caches are lost, and a step under way with them: all running sequences go back to waiting."""
        raise NotImplementedError

    def take_waiting(self, count: int) -> list[Sequence]:
        """Hand over up to `count` sequences that never ran, the last in the order; whole groups where possible."""
        raise NotImplementedError

    def give(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences that another scheduler handed over."""
        raise NotImplementedError

    def _wait(self, sequence: Sequence) -> None:
        heappush(self._waiting, (sequence.order, sequence))

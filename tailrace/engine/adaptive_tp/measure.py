"""Measurements of a TP profile: the times of decode steps, prefills and switches on the ranks of an engine.

After PAT, section 4.2 (Offline Profiler): the sequences have random tokens and one length. Where decoding is measured,
their prefix is not computed. A step takes as long whatever the cache holds, if only its memory has been written before:
pages that were never written all lie in the processor's caches.

Several engines of a machine slow each other down. Where there are some, each decodes and prefills what is measured, at
the same time and on the same cores, and the times of the first one count. All are driven by this process. Switches and
all-reduces are measured while the others rest.
"""

import statistics
import time
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
import torch

from tailrace.config.engine import SamplingConfig
from tailrace.engine.arrangement import Arrangement
from tailrace.engine.decoder.factory import longest_sequence
from tailrace.engine.kv_cache import DTYPES, token_bytes
from tailrace.engine.lane import Lane, first_done
from tailrace.engine.ranks.process import ProcessReplica
from tailrace.engine.ranks.wire import AllReduce
from tailrace.engine.scheduling.scheduler import Scheduler
from tailrace.engine.scheduling.sequence import Sequence
from tailrace.engine.scheduling.step import Chunk, StepInput
from tailrace.engine.scheduling.stopping import StopRule
from tailrace.errors import EngineError
from tailrace.models.architecture import Architecture
from tailrace.planning.tp_merge import sent_bytes
from tailrace.planning.tp_verdict import SwitchReport
from tailrace.types import Request

DROPPED = 2
"""The steps at the beginning of a window that do not count."""
_COPIED_AT_ONCE = 32
"""The blocks that one step copies. Meanwhile their contents exist twice."""


class MeasuredSwitch(NamedTuple):
    """A switch that was made, with its figures."""

    report: SwitchReport
    sent_bytes: float
    """Bytes of keys and values sent by the rank that had to send most, as PAT counts them (eq. 1)."""


def shortest_length(steps: int) -> int:
    """The length of the shortest sequence in whose middle a window of `steps` steps can lie, in tokens."""
    return 1 + DROPPED + steps // 2


def tokens_reached(length: int, steps: int) -> int:
    """The most tokens that a sequence can have at the end of a window of `steps` steps around `length`."""
    return length + steps + 1


class Bench:
    """Measures on an arrangement that has weights and no sequences. Not thread-safe."""

    def __init__(
        self, arrangement: Arrangement, architecture: Architecture, *, seed: int, beside: List[Arrangement] = ()
    ) -> None:
        """Prepare to measure.

        Args:
            architecture: The architecture of the whole model.
            seed: The seed of the random tokens.
            beside: Other engines, which are arranged alike and do what is measured at the same time.
        """
        a = architecture
        self._arrangement = arrangement
        self._all = (arrangement, *beside)
        self._vocab_size = a.vocab_size
        self._hidden_size = a.hidden_size
        self._kv_bytes_per_token = token_bytes(a, DTYPES[arrangement.config.dtype])
        self._longest = longest_sequence(arrangement.config, a)
        self._random = np.random.default_rng(seed)
        self._requests = 0

    @property
    def tp(self) -> int:
        """The current degree of the arrangement."""
        return self._arrangement.config.tp

    def write_cache(self, blocks: int) -> None:
        """Write keys and values of some tokens to each replica's first `blocks` blocks, which are taken first."""
        for lane in self._all_lanes():
            size = lane.scheduler.blocks.block_size
            chunk = Chunk(0, self._tokens(min(size, self._longest)), [0], None)
            lane.replica.start(StepInput([], [chunk]))
            lane.replica.finish()
            for first in range(1, blocks, _COPIED_AT_ONCE):
                copies = [(0, block) for block in range(first, min(first + _COPIED_AT_ONCE, blocks))]
                lane.replica.start(StepInput(copies, [chunk]))
                lane.replica.finish()

    def decode_s(self, replicas: int, batch_size: int, length: int, *, steps: int, others: int | None = None) -> float:
        """Return the median time of a decode step in seconds, as the engine measures it at run time.

        Args:
            replicas: The number of replicas of an engine that decode side by side.
            batch_size: The sequences of each replica.
            length: The cached tokens of each sequence in the middle of the window.
            steps: The steps of each replica that count.
            others: The sequences of each replica of an engine but the first, where they are to have another number.
                Only steps of the first count then.

        Raises:
            EngineError: a rank died, or the cache has no room for the sequences.
        """
        window = DROPPED + steps
        sizes: dict[Lane, int] = {}
        for arrangement in self._all:
            first, *rest = arrangement.lanes[:replicas]
            sizes |= {first: batch_size} | dict.fromkeys(rest, batch_size if others is None else others)
        lanes, counted = list(sizes), self._arrangement.lanes[: replicas if others is None else 1]
        most, cached = window + steps // 2, length - DROPPED - steps // 2
        for lane in lanes:
            self._resume(lane.scheduler, sizes[lane], cached)
        seconds: dict[Lane, list[float]] = {lane: [] for lane in lanes}
        while any(len(seconds[lane]) < window for lane in counted):
            for lane, own in seconds.items():
                if len(own) < most:  # keeps the other replicas company, while the cache has room
                    lane.begin(0)
            for lane in first_done(lanes, timeout_s=self._arrangement.config.step_timeout_s):
                lane.complete()
                self._check_undisturbed()
                assert lane.decoded is not None, "sequences that were cached decode"
                seconds[lane].append(lane.decoded.seconds)
                if lane not in counted and len(seconds[lane]) == most:  # a smaller batch makes more steps
                    seconds[lane].clear()
                    _abort_all(lane)
                    self._resume(lane.scheduler, sizes[lane], cached)
        self.clear()
        return statistics.median(second for lane in counted for second in seconds[lane][DROPPED:window])

    def prefill_s(self, batch_size: int, length: int) -> float:
        """Prefill `batch_size` prompts of `length` tokens on one replica of the engine.

        Returns:
            Seconds from the start of the first prompt until all have their first token.

        Raises:
            EngineError: a rank died, or the cache has no room for the prompts.
        """
        lanes = [arrangement.lanes[0] for arrangement in self._all]
        for lane in lanes:
            self._add_prompts(lane, batch_size, length)
        began = time.perf_counter()
        while lanes[0].has_work:
            for lane in lanes:
                if not lane.has_work:  # keeps the first one company
                    self._add_prompts(lane, batch_size, length)
                lane.begin(0)
            for lane in first_done(lanes, timeout_s=self._arrangement.config.step_timeout_s):
                lane.complete()
                self._check_undisturbed()
        seconds = time.perf_counter() - began
        self.clear()
        return seconds

    def all_reduce_bytes_per_s(self, batch_size: int, *, times: int) -> float:
        """Measure the all-reduce that a layer takes for a decode step of `batch_size` sequences, in bytes per second.

        The ranks of one replica take part.

        Raises:
            EngineError: a rank died.
        """
        replica = self._arrangement.lanes[0].replica
        assert isinstance(replica, ProcessReplica), "there are several ranks"
        count = batch_size * self._hidden_size
        replica.tell([AllReduce(count, times)] * self.tp, doing="measuring an all-reduce")
        seconds = [answer.seconds for answer in replica.answers()]
        return count * torch.float32.itemsize / max(second for second in seconds if second is not None)

    def hold(self, sequences: int, length: int) -> None:
        """Give each replica `sequences` · TP sequences with `length` cached tokens, which are to be moved."""
        for lane in self._arrangement.lanes:
            self._resume(lane.scheduler, sequences * self.tp, length)

    def step(self) -> float:
        """Let each replica decode once. Return the seconds until all have.

        Raises:
            EngineError: a rank died, or the cache has no room for the step.
        """
        began = time.perf_counter()
        for lane in self._arrangement.lanes:
            lane.begin(0)
        for lane in self._arrangement.lanes:
            lane.complete()
        self._check_undisturbed()
        return time.perf_counter() - began

    def clear(self) -> None:
        """Wait for steps under way, then abort all sequences."""
        for lane in self._all_lanes():
            lane.complete()
            _abort_all(lane)

    def switch(self, tp: int) -> MeasuredSwitch:
        """Change the degree, and move the cached tokens of all sequences. The other engines follow.

        Raises:
            EngineError: the switch is not possible, see `Arrangement.switch`.
        """
        source, held = self.tp, [lane.scheduler.sequences for lane in self._arrangement.lanes]
        report = self._arrangement.switch(tp, cache="move")
        for other in self._all[1:]:
            other.switch(tp, cache="move")
        moved = [[s.cached for s in sequences] for sequences in held]  # those without a place have none cached
        return MeasuredSwitch(report, sent_bytes(moved, source, self._kv_bytes_per_token))

    def _add_prompts(self, lane: Lane, count: int, length: int) -> None:
        lane.scheduler.blocks.forget()  # a prompt that begins like an earlier one would copy from it
        stop = self._stop_rule(1)
        for _ in range(count):
            lane.scheduler.add(self._request(length), stop)

    def _all_lanes(self) -> list[Lane]:
        return [lane for arrangement in self._all for lane in arrangement.lanes]

    def _resume(self, scheduler: Scheduler, count: int, cached: int) -> None:
        """Let `count` sequences run, as if `cached` tokens of each had been computed, and the next one not yet."""
        stop = self._stop_rule(self._longest)
        needed = scheduler.blocks.blocks_for(cached + 1)
        if count * needed > scheduler.blocks.free:
            raise EngineError(
                f"the cache has {scheduler.blocks.free} free blocks, and {count} sequences of {cached} tokens take "
                f"{count * needed}; raise kv_cache_gib"
            )
        for _ in range(count):
            sequence = Sequence(self._request(cached + 1), stop, (0, 0))
            sequence.open()
            sequence.cached = cached
            scheduler.resume(sequence, scheduler.blocks.allocate(needed))

    def _request(self, tokens: int) -> Request:
        self._requests += 1
        return Request(
            request_id=self._requests,
            group_id=self._requests,
            prompt_ids=np.array(self._tokens(tokens), np.int64),
            sampling=SamplingConfig(ignore_eos=True),
            seed=self._requests,
        )

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, self._vocab_size, count).tolist()
        return tokens

    def _stop_rule(self, tokens: int) -> StopRule:
        """Return a rule that ends a response after `tokens` tokens, whatever they are."""
        sampling = SamplingConfig(ignore_eos=True, max_new_tokens=tokens)
        return StopRule(sampling, eos_ids=(), room=tokens, detokenize=None)

    def _check_undisturbed(self) -> None:
        counts = [arrangement.counts for arrangement in self._all]
        if any(each.restarts for each in counts):
            raise EngineError("a rank died while it was measured; what it took is of no use, profile again")
        if any(each.preemptions for each in counts):
            raise EngineError("the cache has no room for what is measured; raise kv_cache_gib or lower token_budget")


def _abort_all(lane: Lane) -> None:
    lane.scheduler.abort({sequence.request.request_id for sequence in lane.scheduler.sequences})

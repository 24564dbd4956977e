"""The synchronous engine: add, abort, step, settle, load weights. The asynchronous driver drives it.

    requests ──dispatch──▶ scheduler ──chunks──▶ replica ──tokens──▶ scheduler ──▶ samples
                           └──────────────── one lane per replica ────────────┘

Waiting: a step starts every lane that is at rest and has work, then waits until the first of them is done. So lanes
never wait for each other, and with a single lane a step is schedule → compute → finish. Where the ranks of a lane die,
new ones compute its unfinished sequences again; their tokens so far are kept here. Other lanes wait only while ranks
are replaced: they end the steps that they have begun, and begin no other.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.adaptive_tp.adaptive import AdaptiveTP, Wanted, open_adaptive_tp
from tailrace.engine.arrangement import Arrangement
from tailrace.engine.base import EngineLoad, EngineStats
from tailrace.engine.decoder.factory import cache_form, cache_shape, longest_sequence
from tailrace.engine.driver import Core, check_prompt
from tailrace.engine.lane import Lane, first_done
from tailrace.engine.model.weights import Weights, check_weights, checkpoint_weights
from tailrace.engine.profile import Profiler
from tailrace.engine.ranks.factory import stage
from tailrace.engine.scheduling.stopping import StopRules
from tailrace.errors import EngineError, RequestError
from tailrace.host.frames import MOST_BYTES
from tailrace.models.architecture import read_architecture
from tailrace.planning.dispatch.costs import ObservedSteps
from tailrace.types import CacheForm, Piece, Request, Sample, SequenceCache, WeightVersion


class EngineCore(Core):
    """DP × TP ranks, and a scheduler for each replica. Not thread-safe; one call at a time."""

    continues = True
    cache_form: CacheForm

    def __init__(self, config: NativeEngineConfig, model_dir: Path, *, device: torch.device) -> None:
        """Start the ranks, with the weights in `model_dir` as version 0.

        Raises:
            ModelError: the directory holds no model that the engine runs.
            ConfigError: the model or the device does not take this DP, TP or way to exchange tensors.
            ConfigError: the cache cannot hold a block, or the device cannot hold the cache.
        """
        self.version: WeightVersion = 0
        self._config = config
        self._architecture = a = read_architecture(model_dir)
        self.max_model_len = longest_sequence(config, a)
        self.cache_form = cache_form(config, a, device=device)
        self._stop_rules = StopRules(model_dir, eos_ids=a.eos_ids, max_model_len=self.max_model_len)
        self.arrangement = Arrangement(config, a, device=device)
        self.adaptive_tp: AdaptiveTP | None = None
        """Rearranges the ranks. None where it was not asked for or there is no profile to decide by."""
        self._observed: defaultdict[int, ObservedSteps] = defaultdict(ObservedSteps)
        """The costs of steps by TP degree."""
        self._failure: EngineError | None = None
        """The failure of a lane, kept while samples that other lanes finished at the same time are handed out."""
        self.weights_are_whole = False
        try:
            self.adaptive_tp = open_adaptive_tp(self.arrangement, a, model=model_dir.name, device=device)
            degrees = () if self.adaptive_tp is None else self.adaptive_tp.degrees
            self._least_blocks = self.arrangement.least_blocks(degrees)
            self._load_initial_weights(model_dir)
        except BaseException:  # also when interrupted: no process may stay behind
            self.close()
            raise

    def _load_initial_weights(self, model_dir: Path) -> None:
        self._replace_weights(stage(checkpoint_weights(self._architecture, model_dir), self._config))

    def _replace_weights(self, named: Mapping[str, torch.Tensor]) -> None:
        self.weights_are_whole = False  # it stays so if a copy fails for lack of memory
        self.arrangement.load(named, recompute=self._config.cache_on_update == "recompute")
        self.weights_are_whole = True

    @property
    def lanes(self) -> list[Lane]:
        """The lanes, one for each current replica."""
        return self.arrangement.lanes

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return any(lane.has_work for lane in self.lanes) or self._in_stage

    @property
    def _in_stage(self) -> bool:
        """Whether there is a stage to close once nothing is unfinished."""
        return self.adaptive_tp is not None and self.adaptive_tp.in_stage

    @property
    def profiler(self) -> Profiler | None:
        """The profiler of steps; None while they are not profiled."""
        return self.lanes[0].profiler

    @profiler.setter
    def profiler(self, profiler: Profiler | None) -> None:
        for lane in self.lanes:
            lane.profiler = profiler

    def check(self, request: Request) -> None:
        """Check that the request can be served. This reads nothing that a step changes.

        Raises:
            RequestError: the request can never be served.
        """
        check_prompt(request, max_model_len=self.max_model_len, vocab_size=self._architecture.vocab_size)
        prompt = len(request.prompt_ids)
        response = min(request.sampling.max_new_tokens, self.max_model_len - prompt)
        needed = self.lanes[0].scheduler.blocks_needed(prompt, response)
        if needed > self._least_blocks:
            degrees = (
                "" if self.adaptive_tp is None else f" under one of TP {', '.join(map(str, self.adaptive_tp.degrees))}"
            )
            raise RequestError(
                f"request {request.request_id} needs up to {needed} blocks of {self._config.block_size} tokens, and "
                f"the cache has {self._least_blocks}{degrees}; raise kv_cache_gib or lower max_new_tokens"
            )
        self._stop_rules.check(request)

    def add(self, request: Request) -> None:
        """Queue a request that `check` accepted."""
        if self.adaptive_tp is not None and not self.has_work:
            self.adaptive_tp.begin()
        request = self._usable(request)
        self.arrangement.dispatcher.choose(request.group_id).add(request, self._stop_rules.rule(request))

    def _usable(self, request: Request) -> Request:
        """The request with the cache that it came with, as far as that can be used; see `SequenceCache`."""
        begun = request.begun
        if begun is None or (cache := begun.cache) is None:
            return request
        use = cache.use(self.cache_form, self.version, keeps=self._config.cache_on_update == "keep")
        if use is None or not self._is_whole(cache, len(request.prompt_ids) + len(begun.response_ids)):
            return request.without_cache()
        return replace(request, begun=replace(begun, cache=replace(cache, is_mixed=use == "own")))

    def _is_whole(self, cache: SequenceCache, tokens: int) -> bool:
        """Whether there are keys and values of all that it says, of less than these tokens and few enough to send."""
        shape = cache_shape(self._config, self._architecture, cache.tokens)
        return 0 < cache.tokens < tokens and cache.data.shape == shape and cache.data.nbytes <= MOST_BYTES

    def abort(self, request_ids: Iterable[int]) -> list[Sample]:
        """Finish these requests with what they have; unknown ids are ignored."""
        ids = set(request_ids)
        return [sample for lane in self.lanes for sample in lane.scheduler.abort(ids)]

    def withdraw(self, request_ids: Collection[int]) -> list[Sample]:
        """See `Core`.

        Raises:
            EngineError: ranks died repeatedly.
        """
        form, version = self.cache_form, self.version
        return [sample for lane in self.lanes for sample in lane.withdraw(request_ids, form, version)]

    def step(self) -> list[Sample]:
        """Let every lane compute until one has new tokens. Return the samples that finished.

        Raises:
            EngineError: logits are not finite, or ranks died repeatedly. Samples that other lanes finish at the
                same time are returned first; the next call raises then.
        """
        if self._failure is None:
            if self.adaptive_tp is not None and (wanted := self.adaptive_tp.wanted()) is not None:
                return self._rearrange(self.adaptive_tp, wanted)
            self._begin()
        return self._complete(first_done(self.lanes, timeout_s=self._config.step_timeout_s))

    def _rearrange(self, adaptive_tp: AdaptiveTP, wanted: Wanted) -> list[Sample]:
        """End the steps under way and carry out the decision, unless one failed. Return the samples that finished."""
        samples = self._complete(self.lanes)
        if self._failure is None and any(lane.has_work for lane in self.lanes):
            try:
                adaptive_tp.switch(wanted)
            except EngineError as error:
                self._failure = error
        elif self._failure is None:
            adaptive_tp.drop(wanted)
        return self._unless_failed(samples)

    def _begin(self) -> None:
        """Start all lanes that are at rest and have work."""
        if self._in_stage and not any(lane.has_work for lane in self.lanes):
            assert self.adaptive_tp is not None
            self.adaptive_tp.close_stage()
        self.arrangement.dispatcher.balance()
        for lane in self.lanes:
            lane.begin(self.version)

    def settle(self) -> list[Sample]:
        """Wait until no lane computes. Return the samples that finished.

        Raises:
            EngineError: as `step` does.
        """
        return self._complete(self.lanes)

    def _complete(self, lanes: Sequence[Lane]) -> list[Sample]:
        samples: list[Sample] = []
        running = {lane: lane.scheduler.running for lane in self.lanes if lane.busy}
        for lane in lanes:
            try:
                samples += lane.complete()
            except EngineError as error:
                self._failure = self._failure or error
        self._observe(lanes)
        if self.adaptive_tp is not None:
            self.adaptive_tp.observe(lanes, samples, running=running)
        return self._unless_failed(samples)

    def _observe(self, lanes: Iterable[Lane]) -> None:
        """Learn what the steps cost that these lanes have just completed."""
        observed = self._observed[self.arrangement.config.tp]
        for lane in lanes:
            if (step := lane.decoded) is not None:
                observed.decoded(step.sequences, step.context_tokens, step.seconds)
            elif (prefill := lane.prefilled) is not None:
                observed.prefilled(prefill.tokens, prefill.sequences, prefill.context_tokens, prefill.seconds)

    def _unless_failed(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples. Where there is none, raise the failure, if there is one."""
        if self._failure is not None and not samples:
            raise self._failure
        return samples

    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        """Install new weights. No step may be under way: call `settle` first.

        Raises:
            EngineError: a name is unknown or missing, a shape or dtype is wrong, shards do not cover a parameter,
                or there is no room to hand them over: the old weights stay. Or ranks died repeatedly or a device ran
                out of memory during the copy: there are no weights then, see `weights_are_whole`.
        """
        assert not any(lane.busy for lane in self.lanes), "weights change between two steps"
        self._replace_weights(stage(check_weights(self._architecture, tensors), self._config))
        self.version = version

    def stats(self) -> EngineStats:
        """Return the counts; a step may be under way in another thread."""
        schedulers, counts = [lane.scheduler for lane in self.lanes], self.arrangement.counts
        return EngineStats(
            running=sum(scheduler.running for scheduler in schedulers),
            waiting=sum(scheduler.waiting for scheduler in schedulers),
            generated_tokens=counts.generated_tokens,
            prefilled_tokens=counts.prefilled_tokens,
            shared_tokens=counts.shared_tokens,
            steps=counts.steps,
            preemptions=counts.preemptions,
            restarts=counts.restarts,
            switches=counts.switches,
            used_blocks=sum(scheduler.blocks.used for scheduler in schedulers),
            total_blocks=sum(scheduler.blocks.total for scheduler in schedulers),
            version=self.version,
        )

    def pieces(self, told: Mapping[int, int]) -> list[Piece]:
        """See `Core`."""
        return [piece for lane in self.lanes for piece in lane.scheduler.pieces(told)]

    def load(self) -> EngineLoad:
        """See `Engine`."""
        config, lanes = self._config, self.lanes  # of these alone, since a switch may be under way
        tp = config.ranks // len(lanes)
        cache_tokens = lanes[0].scheduler.blocks.total * config.block_size
        return EngineLoad(
            replicas=len(lanes),
            tp=tp,
            slots=config.max_batch_size,
            cache_tokens=cache_tokens,
            costs=self._observed[tp].costs,
            made={request_id: made for lane in lanes for request_id, made in lane.scheduler.made().items()},
            degrees=() if self.adaptive_tp is None else self.adaptive_tp.other_degrees(tp),
        )

    def take_seconds(self) -> Mapping[str, float]:
        """See `Engine`."""
        return self.arrangement.stopwatch.take()

    def memory(self) -> Mapping[str, int]:
        """See `Engine`."""
        return self.arrangement.memory()

    def interrupt(self) -> None:
        """End worker processes, and the wait for a step. Callable from any thread; only `close` may follow."""
        self.arrangement.interrupt()

    def close(self) -> None:
        """End the ranks. Closing twice is harmless."""
        self.arrangement.close()

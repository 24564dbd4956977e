"""The interface of the generation engine.

Waiting: `submit` returns at once. The engine works while it holds requests; its stream yields each sample when it
finishes, in any order. `pause_generation` and `update_weights` take effect between two engine steps.

All computation runs in the executor that the engine was made with, one call at a time. An engine and a trainer that
share a single-threaded executor take turns on its device (colocated). With separate executors they overlap (separated).
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.events import EventLog
from tailrace.planning.dispatch.base import Degree
from tailrace.planning.latency import StepTimes
from tailrace.types import CacheForm, Piece, Request, Sample, WeightVersion

if TYPE_CHECKING:
    from tailrace.engine.model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """The arguments of every engine, beside its own section of the recipe."""

    model_dir: Path
    """A Hugging Face directory, whose weights are version 0."""
    device: str
    """A torch device."""
    executor: Executor
    """Single-threaded; all of the engine's computation runs there. The caller shuts it down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The present state of an engine, and counts since it was made."""

    running: int = 0
    """Sequences that have started: they decode, or their prompt is being computed."""
    waiting: int = 0
    """Requests that have not started, and those that were preempted."""
    generated_tokens: int
    prefilled_tokens: int
    """Prompt tokens computed. Each sequence computes its last one; all others count once for a group."""
    shared_tokens: int = 0
    """Prompt tokens taken from the cache instead."""
    steps: int
    """Steps of all replicas together."""
    preemptions: int = 0
    """Times that a running sequence gave up its blocks to another and had to be computed again."""
    restarts: int = 0
    """Times that worker processes died and were replaced."""
    switches: int = 0
    """Times that the TP degree changed."""
    used_blocks: int = 0
    total_blocks: int = 0
    version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine has room for, what its steps cost, and how far its responses are."""

    replicas: int
    tp: int
    slots: int
    """The most sequences that a replica decodes together."""
    cache_tokens: int
    """Tokens that a replica's KV cache holds."""
    costs: StepTimes | None
    """The steps of a replica, beside the others; None until enough were measured."""
    made: Mapping[int, int]
    """Tokens so far of each response that runs, by request."""
    degrees: Sequence[Degree] = ()
    """Those that adaptive TP may change to, once their cost is known."""


class SampleStream(AsyncIterator[Sample]):
    """The samples of one `submit`, as they finish."""

    @abstractmethod
    async def aclose(self) -> None:
        """Abort what has not been yielded; `contextlib.aclosing` calls this. Closing twice is harmless."""


class Engine(ABC):
    """Generates responses with the weights that it was last given. Use it from one asyncio event loop."""

    continues: bool = False
    """Whether a request may have `begun`; otherwise `submit` refuses it. With the same weights and seed, the response
    is then the one that it would have been without an interruption."""
    cache_form: CacheForm | None = None
    """The form of the keys and values that it gives out and takes in; None where it does not."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """The most tokens of a sequence, prompt and response together."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> SampleStream:
        """Accept `requests`, all or none, and stream their samples as they finish.

        Closing the stream aborts what it has not yielded.

        Raises:
            RequestError: from the call, before any request is accepted: a prompt is no array of tokens of the
                vocabulary, is empty or leaves no room for one new token; its blocks can never fit the cache; it has
                stop strings and the model no tokenizer; or its id is in flight already. From the stream: the backend
                refused this one request after all; further samples come.
            EngineError: from the stream: the engine failed or was closed; no further sample will come.
        """

    @abstractmethod
    async def abort(self, request_ids: Iterable[int]) -> None:
        """Finish these requests now with what they have (`FinishReason.ABORT`). Unknown ids are ignored."""

    async def withdraw(self, request_ids: Iterable[int]) -> None:
        """As `abort`. An engine with a `cache_form` gives the keys and values along (`Sample.cache`)."""
        await self.abort(request_ids)

    @abstractmethod
    async def pause_generation(self) -> None:
        """Return once the step under way has ended; no step starts until `resume_generation`."""

    @abstractmethod
    async def resume_generation(self) -> None:
        """Continue every unfinished sequence where it stopped."""

    @abstractmethod
    async def update_weights(self, version: WeightVersion, tensors: "Weights") -> None:
        """Install new weights between two steps.

        `tensors` has HF parameter names with full tensors, or with shards that cover a parameter together, of any float
        dtype. Tokens made from then on carry `version`. Unfinished sequences go on; their cache is kept or computed
        again (`cache_on_update`). Sequences that start afterwards use no cached prefix of an older version.

        Raises:
            EngineError: a name is unknown or missing, or a shape or dtype is wrong; the old weights stay, as they
                do when `tensors` itself raises. An error while checked weights are copied leaves no weights: a device
                has run out of memory, or ranks cannot be restarted. The next step then fails the engine, unless
                another update succeeds before.
        """

    def log_to(self, log: EventLog) -> None:  # noqa: B027  (most engines decide nothing by themselves)
        """From now on, write an `adaptive_tp` event to this log for each decision that the engine makes by itself."""

    def follow(self, see: Callable[[Sequence[Piece]], None]) -> None:  # noqa: B027  (some make whole responses only)
        """From now on, call `see` after each step with the new tokens of requests that stream, in the event loop.

        The tokens of the last step of a response come with its sample alone.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the counts at once, without waiting for the step under way."""

    def load(self) -> EngineLoad | None:
        """Return the present load at once; None where the engine does not tell, so that nothing is predicted of it."""
        return None

    def take_seconds(self) -> Mapping[str, float]:
        """Return the seconds of generation since the last call, by `registers.phases.PARTS`, as far as measured.

        Callable from any thread. An engine that measures nothing returns nothing.
        """
        return {}

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that the engine holds on its device, by `registers.phases.PURPOSES`, as far as known.

        The figures of memory that comes and goes are the most since the last call. Callable from any thread.
        """
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine; open streams raise EngineError. Closing twice is harmless."""

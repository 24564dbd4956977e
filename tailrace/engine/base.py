"""The generation engine's interface.

Who waits on whom: `submit` returns at once; the engine works while it holds requests; its stream yields each sample
when it finishes, in whatever order. `pause_generation` and `update_weights` take effect between two engine steps.
All computation runs in the executor that the engine was made with, one call at a time: an engine and a trainer that
share a single-threaded executor share its device in turns (colocated), ones that do not, overlap (separated).
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.events import EventLog
from tailrace.types import Request, Sample, WeightVersion

if TYPE_CHECKING:
    from tailrace.engine.model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What every engine is made from, beside its own section of the recipe."""

    model_dir: Path
    """A Hugging Face directory, whose weights are version 0."""
    device: str
    """A torch device."""
    executor: Executor
    """Single-threaded; all of the engine's computation runs there. The caller shuts it down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine holds now and has done since it was made."""

    running: int = 0
    """Sequences that have started: they decode, or their prompt is being computed."""
    waiting: int = 0
    """Requests that have not started, and those that gave way."""
    generated_tokens: int
    prefilled_tokens: int
    """Prompt tokens computed. Each sequence computes its last one, all others count once for a group."""
    shared_tokens: int = 0
    """Prompt tokens taken from the cache instead."""
    steps: int
    """Of all replicas together."""
    preemptions: int = 0
    """Times that a running sequence gave up its blocks to another, to be computed again."""
    restarts: int = 0
    """Times that worker processes died and were replaced."""
    switches: int = 0
    """Times that the TP degree changed."""
    used_blocks: int = 0
    total_blocks: int = 0
    version: WeightVersion


class SampleStream(AsyncIterator[Sample]):
    """The samples of one `submit`, as they finish."""

    @abstractmethod
    async def aclose(self) -> None:
        """Abort what has not been yielded; `contextlib.aclosing` calls it. Closing twice is harmless."""


class Engine(ABC):
    """Generates responses with the weights that it was last given. Used from one asyncio event loop."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Prompt and response tokens of a sequence at most."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> SampleStream:
        """Accept `requests`, all or none, and stream their samples as they finish.

        Closing the stream aborts what it has not yielded.

        Raises:
            RequestError: here, before any is accepted: a prompt is no array of tokens of the vocabulary, is empty or
                leaves no room for one new token, its blocks can never fit the cache, it has stop strings and the model
                no tokenizer, or its id is in flight already. From the stream: the backend refused this one request
                after all; further samples come.
            EngineError: from the stream: the engine failed or was closed; no further sample will come.
        """

    @abstractmethod
    async def abort(self, request_ids: Iterable[int]) -> None:
        """Finish these requests now with what they have (`FinishReason.ABORT`). Unknown ids are ignored."""

    @abstractmethod
    async def pause_generation(self) -> None:
        """Return once the step under way has ended; no step starts until `resume_generation`."""

    @abstractmethod
    async def resume_generation(self) -> None:
        """Go on with every unfinished sequence where it stopped."""

    @abstractmethod
    async def update_weights(self, version: WeightVersion, tensors: "Weights") -> None:
        """Install new weights between two steps.

        `tensors` has HF parameter names with full tensors, or with shards that cover a parameter together, of any float
        dtype. Tokens made from then on carry `version`. Unfinished sequences go on, with their cache kept or computed
        anew (`cache_on_update`); no cached prefix of an older version is used for sequences that start afterwards.

        Raises:
            EngineError: a name is unknown or missing, or a shape or dtype is wrong; the old weights stay, as they do
                when `tensors` itself raises. An error while checked weights are copied, such as a device that has run
                out of memory or ranks that cannot be restarted, leaves none: the next step fails the engine, unless
                another update succeeds before.
        """

    def log_to(self, log: EventLog) -> None:  # noqa: B027  (most engines decide nothing by themselves)
        """Write what the engine decides by itself to this log from now on: an `adaptive_tp` event for each decision."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Counts, at once, without waiting for the step under way."""

    @abstractmethod
    async def close(self) -> None:
        """Stop, and let open streams raise EngineError. Closing twice is harmless."""

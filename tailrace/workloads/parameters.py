"""The parameters of a workload: distributions from which its samples are drawn.

prompt     a length for each group
response   of one turn (`single`), or several with tools between them (`turns`)
drift      how lengths change over steps
the rest   the reward and its time, and what a filter keeps
"""

from typing import Annotated

import msgspec
import numpy as np

from tailrace.workloads.marginals.base import MOST_LOG, Log, Positive, Share, Tagged
from tailrace.workloads.marginals.factory import AnyMarginal
from tailrace.workloads.marginals.shares import Shares
from tailrace.workloads.trace import Provenance

FORMAT = 1
"""The version of the schema, in every file."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Amount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An amount that differs from sample to sample, and from prompt to prompt."""

    distribution: AnyMarginal
    """Of all samples."""
    prompt_share: Share = 0.0
    """The share of the variance of its logarithm within a step that the prompt explains (`intraclass_correlation`)."""


class Single(Tagged, frozen=True, omit_defaults=True, tag="single"):
    """Responses of one turn."""

    tokens: Amount
    rank_correlation: Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)] = 0.0
    """Spearman's, of the lengths of prompts and responses."""
    capped_share: Share | None = None
    """The share of samples that end at `max_new_tokens`, in every step. `tokens` are the others then, all below it.
    None: `tokens` are all samples, and what is longer is cut."""


class Tool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a call of a tool takes and returns."""

    name: str | None = None
    returned_tokens: AnyMarginal
    seconds: AnyMarginal | None = None
    """Of calls that no cache has answered; None: unknown."""
    hit_share: Share | None = None
    """The share of calls that a cache has answered; None: unknown."""
    hit_seconds: AnyMarginal | None = None
    """Of those calls."""


class Turns(Tagged, frozen=True, omit_defaults=True, tag="turns"):
    """Conversations: every turn but the last calls a tool, and the next one reads what it has returned."""

    count: Amount
    """The number of turns."""
    calling: Annotated[list[Amount], msgspec.Meta(min_length=1)]
    """Tokens of the first turn, the second, …, where it calls a tool; later turns are as the last of these."""
    final: Annotated[list[Amount], msgspec.Meta(min_length=1)]
    """Tokens of the last turn of conversations with one turn, two turns, …; longer ones are as the last of these."""
    tool: Tool
    turn_correlation: Share = 0.0
    """The rank correlation of a sample's turns with each other, beyond what the prompt explains of them."""
    template_tokens: Tokens = 0
    """Tokens that the chat template adds between turns, beside what the tool has returned."""
    first_cached_share: Share | None = None
    """The share of the prompt that the engine's cache holds before the first turn; None: unknown."""
    later_cached_share: Share | None = None
    """The share of the context that it holds of the turns before; None: unknown."""

    def __post_init__(self) -> None:
        """Check the count, so that a file with a wrong one is refused."""
        if not isinstance(self.count.distribution, Shares):
            raise ValueError("`count` needs a distribution of the type shares")

    @property
    def most(self) -> int:
        """The greatest number of turns."""
        assert isinstance(self.count.distribution, Shares), "checked when made"
        return self.count.distribution.most


class Trend(Tagged, frozen=True, tag="trend"):
    """Lengths that grow or shrink by the same factor from each step to the next."""

    per_step: Log
    """The logarithm of the factor."""
    steps: Annotated[int, msgspec.Meta(ge=2)]
    """The steps for which that is known; later ones are as the last of them."""

    def factor(self, step: int) -> float:
        """Return by what the lengths of a step are multiplied."""
        return float(np.exp(np.clip(self.per_step * min(step, self.steps - 1), -MOST_LOG, MOST_LOG)))


class Regime(Tagged, frozen=True, tag="regime"):
    """Lengths that change once."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    """The first step after the change."""
    change: Positive
    """The factor of the change."""

    def factor(self, step: int) -> float:
        """Return by what the lengths of a step are multiplied."""
        return self.change if step >= self.step else 1.0


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Figures of the source that samples should reproduce; None: the source does not say."""

    mean: float
    deviation: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    most: float | None = None


class Parameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A workload."""

    tailrace_workload: int
    """The version of the schema."""
    name: str
    about: str
    """What it is, in one line."""
    rests_on: str
    """What the parameters were made from, and what was assumed."""
    provenance: Provenance
    task: str | None = None
    prompt_tokens: AnyMarginal
    """Of groups: all samples of a group have the same prompt."""
    response: Single | Turns
    drift: Trend | Regime | None = None
    """Of the tokens of single turns."""
    reward_s: AnyMarginal | None = None
    """Seconds from a response to its reward."""
    correct_share: Share | None = None
    """The share of samples with a positive reward."""
    kept_share: Share | None = None
    """The share of groups that the algorithm's filter keeps."""
    prompt_figures: Figures
    response_figures: Figures

    def __post_init__(self) -> None:
        """Check the limit, so that a file without one is refused where it is needed."""
        capped = isinstance(self.response, Single) and self.response.capped_share is not None
        if capped and self.provenance.max_new_tokens is None:
            raise ValueError("`response.capped_share` needs `provenance.max_new_tokens`")

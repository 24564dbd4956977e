"""Schemas of the generation service: which engine answers which prompt, and in what order."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tailrace.config.base import Config, Count, PathText, Seconds

Policy = Literal["pull", "round_robin", "least_loaded", "random", "streamrl", "skewness_aware"]
"""The ways to place prompts."""
Order = Literal["first_in", "longest_first", "shortest_first"]
Words = Annotated[int, Field(ge=1, le=4096)]


class DispatchConfig(Config):
    """How prompts are placed on engines."""

    policy: Policy = "pull"
    """pull: an engine takes the next prompts as it gets room. round_robin, least_loaded, random: each prompt is placed
    when it arrives. skewness_aware: the placement that is predicted to end first; streamrl: StreamRL's Algorithm 2 as
    published. The last two need `rollout.lengths`."""
    order: Order | None = None
    """The order in which prompts begin; by default longest_first with `rollout.lengths`, else first_in."""
    alpha: Annotated[float, Field(ge=0.001, le=0.999)] = 0.2
    """The share of samples that count as long; for the policy streamrl."""
    check_every: Count = 4
    """Training steps between two checks of what was expected against what came."""
    least_gain: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """The part of the generation time that placement must have saved over pull at a check. Below it, pull is used until
    a later check finds that placement would have saved so much."""
    limit_s: Seconds = 10.0
    """Seconds that the expectations of a training step's prompts may take. When they take longer, or fail, prompts are
    pulled until a check finds that placing them pays."""

    @property
    def plans(self) -> bool:
        """Whether the policy places prompts by expected lengths and by what steps cost."""
        return self.policy in ("streamrl", "skewness_aware")


class LearnedLengths(Config):
    """What the kinds of lengths that are learned have in common."""

    ranker: PathText | None = None
    """A file of `tailrace rank fit`, to begin with what it has learned; by default nothing is known."""


class DiscountedLengths(LearnedLengths):
    """Those in which older responses count less."""

    discount: Annotated[float, Field(ge=1e-3, le=1)] = 0.98
    """The weight that a response keeps with each newer weight version."""


class HistoryLengths(DiscountedLengths):
    """A prompt's responses in earlier epochs."""

    type: Literal["history"] = "history"


class SiblingsLengths(DiscountedLengths):
    """A prompt's other responses: one sample of each group begins before the others. Earlier epochs count, too."""

    type: Literal["siblings"] = "siblings"


class FeaturesLengths(DiscountedLengths):
    """The prompt's own length, task and words, by ridge regression."""

    type: Literal["features"] = "features"
    words: Words = 256
    """Places of the table into which words, and pairs of words, are hashed."""


class LambdarankLengths(LearnedLengths):
    """The prompt's own length, task and words, by boosted trees that learn to rank. Needs `tailrace[lightgbm]`."""

    type: Literal["lambdarank"] = "lambdarank"
    words: Words = 256
    """Places of the table into which words, and pairs of words, are hashed."""
    newest: Annotated[int, Field(ge=64, le=10_000)] = 4096
    """The newest responses, from which it learns."""


class ModelLengths(DiscountedLengths):
    """The hidden states of a language model that reads the prompt, beside the figures of `features`, by ridge
    regression."""

    type: Literal["model"] = "model"
    path: PathText | None = None
    """The model, as in `model.path`; by default the one that the run starts from. It computes on the CPU, in the
    process of the run: a small one is best."""
    layer: Count | None = None
    """The layer after which its hidden states are taken; by default the middle one."""


class OracleLengths(Config):
    """The lengths that the trace of `pipeline.replay` has: the bound of what any prediction can gain."""

    type: Literal["oracle"] = "oracle"


LengthsConfig = Annotated[
    HistoryLengths | SiblingsLengths | FeaturesLengths | LambdarankLengths | ModelLengths | OracleLengths,
    Field(discriminator="type"),
]
"""What the lengths of responses are expected from."""


class HttpConfig(Config):
    """An HTTP endpoint of the run's engines, with OpenAI's API."""

    host: str = "127.0.0.1"
    """The address to listen at; at any other than this machine's own, others get in who have the token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one; http.json in output_dir says which."""
    name: Annotated[str, Field(min_length=1, max_length=200)] = "policy"
    """The model's name for clients."""
    token: str | None = None
    """What clients send as API key; by default one is made, and is in http.json. Empty: none is needed."""
    most_prompts: Count = 256
    """Responses for clients that are generated at a time; further requests are refused (429)."""
    limit_s: Seconds = 600.0
    """Seconds of a request; then it is ended (504)."""

    @model_validator(mode="after")
    def _strangers_need_a_token(self) -> Self:
        if self.token == "" and self.host not in LOOPBACK:
            raise ValueError(f"lets other machines in at {self.host} without a token; leave token out, or give one")
        return self


LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that no other machine reaches."""


class RolloutConfig(Config):
    """The generation service."""

    dispatch: DispatchConfig = DispatchConfig()
    lengths: LengthsConfig | None = None
    """What the lengths of responses are expected from; by default nothing is expected."""

    http: HttpConfig | None = None
    """Answer OpenAI's HTTP API with the engines of the run, too; by default it does not."""

    @property
    def order(self) -> Order:
        """The order in which prompts begin."""
        return self.dispatch.order or ("first_in" if self.lengths is None else "longest_first")

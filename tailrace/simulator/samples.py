"""The samples of a simulated run, on their way from prompts to the trainer."""

from dataclasses import dataclass, field

from tailrace.planning.lengths.base import Expectation
from tailrace.planning.packing import Lengths
from tailrace.workloads.replay import Script


@dataclass(eq=False, slots=True, kw_only=True)
class Response:
    """One sample, on its way from its prompt to the trainer."""

    step: int
    group: int
    number: int
    prompt: int
    """The number of its prompt, which the samples of a group share: that of the group, until it is remade."""
    script: Script
    tokens: int
    """Of the whole response, with those of tools."""
    needed: int
    """The oldest weight version that may begin it."""
    expected: Expectation
    """Of its tokens."""
    limit: int
    """The most tokens that it may have, for all that is known."""
    priority: float = 0.0
    """The larger begins first, among those of a step."""
    arrival: int = 0
    """In the order in which the service was given them."""
    turn: int = 0
    context: int = 0
    """Tokens before its turn."""
    made: int = 0
    """Tokens of its turn that another engine has made."""
    cached: int = 0
    """Tokens whose keys and values its engine has kept between two turns, or that have come with it."""
    start: float = 0.0
    end: float = 0.0
    losses: int = 0
    """How often its engine has died."""
    first_version: int = -1
    """The version that made its first token; -1 before that."""
    last_version: int = 0


@dataclass(eq=False, slots=True)
class Group:
    """The samples of a prompt, which are trained on together."""

    number: int
    step: int
    responses: list[Response]
    tokens: int
    """Of all; the prompt counts once."""
    remade: int = 0
    """How often its place had other prompts before."""
    generating: int = field(init=False)
    """Responses that have not ended."""
    missing: int = field(init=False)
    """Responses that have not been graded."""
    needed: int = 1
    """What its advantages still need: all gradings, and the scores of each model."""

    def __post_init__(self) -> None:
        self.generating = self.missing = len(self.responses)

    @property
    def lengths(self) -> list[Lengths]:
        """The lengths of its samples."""
        return [Lengths(self.number, one.script.prompt_tokens, one.tokens) for one in self.responses]

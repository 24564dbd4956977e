"""A sequence: one response that is being generated."""

from dataclasses import dataclass, field, replace

from tailrace.engine.scheduling.blocks import Node
from tailrace.engine.scheduling.step import Draw
from tailrace.engine.scheduling.stopping import StopRule
from tailrace.types import FinishReason, Request, Sample, SequenceCache, WeightVersion


@dataclass(slots=True, eq=False)
class Sequence:
    """One response that is being generated. Its tokens survive whatever happens to its blocks."""

    request: Request
    stop: StopRule
    prefixes: tuple[int, int]
    """Hashes of the prompt's first block and of the whole prompt. Sequences that share one should compute it once."""
    arrival: int = 0
    """The scheduler's counter when the sequence was queued."""
    prompt_length: int = field(init=False)
    tokens: list[int] = field(default_factory=list)
    """Tokens of the prompt, then of the response; empty until `open`."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[WeightVersion] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Blocks of all tokens, in order, while the sequence runs."""
    cached: int = 0
    """The number of tokens, from the first, whose keys and values are in the blocks."""
    came: SequenceCache | None = field(init=False, default=None)
    """Keys and values that came with the request, until it starts; mixed ones are for this sequence alone."""
    tip: Node | None = None
    """The node of the last block that can be found, or the root; None where the cache is of older weights."""
    indexed: int = 0
    """The number of full blocks up to the tip."""
    counted: int = 0
    """Prompt tokens that statistics have seen, so that computing them again does not count again."""

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt_ids)
        if (begun := self.request.begun) is not None:
            self.tokens = self.request.prompt_ids.tolist() + begun.response_ids.tolist()
            self.log_probs, self.versions = begun.rollout_log_probs.tolist(), begun.weight_versions.tolist()
            self.came, self.request = begun.cache, self.request.without_cache()

    @property
    def order(self) -> tuple[float, int]:
        """The sort key. The lower starts first, and is preempted last."""
        return -self.request.priority, self.arrival

    def open(self) -> None:
        """Make the list of the prompt's tokens. This is done only when it is needed, since thousands may wait."""
        if not self.tokens:
            self.tokens = self.request.prompt_ids.tolist()

    def drop_cache(self) -> None:
        """Forget the blocks. All tokens are to be computed again."""
        self.blocks, self.cached, self.tip, self.indexed = [], 0, None, 0

    def age(self, *, recompute: bool) -> None:
        """Note that weights have changed. See `SequenceCache` for what came with the request."""
        if self.came is not None:
            self.came = None if recompute else replace(self.came, is_mixed=True)

    def count_prompt(self, cached: int) -> int:
        """Count the prompt's tokens that are cached for the first time, now that `cached` of all tokens are."""
        fresh = max(0, min(cached, self.prompt_length) - self.counted)
        self.counted += fresh
        return fresh

    def draw(self) -> Draw:
        """The settings by which the next token is drawn."""
        sampling = self.request.sampling
        return Draw(
            self.request.seed % 2**64,  # as many bits as the wire and the generator take
            len(self.log_probs),
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
        )

    def append(self, token: int, log_prob: float, version: WeightVersion) -> FinishReason | None:
        """Add a token. Return the reason if it ends the response."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        return self.stop.check(token, len(self.log_probs))

    def finish(self, reason: FinishReason) -> Sample:
        """Return the sample that the sequence has become."""
        return Sample.of(self.request, self.tokens[self.prompt_length :], self.log_probs, self.versions, reason)

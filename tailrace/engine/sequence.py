"""A prompt's shared cache, and one response in the making."""

from dataclasses import dataclass, field

import numpy as np
import torch

from tailrace.engine.stopping import StopRule
from tailrace.types import FinishReason, IntArray, Request, Sample, WeightVersion

PromptKey = tuple[int, bytes]
"""The group and the prompt's bytes."""


@dataclass(slots=True, eq=False)
class PromptCache:
    """The cache of one group's prompt.

    It holds one reference to each of its blocks, and each started sequence of the group another one to the full blocks.
    The partial last block is copied for each sequence that starts.
    """

    key: PromptKey
    prompt_ids: IntArray
    block_size: int
    blocks: list[int] = field(default_factory=list)
    """Of the whole prompt, the partial last one included; empty before prefill and after eviction."""
    computed: int = 0
    """Tokens of the prompt whose keys and values are in the cache."""
    logits_V: torch.Tensor | None = None
    """After the last token: what the first token of each sequence is sampled from."""
    waiting: int = 0
    """Sequences that have not started, or were preempted."""
    running: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt_ids)

    @property
    def full_blocks(self) -> int:
        """Blocks that the prompt fills, which its sequences share."""
        return self.length // self.block_size

    @property
    def has_tail(self) -> bool:
        return self.length % self.block_size > 0

    @property
    def size(self) -> int:
        """Blocks of the prompt, the partial last one included."""
        return self.full_blocks + self.has_tail

    @property
    def ready(self) -> bool:
        """Whether sequences can start."""
        return self.logits_V is not None


@dataclass(slots=True, eq=False)
class Sequence:
    """One response. Its tokens so far survive preemption; its blocks do not."""

    request: Request
    stop: StopRule
    arrival: int
    prompt: PromptCache
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[WeightVersion] = field(default_factory=list)
    prompt_blocks: list[int] = field(default_factory=list)
    """The full blocks of the prompt."""
    blocks: list[int] = field(default_factory=list)
    """Its own: the rest of the prompt and the response."""
    cached: int = 0
    """Tokens, prompt included, whose keys and values are in the cache."""

    @property
    def length(self) -> int:
        """Prompt and response tokens."""
        return self.prompt.length + len(self.tokens)

    @property
    def missing(self) -> int:
        """Tokens to prefill again before it can decode; the newest token is fed by decoding itself."""
        return max(0, self.length - 1 - self.cached)

    def blocks_for(self, tokens: int) -> int:
        """Own blocks that a cache of its first `tokens` tokens takes, prompt included."""
        return -(-tokens // self.prompt.block_size) - self.prompt.full_blocks

    def append(self, token: int, log_prob: float, version: WeightVersion) -> FinishReason | None:
        """Add a sampled token; the reason if it ends the response."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        return self.stop.check(token, len(self.tokens))

    def finish(self, reason: FinishReason) -> Sample:
        """The sample that it has become."""
        return Sample(
            request_id=self.request.request_id,
            group_id=self.request.group_id,
            response_ids=np.array(self.tokens, np.int64),
            rollout_log_probs=np.array(self.log_probs, np.float32),
            weight_versions=np.array(self.versions, np.int64),
            finish_reason=reason,
        )

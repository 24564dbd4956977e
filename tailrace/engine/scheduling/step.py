"""The driver's message to the ranks of a replica in each step, and their answer: plain numbers, ready to be sent.

A step is a list of chunks. A chunk is consecutive tokens of one sequence whose keys and values are not in the cache
yet: part of a prompt (prefill), or the newest token alone (decode). Nothing else tells the two apart.
"""

import msgspec


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """The settings by which the token after a chunk is drawn."""

    seed: int
    """The request's seed, 0 … 2**64 - 1."""
    position: int
    """The number of response tokens so far."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one sequence to compute."""

    start: int
    """The position of the first token; everything before it is in the cache."""
    tokens: list[int]
    """At least one token."""
    blocks: list[int]
    """Blocks of at least the positions 0 … start + len(tokens) - 1, in order."""
    draw: Draw | None
    """None where further tokens of the sequence are to be computed before the next one can be drawn."""


class StepInput(msgspec.Struct, frozen=True, array_like=True):
    """The input of one step of one replica; every TP rank gets the same."""

    copies: list[tuple[int, int]]
    """(source, target) blocks to copy first. No target is a source of the same step."""
    chunks: list[Chunk]
    """At most one chunk of each sequence."""


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """The tokens drawn in a step, in the order of the chunks that have a draw."""

    tokens: list[int]
    log_probs: list[float]
    seconds: dict[str, float] = {}
    """Seconds of shard 0 by part of the step, see `engine.profile.PARTS`."""

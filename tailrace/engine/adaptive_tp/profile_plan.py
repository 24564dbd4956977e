"""The plan of the TP profiler: batches, lengths and degrees to measure, as far as the engine has room for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.config.engine import NativeEngineConfig
from tailrace.config.generate import TPProfileConfig
from tailrace.engine.adaptive_tp.measure import shortest_length, tokens_reached
from tailrace.engine.decoder.factory import local_sizes, longest_sequence
from tailrace.errors import ConfigError, EngineError, ModelError
from tailrace.models.architecture import Architecture
from tailrace.planning.tp_profile import SHORTEST, grid, prefill_grid

TOKEN_BUDGET = 16384
MAX_LENGTH = 2048
"""Defaults of `token_budget` and `max_length`; see `TPProfileConfig`."""
PREFILL_LENGTH = 4096
"""The longest prompt that is measured, where the context and the cache have room for it."""
UNEVEN_SIZES = 5
"""The batch sizes that are measured beside others."""
HELD_TOKENS = 2048
"""The cached tokens of each rank while switches are measured, in sequences of `HELD_LENGTH`."""
HELD_LENGTH = 512

Points = tuple[tuple[int, int], ...]
"""Pairs (B, L)."""


class Turn(NamedTuple):
    """What is measured under each degree before the next turn."""

    decode: Points = ()
    prefill: Points = ()
    uneven: Points = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The measurements to make."""

    degrees: tuple[int, ...]
    ranks: int
    decode: Points
    """(B, L): sequences of a replica, and cached tokens of each."""
    prefill: Points
    """(B, L): prompts, and tokens of each."""
    uneven: Points
    """(B, B of the others), where replicas have another batch than those beside them."""
    uneven_length: int
    """The cached tokens of each sequence there."""
    largest: int
    """The largest batch size."""
    length: int
    """The cached tokens of each sequence while batch sizes are searched for, a short context."""
    token_budget: int
    blocks: int
    """The most blocks of a replica's cache that one of these measurements takes."""
    held: tuple[int, int]
    """Sequences of each rank, and cached tokens of each, that move with a switch."""
    steps: int
    rounds: int

    @property
    def turns(self) -> list[Turn]:
        """The points to measure before the degree changes: of one batch size, or all that do not just decode."""
        sizes = sorted({size for size, _ in self.decode})
        return [
            *(Turn(decode=tuple(p for p in self.decode if p[0] == size)) for size in sizes),
            Turn(prefill=self.prefill, uneven=self.uneven),
        ]

    def walk(self, tp: int) -> Sequence[int]:
        """All degrees, from the present one to the other end."""
        return self.degrees if tp == self.degrees[0] else self.degrees[::-1]

    def replicas(self, tp: int) -> list[int]:
        """The numbers of replicas that are measured side by side: one, and all of them."""
        return sorted({1, self.ranks // tp})

    @property
    def measurements(self) -> int:
        """The number of measurements in all rounds."""
        windows = sum(len(self.replicas(tp)) for tp in self.degrees) * len(self.decode)
        switches = len(self.degrees) * (len(self.degrees) - 1)
        uneven = sum(self.ranks > tp for tp in self.degrees) * len(self.uneven)
        return self.rounds * (windows + len(self.degrees) * len(self.prefill) + uneven + switches)


def make_plan(config: TPProfileConfig, architecture: Architecture, *, sizes: Sequence[int] | None = None) -> Plan:
    """Plan what to measure of a model.

    Args:
        sizes: the batch sizes, once they have been found; see `planning.bends`.

    Raises:
        ModelError: the model cannot be split into these degrees.
        ConfigError: the cache or the context has no room for what was asked for.
    """
    engine, steps = config.engine, config.steps
    blocks = {tp: _blocks(engine, architecture, tp) for tp in _degrees(config, architecture)}
    fewest, shortest = min(blocks.values()), shortest_length(steps)
    context = longest_sequence(engine, architecture)
    room = context - tokens_reached(0, steps)
    if room < shortest:
        raise ConfigError(f"steps is {steps}, and the context has no room for so many; lower it")
    if fewest < _blocks_for(max(SHORTEST, shortest), steps, engine):
        raise ConfigError(f"{_cache(engine, fewest)}, which is less than anything to be measured takes; raise it")
    cached, batch = fewest * engine.block_size, engine.max_batch_size
    token_budget = _chosen("token_budget", config.token_budget, TOKEN_BUDGET, cached, "engine.kv_cache_gib")
    max_batch_size = _chosen("max_batch_size", config.max_batch_size, batch, batch, "engine.max_batch_size")
    max_length = _chosen(
        "max_length", config.max_length, MAX_LENGTH, room, "engine.max_model_len where the model allows"
    )
    wanted = grid(token_budget, max_batch_size, max_length, points=config.points, sizes=sizes)
    takes = {
        (size, length): size * _blocks_for(length, steps, engine)
        for size, length in sorted({(size, max(length, shortest)) for size, length in wanted})
    }
    decode = tuple(p for p, taken in takes.items() if taken <= fewest and p[0] * p[1] <= token_budget)
    if not decode:
        raise ConfigError(
            f"token_budget {token_budget} leaves nothing to measure in {steps} steps; raise it or lower steps"
        )
    length = max(shortest, min(SHORTEST, max_length))
    largest = min(max_batch_size, token_budget // length, fewest // _blocks_for(length, steps, engine))
    return Plan(
        degrees=tuple(blocks),
        ranks=engine.ranks,
        decode=decode,
        prefill=_prefill(fewest, max_batch_size, context, engine),
        uneven=_uneven(sorted({size for size, _ in decode})),
        uneven_length=max(shortest, min(HELD_LENGTH, decode[-1][1])),
        largest=largest,
        length=length,
        token_budget=token_budget,
        blocks=max(*(takes[point] for point in decode), largest * _blocks_for(length, steps, engine)),
        held=_held(engine, blocks, max_length, context),
        steps=steps,
        rounds=config.rounds,
    )


def _prefill(blocks: int, max_batch_size: int, context: int, engine: NativeEngineConfig) -> Points:
    """The prefills for which a cache of so many blocks has room, with the token that each prompt gets."""
    longest = min(PREFILL_LENGTH, context, blocks * engine.block_size) - 1
    points = prefill_grid(max_batch_size, longest)
    return tuple(p for p in points if p[0] * -(-(p[1] + 1) // engine.block_size) + p[0] <= blocks or p[0] == 1)


def _uneven(sizes: Sequence[int]) -> Points:
    """Some of these batch sizes, beside the smallest and beside the largest."""
    chosen = sorted({sizes[index * (len(sizes) - 1) // (UNEVEN_SIZES - 1)] for index in range(UNEVEN_SIZES)})
    return tuple((size, others) for size in chosen for others in (sizes[0], sizes[-1]) if size != others)


def _degrees(config: TPProfileConfig, architecture: Architecture) -> list[int]:
    """The degrees that were asked for, or else all that the model can be split into."""
    most = architecture.query_heads
    degrees = [tp for tp in config.all_degrees if config.asked_degrees is not None or tp <= most]
    if len(degrees) < 2:
        raise ConfigError(
            f"the model has {most} query heads, so {config.engine.ranks} ranks cannot be arranged in several ways; "
            "choose another engine.dp"
        )
    return degrees


def _blocks(engine: NativeEngineConfig, architecture: Architecture, tp: int) -> int:
    """The blocks of a replica's cache under degree `tp`."""
    try:
        return local_sizes(engine, architecture, tp)[1]
    except ModelError:
        heads = architecture.query_heads
        raise ModelError(
            f"degrees has {tp}, which leaves ranks without a query head, the model has {heads}; remove it"
        ) from None
    except EngineError as error:
        raise ConfigError(f"engine.{error}") from None


def _blocks_for(length: int, steps: int, engine: NativeEngineConfig) -> int:
    """The blocks that a sequence takes in a window around `length`."""
    return -(-tokens_reached(length, steps) // engine.block_size)


def _cache(engine: NativeEngineConfig, blocks: int) -> str:
    """The beginning of an error about the size of the cache."""
    return f"engine.kv_cache_gib {engine.kv_cache_gib} holds {blocks} blocks of {engine.block_size} tokens"


def _chosen(name: str, given: int | None, default: int, most: int, limit: str) -> int:
    if given is None:
        return min(default, most)
    if given > most:
        raise ConfigError(f"{name} is {given}, and the engine has room for {most}; lower it, or raise {limit}")
    return given


def _held(engine: NativeEngineConfig, blocks: dict[int, int], longest: int, context: int) -> tuple[int, int]:
    """Choose the sequences of each rank that move, and the cached tokens of each.

    All ranks have as many. They fit under every degree, with a block to spare for each sequence.
    """
    room = min(count // tp for tp, count in blocks.items())
    grown = 2 + 2 * len(blocks) * (len(blocks) - 1)  # they decode at first, and twice after each switch
    if context <= grown:
        raise ConfigError(
            f"degrees has {len(blocks)}, and sequences that move between them grow by {grown} tokens, for which the "
            f"context of {context} has no room; name fewer, or raise engine.max_model_len where the model allows"
        )
    length = min(HELD_LENGTH, longest, context - grown, (room - 1) * engine.block_size - grown)
    if length < 1:
        raise ConfigError(f"{_cache(engine, room)} for each rank, which leaves none that could be moved; raise it")
    needed = 1 - (-(length + grown) // engine.block_size)
    return max(1, min(HELD_TOKENS // length, room // needed, engine.max_batch_size // max(blocks))), length

"""The file of an offline profile for adaptive TP: times of steps and switches, for one model, machine and backend.

    sampling points ──measured by the profiler──▶ TPProfile ──file──▶ LatencyPredictor, SwitchController

Source: PAT, section 4.2 (Offline Profiler). There are few points, only where batch and context fit the cache, and they
are denser for short contexts.
"""

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tailrace.errors import UNREADABLE, ConfigError, one_line

FORMAT = 2
"""Format of the file; raised when older readers would misread a newer one."""
SHORTEST = 16
"""Tokens of the shortest sampled context."""
SHORT = 512
"""Half of the lengths are at or below this, where latency is least linear (PAT, section 4.2)."""
BATCH = 1024
"""Tokens of a batch of short prompts."""
LENGTHS = 3
"""The least number of lengths of each batch size; fewer would not show a bend."""


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The conditions of a profile. A change of any of them needs another profile."""

    model: str
    """The model, for people to read. Only its figures in `architecture` are compared."""
    architecture: dict[str, int]
    """Layers, hidden size, heads, KV heads, head_dim, intermediate size, vocabulary, by name."""
    dtype: str
    ranks: int
    """N, the ranks of the whole engine."""
    threads_per_rank: int
    hardware: str
    """The name of the CPU or GPU."""
    cores: int
    """CPU cores of the machine."""
    backend: str
    """The decoder's name."""
    collectives: str
    link: str = ""
    """The emulated link in words; empty without one."""
    engines: int = 1
    """Engines of this kind that are at work on the machine at the same time."""

    def mismatch(self, other: "ProfileKey") -> list[str]:
        """The differences of `other`, which is wanted, from this, which was profiled: a phrase for each figure."""
        wanted, profiled = other._figures(), self._figures()
        return [
            f"{name} is {wanted.get(name)!r} (profiled: {profiled.get(name)!r})"
            for name in sorted(wanted.keys() | profiled.keys())
            if wanted.get(name) != profiled.get(name)
        ]

    def _figures(self) -> dict[str, object]:
        plain = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("model", "architecture")}
        return plain | self.architecture


class DecodePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a decode step."""

    tp: int
    replicas: int
    """Number of replicas that decode such a batch at the same time: 1 … N / tp. They share the memory's bandwidth."""
    batch_size: int
    """B, sequences of one replica."""
    context_tokens: int
    """T, cached tokens of those sequences together."""
    seconds: float
    """Seconds of the median step."""


class UnevenPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a decode step while all replicas are at work, and the others have another batch."""

    tp: int
    batch_size: int
    others: int
    """B of each other replica."""
    seconds: float
    """Seconds of the median step."""
    even_s: float
    """The same where all have `batch_size`, measured next to it."""


class PrefillPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time to prefill a batch of equal prompts on one replica, in as many steps as the engine takes for it."""

    tp: int
    batch_size: int
    length: int
    """Tokens of each prompt."""
    seconds: float


class SwitchCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of changing the degree, one way."""

    source_tp: int
    target_tp: int
    reshard_s: float
    """Seconds to reshard the weights."""
    rest_s: float
    """Seconds of all other work that does not depend on the sequences."""
    kv_bytes_per_s: float
    """One-way rate of a rank while keys and values migrate. A rank is counted as sending 1 / source_tp of its replica's
    bytes, so padded and replicated heads show as a lower rate.
    """


class TPProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole profile.

    Raises:
        ConfigError: (and from `read` and `write`) figures are impossible or inconsistent.
    """

    format: int = FORMAT
    key: ProfileKey
    created: str
    """Time of the measurement, in ISO 8601."""
    tailrace: str
    """Version of Tailrace that measured."""
    token_budget: int
    """The most cached tokens of a replica in any point: B · L ≤ token_budget."""
    decode: tuple[DecodePoint, ...]
    prefill: tuple[PrefillPoint, ...]
    uneven: tuple[UnevenPoint, ...] = ()
    """For each degree that has any, the same sizes beside the smallest and beside the largest batch."""
    switches: tuple[SwitchCost, ...] = ()
    """One cost for each ordered pair of degrees."""
    group_s: dict[int, float] = {}
    """Seconds to make the communication groups of a degree."""
    capture_s: dict[int, float] = {}
    """Seconds that the first decode step after a switch takes longer than the next, by the new degree. The reason is
    the capture of CUDA graphs, if any. 0 where left out.
    """
    collective_bytes_per_s: dict[int, float] = {}
    """Rate of the all-reduce in the largest decode step, among the ranks of a degree. For people to read: steps are
    measured as a whole.
    """

    def __post_init__(self) -> None:
        _check_points(self)
        _check_switches(self)

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP degrees that were profiled, ascending."""
        return tuple(sorted({point.tp for point in self.decode}))

    @classmethod
    def read(cls, path: Path) -> "TPProfile":
        """Read the profile from a file.

        Raises:
            ConfigError: the file is missing, cannot be read, is no profile, or has another format.
        """
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ConfigError(f"TP profile {path} does not exist; profile the model first, or name another") from None
        except OSError as error:
            raise ConfigError(f"TP profile {path} cannot be read: {error.strerror}; it has to be a file") from None
        try:
            found = msgspec.json.decode(content, type=_Header).format
            if found != FORMAT:
                raise ConfigError(
                    f"TP profile {path} has format {found}, this version reads {FORMAT}; profile the model again"
                )
            return msgspec.json.decode(content, type=cls)
        except UNREADABLE as error:
            raise ConfigError(f"TP profile {path} is not valid: {one_line(error)}; profile the model again") from None

    def write(self, path: Path) -> None:
        """Write the profile to a file, wholly or not at all. An existing file is replaced.

        Raises:
            ConfigError: the operating system refused.
        """
        content = msgspec.json.format(msgspec.json.encode(self)) + b"\n"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_bytes(content)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"TP profile {path} cannot be written: {error.strerror}; make room, or see who may write there"
            ) from None


def grid(
    token_budget: int,
    max_batch_size: int,
    max_length: int,
    *,
    points: int = 40,
    sizes: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """The sampling points (B, L): batch size and context length of each sequence.

    By default batch sizes are powers of two and the largest one. If these are too many for `points`, only some evenly
    spread ones are taken, at least the smallest and the largest. Each has a few lengths within the budget, half of them
    up to `SHORT`. The last length is the longest possible, so that nothing inside the budget has to be extrapolated.

    Args:
        token_budget: the most cached tokens of a replica; every B · L is within it.
        max_batch_size: the most sequences that a replica decodes together.
        max_length: the most tokens of a sequence.
        points: the most points.
        sizes: batch sizes to take instead, no more than `most_sizes(points)`, each within the budget.

    Raises:
        ConfigError: no point would be within these bounds, or `points` are too few.
    """
    shortest = min(SHORTEST, max_length)
    if points < LENGTHS:
        raise ConfigError(f"points is {points}; a profile needs {LENGTHS} or more")
    if min(shortest, max_batch_size) < 1 or token_budget < shortest:
        raise ConfigError(
            f"token_budget {token_budget}, max_batch_size {max_batch_size} and max_length {max_length} have no "
            f"room for a sequence of {SHORTEST} tokens; raise them"
        )
    if sizes is None:
        sizes = _batch_sizes(min(max_batch_size, token_budget // shortest), most_sizes(points))
    return [
        (size, length)
        for size in sizes
        for length in _lengths(shortest, min(max_length, token_budget // size), points // len(sizes))
    ]


def prefill_grid(max_batch_size: int, max_length: int) -> list[tuple[int, int]]:
    """The sampling points (B, L) of prefills: a prompt of each length, doubling up to the longest, and two batches.

    Longer prompts are computed one after the other, or in parts, so that batches of them tell nothing more.
    """
    doubled = (SHORTEST << exponent for exponent in range(max_length.bit_length()))
    lengths = [*(length for length in doubled if length < max_length), max_length]
    batches = ((BATCH // length, length) for length in (SHORTEST, 4 * SHORTEST))
    return [(1, n) for n in lengths] + [(size, n) for size, n in batches if size <= max_batch_size and n <= max_length]


def most_sizes(points: int) -> int:
    """The most batch sizes that a grid of so many points has."""
    return max(2, points // LENGTHS)


def _batch_sizes(largest: int, count: int) -> list[int]:
    powers = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent < largest]
    return _spread([*powers, largest], count)


def _lengths(shortest: int, longest: int, count: int) -> list[int]:
    """Lengths that are geometric up to `SHORT`, then up to `longest`; no more than one for each doubling."""
    count = min(count, 1 + math.ceil(math.log2(longest / shortest)))
    bend = min(SHORT, longest)
    short = -(-count // 2) if longest > SHORT else count
    return sorted({*_geometric(shortest, bend, short), *_geometric(bend, longest, count - short + 1)[1:]})


def _geometric(first: int, last: int, count: int) -> list[int]:
    """`count` numbers from `first` to `last`; `last` alone where `count` is 1."""
    if count == 1:
        return [last]
    return [round(first * (last / first) ** (index / (count - 1))) for index in range(count)]


def _spread(values: Sequence[int], count: int) -> list[int]:
    """Choose at most `count` of the values, evenly spread: the last, and where there are two, also the first."""
    if len(values) <= count:
        return list(values)
    if count == 1:
        return [values[-1]]
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


class _Header(msgspec.Struct):
    """The part of a profile that is read first, in any format."""

    format: int


def _check_points(profile: TPProfile) -> None:
    ranks, degrees = profile.key.ranks, profile.degrees
    if ranks < 1 or not degrees:
        raise ConfigError(f"{len(profile.decode)} decode points of {ranks} ranks are no profile; measure some")
    for degree in degrees:
        if degree < 1 or ranks % degree:
            raise ConfigError(f"TP {degree} does not divide the profile's {ranks} ranks; profile degrees that do")
    for index, point in enumerate(profile.decode):
        if not 1 <= point.replicas <= ranks // point.tp:
            raise ConfigError(
                f"decode[{index}] has {point.replicas} replicas of TP {point.tp}; {ranks} ranks make 1 to "
                f"{ranks // point.tp}"
            )
        _check_positive(
            f"decode[{index}]", batch_size=point.batch_size, context_tokens=point.context_tokens, seconds=point.seconds
        )
    for index, prefill in enumerate(profile.prefill):
        _check_positive(
            f"prefill[{index}]", batch_size=prefill.batch_size, length=prefill.length, seconds=prefill.seconds
        )
    for index, uneven in enumerate(profile.uneven):
        _check_positive(
            f"uneven[{index}]",
            batch_size=uneven.batch_size,
            others=uneven.others,
            seconds=uneven.seconds,
            even_s=uneven.even_s,
        )
    _check_once("uneven point", [(p.tp, p.batch_size, p.others) for p in profile.uneven])
    _check_once("decode point", [(p.tp, p.replicas, p.batch_size, p.context_tokens) for p in profile.decode])
    _check_once("prefill point", [(p.tp, p.batch_size, p.length) for p in profile.prefill])
    _check_same("prefill points", {str(point.tp) for point in profile.prefill}, set(map(str, degrees)))


def _check_switches(profile: TPProfile) -> None:
    degrees = profile.degrees
    _check_positive("profile", token_budget=profile.token_budget)
    for cost in profile.switches:
        name = f"switch {cost.source_tp} to {cost.target_tp}"
        _check_positive(name, kv_bytes_per_s=cost.kv_bytes_per_s)
        _check_not_negative(name, reshard_s=cost.reshard_s, rest_s=cost.rest_s)
    for degree, seconds in [*profile.group_s.items(), *profile.capture_s.items()]:
        _check_not_negative(f"TP {degree}", seconds=seconds)
    pairs = [(cost.source_tp, cost.target_tp) for cost in profile.switches]
    _check_once("switch", pairs)
    _check_same(
        "switches",
        {f"{source} to {target}" for source, target in pairs},
        {f"{source} to {target}" for source, target in itertools.permutations(degrees, 2)},
    )
    missing = [degree for degree in degrees if degree > 1 and degree not in profile.group_s]
    if missing:
        raise ConfigError(f"group_s lacks TP {missing[0]}; measure how long its groups take to make")


def _check_positive(where: str, **figures: float) -> None:
    for name, value in figures.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{where} has {name} {value}; expected a positive number")


def _check_not_negative(where: str, **figures: float) -> None:
    for name, value in figures.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{where} has {name} {value}; expected 0 or more")


def _check_once(what: str, keys: Sequence[tuple[int, ...]]) -> None:
    seen: set[tuple[int, ...]] = set()
    for key in keys:
        if key in seen:
            raise ConfigError(f"{what} {key} occurs twice; keep one")
        seen.add(key)


def _check_same(what: str, found: set[str], expected: set[str]) -> None:
    for missing in sorted(expected - found):
        raise ConfigError(f"the profile's {what} lack TP {missing}, which its decode points have; measure it")
    for surplus in sorted(found - expected):
        raise ConfigError(f"the profile's {what} have TP {surplus}, which its decode points lack; measure those, too")

"""What a decision about the TP degree is made from, and what it says; see `tailrace.planning.tp_switch`."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from tailrace.planning.remaining import Unfinished


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine of N ranks between two steps."""

    tp: int
    degrees: tuple[int, ...]
    """The degrees that the engine may change to."""
    replicas: tuple[tuple[Unfinished, ...], ...]
    """The running sequences of each of the N / tp replicas; their contexts are cached."""
    waiting: tuple[Unfinished, ...] = ()
    """Waiting sequences in the order in which they start; nothing of theirs is cached."""
    kv_bytes_per_token: int
    """Bytes of the keys and values of a context token in all layers, of the whole model."""
    cache_tokens: Mapping[int, float] = {}
    """The context tokens that a replica of each degree has room for; endless where left out."""
    groups: frozenset[int] = frozenset()
    """Degrees whose communication groups exist."""
    ruled_out: Mapping[int, str] = {}
    """The reason for each degree that is not possible at present."""
    home_tp: int | None = None
    """The degree that the engine returns to when all is done. None: it will be the degree chosen now, because the
    batch has never been fuller.
    """

    @property
    def unfinished(self) -> int:
        """Number of unfinished sequences."""
        return sum(map(len, self.replicas)) + len(self.waiting)


State = Literal["move", "recompute", "none"]
"""The way in which cached state gets to the new arrangement; `none` where nothing is cached, or nothing changes."""


class SwitchTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a switch's time, in seconds; all 0 where there is no switch."""

    groups_s: float = 0.0
    """Seconds to make communication groups; 0 where they exist."""
    reshard_s: float = 0.0
    """Seconds to reshard the weights."""
    rest_s: float = 0.0
    """Seconds of all other work that does not depend on the sequences."""
    capture_s: float = 0.0
    """Seconds to capture CUDA graphs."""
    move_s: float = 0.0
    """Seconds to migrate keys and values (PAT, eq. 1 and 2)."""
    recompute_s: float = 0.0
    """Seconds to compute keys and values again (PAT, eq. 3 and 4)."""
    state: State = "none"
    """The way that takes less time; only its time counts."""

    def sum_s(self) -> float:
        """Sum of groups, reshard, rest, capture and state."""
        return self.groups_s + self.reshard_s + self.rest_s + self.capture_s + min(self.move_s, self.recompute_s)


class Candidate(SwitchTerms, frozen=True, kw_only=True):
    """The predicted times under one degree, in seconds. The present degree has no switch."""

    tp: int
    batch_sizes: tuple[int, ...]
    """Running sequences of each replica, after merging."""
    remaining_s: float
    """Seconds until all are done, under this degree."""
    plan_s: float
    """The same seconds with further switches on the way, if look-ahead is on and they pay."""
    later: tuple[tuple[int, int], ...] = ()
    """These switches: the new degree, and the number of unfinished sequences at that time."""
    switch_s: float = 0.0
    """Sum of groups, reshard, rest, capture and state."""
    return_s: float = 0.0
    """Seconds to return to the degree of the full batch when all is done."""
    total_s: float
    """Sum of plan, switch and return."""
    switches: int
    """Number of switches, including the return."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and its figures, for the event log."""

    tp: int
    """The degree before."""
    unfinished: int
    """Number of unfinished sequences."""
    current_s: float
    """Seconds until all are done and the engine has returned, if nothing changes before."""
    candidates: tuple[Candidate, ...]
    """The possible degrees, including the present one."""
    ruled_out: dict[int, str]
    """The reason for each degree that is not possible."""
    chosen: int
    """The degree to go on with."""
    switch: bool
    """Whether that is another degree than before."""
    estimate: str
    """Name of the estimate of remaining tokens."""
    reason: str
    """The reason in words."""

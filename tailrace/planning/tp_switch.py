"""Decides whether an engine should change its TP degree while a batch drains (PAT, Algorithm 1).

    Snapshot ──estimate──▶ remaining tokens ──for each degree: merge, drain, cost──▶ Candidate ──least total──▶ Decision
    measured steps ──observe──▶ CorrectedPredictor ──────────────┘

The engine asks between two steps, whenever `due` is true, and waits for the answer. That takes some milliseconds for
hundreds of sequences, and tens of milliseconds where a thousand more wait. The same decision at the start of a stage
chooses the arrangement for its full batch, to which the engine returns at the end of the stage.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from tailrace.errors import ConfigError
from tailrace.planning.drain import Work, drain, drain_s
from tailrace.planning.latency import CorrectedPredictor, LatencyPredictor, rms
from tailrace.planning.remaining import RemainingEstimate, Unfinished
from tailrace.planning.tp_profile import TPProfile

Item = TypeVar("Item")


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


LATER = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16)
"""Shares of the present unfinished sequences at which a later switch is simulated."""

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
    """The same seconds, with one more switch on the way if look-ahead is on and finds a better one."""
    later_tp: int | None = None
    """The degree of that further switch; None where it is better not to switch."""
    later_unfinished: int = 0
    """Number of unfinished sequences at that time."""
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


class _Plan(NamedTuple):
    """A way to finish all sequences."""

    seconds: float
    return_s: float
    switches: int
    later_tp: int | None = None
    unfinished: int = 0
    """Number of unfinished sequences at the change to `later_tp`."""

    @property
    def total_s(self) -> float:
        return self.seconds + self.return_s


MOST_SURPRISE = math.log(16.0)
"""Bound of the ratio of a switch's time to the profiled time, and of its inverse, as a logarithm."""
SURPRISE_RATE = 0.5
"""Part of a switch's error by which the correction of all switches moves: there are few to learn from."""


class SwitchController:
    """Decides for one engine. Keeps the corrections of the predictions, and the state of the last decision."""

    def __init__(
        self,
        profile: TPProfile,
        estimate: RemainingEstimate,
        *,
        max_batch_size: int,
        least_gain: float,
        steps_between: int,
        look_ahead: bool,
    ) -> None:
        """Start without measurements or decisions.

        Args:
            max_batch_size: the most sequences that a replica decodes together, at any degree.
            least_gain: share of the remaining time that each switch has to save, including later ones and the return:
                predictions are never exact.
            steps_between: decode steps since the last decision after which `due` is true even if the batch stays as it
                is; contexts grow.
            look_ahead: also consider every degree with one more switch at a later time. Algorithm 1 does not: it
                switches as soon as that is better than never, though later may be better still.
        """
        self.predictor = CorrectedPredictor(LatencyPredictor(profile))
        self._profile = profile
        self._costs = {(cost.source_tp, cost.target_tp): cost for cost in profile.switches}
        self._estimate = estimate
        self._max_batch_size = max_batch_size
        self._least_gain = least_gain
        self._steps_between = steps_between
        self._look_ahead = look_ahead
        self._decided_for: int | None = None
        """Number of unfinished sequences at the last decision."""
        self._asked_for = 0
        """Number of unfinished sequences at the last call of `due`."""
        self._steps = 0.0
        """Decode steps since the last decision, as the mean of the replicas."""
        self._surprise = 0.0
        """Logarithm of the ratio of measured to profiled times of switches."""

    def begin(self) -> None:
        """Prepare for another batch: the next call of `due` is its first."""
        self._decided_for, self._asked_for = None, 0

    def due(self, unfinished: int) -> bool:
        """Whether to decide again. The engine calls this whenever it could change.

        True at first, when the number of unfinished sequences has changed by an eighth since the last decision, and
        after every `steps_between` decode steps. It is false while the number grows: a batch that arrives in parts
        would look like a small one.
        """
        grows, self._asked_for = unfinished > self._asked_for, unfinished
        if unfinished == 0 or grows:
            return False
        if self._decided_for is None or self._steps >= self._steps_between:
            return True
        changed = abs(unfinished - self._decided_for)
        return changed > 0 and 8 * changed >= self._decided_for

    def observe(self, tp: int, batch_size: int, context_tokens: int, replicas: int, seconds: float) -> None:
        """Learn from a measured decode step of one replica; see `CorrectedPredictor.observe`."""
        self._steps += 1 / replicas
        self.predictor.observe(tp, batch_size, context_tokens, replicas, seconds)

    def observe_switch(self, predicted_s: float, seconds: float) -> None:
        """Learn from the time of a switch, without groups and capture.

        A switch takes longer when memory was put to other use since the last one.
        """
        if predicted_s > 0 and seconds > 0:
            surprise = self._surprise + SURPRISE_RATE * math.log(seconds / predicted_s)
            self._surprise = min(MOST_SURPRISE, max(-MOST_SURPRISE, surprise))

    def decide(self, snapshot: Snapshot) -> Decision:
        """Compare the predicted times under each degree.

        Raises:
            ConfigError: the engine runs at a degree that was not profiled, or has other ranks than the profile.
        """
        self._check(snapshot)
        self._decided_for, self._steps = snapshot.unfinished, 0.0
        ruled_out = self._ruled_out(snapshot)
        running, waiting = self._planned(snapshot)
        candidates = tuple(
            self._candidate(snapshot, tp, running, waiting)
            for tp in sorted({*snapshot.degrees, snapshot.tp} - ruled_out.keys())
        )
        current = next(candidate for candidate in candidates if candidate.tp == snapshot.tp)
        current_s = current.remaining_s + self._return_s(snapshot, snapshot.home_tp or snapshot.tp)
        margin_s = self._least_gain * current_s
        best = min(candidates, key=lambda c: (c.total_s + margin_s * c.switches, c.tp != snapshot.tp))
        switch = best.tp != snapshot.tp
        return Decision(
            tp=snapshot.tp,
            unfinished=snapshot.unfinished,
            current_s=current_s,
            candidates=candidates,
            ruled_out=ruled_out,
            chosen=best.tp,
            switch=switch,
            estimate=self._estimate.name,
            reason=self._reason(snapshot, candidates, current, best),
        )

    def _check(self, snapshot: Snapshot) -> None:
        if snapshot.tp not in self._profile.degrees:
            raise ConfigError(
                f"TP {snapshot.tp} is not in the profile, which has {_listed(self._profile.degrees)}; profile it, too"
            )
        ranks = snapshot.tp * len(snapshot.replicas)
        if ranks != self._profile.key.ranks:
            raise ConfigError(f"the profile is of {self._profile.key.ranks} ranks, not {ranks}; profile these")

    def _ruled_out(self, snapshot: Snapshot) -> dict[int, str]:
        known = self._profile.degrees
        unknown = {tp: "not in the profile" for tp in snapshot.degrees if tp not in known}
        return {tp: why for tp, why in ({**unknown, **snapshot.ruled_out}).items() if tp != snapshot.tp}

    def _planned(self, snapshot: Snapshot) -> tuple[list[list[Work]], list[Work]]:
        """The present and the estimated remaining tokens of each sequence: by replica, and of those that wait."""
        # in turns, so that of equal sequences not all of the first replica are assumed to end first
        turns = sorted((place, index) for index, row in enumerate(snapshot.replicas) for place in range(len(row)))
        sequences = [*(snapshot.replicas[index][place] for place, index in turns), *snapshot.waiting]
        works = [
            (sequence.context, remaining)
            for sequence, remaining in zip(sequences, self._estimate.remaining(sequences), strict=True)
        ]
        running: list[list[Work]] = [[] for _ in snapshot.replicas]
        for (_, index), work in zip(turns, works, strict=False):
            running[index].append(work)
        return running, works[len(turns) :]

    def _candidate(
        self, snapshot: Snapshot, tp: int, running: Sequence[Sequence[Work]], waiting: Sequence[Work]
    ) -> Candidate:
        merged = merge(running, snapshot.tp, tp, tokens=_context)
        plans = self._plans(snapshot, tp, merged, waiting, home_tp=snapshot.home_tp or tp)
        stay = plans[0]
        margin_s = self._least_gain * stay.total_s
        plan = min(plans, key=lambda plan: plan.total_s + margin_s * plan.switches)
        cost = SwitchTerms() if tp == snapshot.tp else self._cost(snapshot, tp, running, merged)
        return Candidate(
            tp=tp,
            batch_sizes=tuple(map(len, merged)),
            remaining_s=stay.seconds,
            plan_s=plan.seconds,
            later_tp=plan.later_tp,
            later_unfinished=plan.unfinished,
            **msgspec.structs.asdict(cost),
            switch_s=cost.sum_s(),
            return_s=plan.return_s,
            total_s=cost.sum_s() + plan.total_s,
            switches=plan.switches + (tp != snapshot.tp),
        )

    def _cost(
        self, snapshot: Snapshot, tp: int, running: Sequence[Sequence[Work]], merged: Sequence[Sequence[Work]]
    ) -> SwitchTerms:
        """The terms of a switch to `tp` from the snapshot's degree, with the snapshot's groups."""
        cost, longer = self._costs[snapshot.tp, tp], math.exp(self._surprise)
        move_s = longer * sent_bytes(running, snapshot.tp, snapshot.kv_bytes_per_token) / cost.kv_bytes_per_s
        recompute_s = max(self._prefill_s(tp, works) for works in merged)
        return SwitchTerms(
            groups_s=self._groups_s(snapshot, tp),
            reshard_s=longer * cost.reshard_s,
            rest_s=longer * cost.rest_s,
            capture_s=self._profile.capture_s.get(tp, 0.0),
            move_s=move_s,
            recompute_s=recompute_s,
            state="none" if not any(merged) else "move" if move_s <= recompute_s else "recompute",
        )

    def _plans(
        self, snapshot: Snapshot, tp: int, running: Sequence[Sequence[Work]], waiting: Sequence[Work], *, home_tp: int
    ) -> "list[_Plan]":
        """The plans from degree `tp` on: stay with it to the end; with look-ahead, also leave it at some times."""
        others = {*snapshot.degrees, snapshot.tp} - self._ruled_out(snapshot).keys() - {tp}
        stops = {round(share * snapshot.unfinished) for share in LATER if self._look_ahead and others}
        stops -= {0, snapshot.unfinished}
        *states, end = drain(self.predictor, tp, running, waiting, slots=self._max_batch_size, stops=stops)
        here = _after(snapshot, tp)
        plans = [_Plan(end.seconds, self._return_s(here, home_tp), switches=int(tp != home_tp))]
        for then in states:
            for other in others:
                merged = merge(then.replicas, tp, other, tokens=_context)
                rest_s = drain_s(self.predictor, other, merged, then.waiting, slots=self._max_batch_size)
                seconds = then.seconds + self._cost(here, other, then.replicas, merged).sum_s() + rest_s
                return_s = self._return_s(_after(here, other), home_tp)
                plans.append(_Plan(seconds, return_s, 1 + (other != home_tp), other, then.unfinished))
        return plans

    def _return_s(self, snapshot: Snapshot, home_tp: int) -> float:
        """Seconds to return from the snapshot's degree, when no sequence is left."""
        return 0.0 if snapshot.tp == home_tp else self._cost(snapshot, home_tp, [[]], [[]]).sum_s()

    def _groups_s(self, snapshot: Snapshot, tp: int) -> float:
        """Seconds to make the groups of the new degree and of the exchange of state; a single rank needs none."""
        needed = {tp, math.lcm(snapshot.tp, tp)} - snapshot.groups - {1}
        longest = max(self._profile.group_s.values(), default=0.0)
        return sum(self._profile.group_s.get(degree, longest) for degree in needed)

    def _prefill_s(self, tp: int, works: Sequence[Work]) -> float:
        """Seconds of equation 4 on one replica; replicas prefill at the same time."""
        return self.predictor.prefill_s(tp, len(works), rms(map(_context, works))) if works else 0.0

    def _reason(
        self,
        snapshot: Snapshot,
        candidates: Sequence[Candidate],
        current: Candidate,
        best: Candidate,
    ) -> str:
        if snapshot.unfinished == 0:
            return "nothing is unfinished"
        others = [candidate for candidate in candidates if candidate is not current]
        if not others:
            return f"no degree but TP {current.tp} is possible"
        if best is not current:
            return f"{_seconds(best)} instead of {_seconds(current)}"
        nearest = min(others, key=lambda candidate: candidate.total_s)
        if nearest.total_s < current.total_s:
            return f"{_seconds(nearest)} saves less than {self._least_gain:.0%} a switch of {_seconds(current)}"
        return f"{_seconds(current)}; the next best, {_seconds(nearest)}, saves nothing"


def merge(
    replicas: Sequence[Sequence[Item]], tp: int, target: int, *, tokens: Callable[[Item], int]
) -> list[list[Item]]:
    """Distribute running sequences over the replicas of another degree, with the same ranks.

    Ranks exchange state in groups of lcm(tp, target), so sequences stay within their group. Replicas that become one
    keep their sequences. The sequences of a replica that becomes several are dealt out: their numbers differ by at most
    one, and then their context tokens differ little.

    Args:
        replicas: of degree `tp`.
        tokens: returns the context tokens of a sequence.

    Returns:
        N / target lists.
    """
    if tp == target:
        return [list(running) for running in replicas]
    exchange = math.lcm(tp, target)
    sources, parts = exchange // tp, exchange // target
    assert len(replicas) % sources == 0, f"{len(replicas)} replicas of TP {tp} cannot change to TP {target}"
    merged: list[list[Item]] = []
    for first in range(0, len(replicas), sources):
        pool = [sequence for running in replicas[first : first + sources] for sequence in running]
        merged += [pool] if parts == 1 else _deal(pool, parts, tokens)
    return merged


def _deal(pool: Sequence[Item], parts: int, tokens: Callable[[Item], int]) -> list[list[Item]]:
    """Deal the largest first, each to the part with the fewest sequences; of equal ones, with the fewest tokens."""
    dealt: list[list[Item]] = [[] for _ in range(parts)]
    held = [0] * parts
    for sequence in sorted(pool, key=tokens, reverse=True):
        index = min(range(parts), key=lambda i: (len(dealt[i]), held[i]))
        dealt[index].append(sequence)
        held[index] += tokens(sequence)
    return dealt


def _after(snapshot: Snapshot, tp: int) -> Snapshot:
    """The snapshot with the degree and the groups after a switch to `tp`; its other fields are not used."""
    return msgspec.structs.replace(snapshot, tp=tp, groups=snapshot.groups | {tp, math.lcm(snapshot.tp, tp)})


def sent_bytes(running: Sequence[Sequence[Work]], tp: int, kv_bytes_per_token: int) -> float:
    """Bytes of keys and values of the rank that sends most (PAT, eq. 1). Others wait for it in the exchange."""
    return max(sum(map(_context, works)) for works in running) * kv_bytes_per_token / tp


def _context(work: Work) -> int:
    return work[0]


def _seconds(candidate: Candidate) -> str:
    if candidate.later_tp is None:
        return f"TP {candidate.tp} in {candidate.total_s:.3g} s"
    later = f"TP {candidate.later_tp} from {candidate.later_unfinished} unfinished on"
    return f"TP {candidate.tp}, then {later}, in {candidate.total_s:.3g} s"


def _listed(degrees: Sequence[int]) -> str:
    return ", ".join(map(str, degrees))

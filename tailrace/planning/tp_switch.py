"""Whether an engine should change its TP degree while a batch drains (PAT, Algorithm 1).

    Snapshot ──estimate──▶ remaining tokens ──for each degree: merge, drain, cost──▶ Candidate ──least total──▶ Decision
    measured steps ──observe──▶ CorrectedPredictor ──────────────┘

The engine asks whenever `due` says so, between two steps, and waits for the answer: some milliseconds for hundreds of
sequences, tens where a thousand more wait. The same decision made when a stage begins chooses the arrangement for its
full batch, to which the engine returns at the end of the stage.
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
    """What an engine of N ranks is doing between two steps."""

    tp: int
    degrees: tuple[int, ...]
    """Those that the engine may change to."""
    replicas: tuple[tuple[Unfinished, ...], ...]
    """N / tp of them: what runs on each, its context cached."""
    waiting: tuple[Unfinished, ...] = ()
    """In the order in which they start; nothing of theirs is cached."""
    kv_bytes_per_token: int
    """Keys and values of a context token in all layers, of the whole model."""
    groups: frozenset[int] = frozenset()
    """Degrees whose communication groups exist."""
    ruled_out: Mapping[int, str] = {}
    """Degrees that are out of the question just now, and why."""
    home_tp: int | None = None
    """The degree that the engine returns to when all is done; None where that will be the one chosen now, because the
    batch has never been fuller."""

    @property
    def unfinished(self) -> int:
        """Sequences."""
        return sum(map(len, self.replicas)) + len(self.waiting)


LATER = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16)
"""Shares of what is unfinished now, at which a later switch is tried on paper."""

State = Literal["move", "recompute", "none"]
"""How what is cached gets to the new arrangement; `none` where nothing is cached, or nothing changes."""


class SwitchTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a switch takes, in seconds; nothing where there is none."""

    groups_s: float = 0.0
    """To make communication groups; 0 where they exist."""
    reshard_s: float = 0.0
    """Of the weights."""
    rest_s: float = 0.0
    """What else does not depend on the sequences."""
    capture_s: float = 0.0
    """Of CUDA graphs."""
    move_s: float = 0.0
    """To migrate keys and values (PAT, eq. 1 and 2)."""
    recompute_s: float = 0.0
    """To compute them again (PAT, eq. 3 and 4)."""
    state: State = "none"
    """Which of the two is less, and counts."""

    def sum_s(self) -> float:
        """Groups, reshard, rest, capture and state."""
        return self.groups_s + self.reshard_s + self.rest_s + self.capture_s + min(self.move_s, self.recompute_s)


class Candidate(SwitchTerms, frozen=True, kw_only=True):
    """What one degree would take, in seconds. The present one's switch takes none."""

    tp: int
    batch_sizes: tuple[int, ...]
    """Running sequences of each replica, once merged."""
    remaining_s: float
    """Until all are done, under this degree."""
    plan_s: float
    """The same where the degree may change once more on the way, if that is looked for and better."""
    later_tp: int | None = None
    """The degree that it changes to then; None where it had better not."""
    later_unfinished: int = 0
    """Sequences that are unfinished at that time."""
    switch_s: float = 0.0
    """Groups, reshard, rest, capture and state."""
    return_s: float = 0.0
    """To return to the degree of the full batch when all is done."""
    total_s: float
    """Plan, switch and return."""
    switches: int
    """How many that would be, the return among them."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided, and from which figures; for the event log."""

    tp: int
    """Before."""
    unfinished: int
    """Sequences."""
    current_s: float
    """Until all are done, and the engine has returned, if nothing changes before."""
    candidates: tuple[Candidate, ...]
    """The degrees that are possible, the present one among them."""
    ruled_out: dict[int, str]
    """The others, and why not."""
    chosen: int
    """The degree to go on with."""
    switch: bool
    """Whether that is another one."""
    estimate: str
    """Of remaining tokens, by name."""
    reason: str
    """In words."""


class _Plan(NamedTuple):
    """A way to the end."""

    seconds: float
    return_s: float
    switches: int
    later_tp: int | None = None
    unfinished: int = 0
    """When it changes to that."""

    @property
    def total_s(self) -> float:
        return self.seconds + self.return_s


MOST_SURPRISE = math.log(16.0)
"""Switches are taken for at most so many times as long as profiled, and at least its inverse; as a logarithm."""
SURPRISE_RATE = 0.5
"""Share of a switch's error by which the correction of all switches moves: there are few to learn from."""


class SwitchController:
    """Decides for one engine. Keeps what corrects the predictions, and when it was last asked."""

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
        """Measure nothing and decide nothing yet.

        Args:
            max_batch_size: sequences that a replica decodes together at most, whatever the degree.
            least_gain: share of the remaining time that each switch has to save, those later on and the return among
                them: predictions are never exact.
            steps_between: `due` after so many decode steps since the last decision, even if the batch stays as it is;
                contexts grow.
            look_ahead: weigh every degree with one more switch at a later time, too. Algorithm 1 does not: it switches
                as soon as that is better than never, though later may be better still.
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
        """Sequences that were unfinished at the last decision."""
        self._asked_for = 0
        """Sequences that were unfinished when `due` was asked last."""
        self._steps = 0.0
        """Since the last decision, as the mean of the replicas."""
        self._surprise = 0.0
        """Logarithm of what switches took over what was profiled."""

    def begin(self) -> None:
        """Another batch comes: the next question is its first."""
        self._decided_for, self._asked_for = None, 0

    def due(self, unfinished: int) -> bool:
        """Whether to decide again; asked whenever the engine could change.

        True at first, when the number of unfinished sequences has changed by an eighth since the last decision, and
        after every `steps_between` decode steps. But not while it grows: a batch that comes in parts would be taken for
        a small one.
        """
        grows, self._asked_for = unfinished > self._asked_for, unfinished
        if unfinished == 0 or grows:
            return False
        if self._decided_for is None or self._steps >= self._steps_between:
            return True
        changed = abs(unfinished - self._decided_for)
        return changed > 0 and 8 * changed >= self._decided_for

    def observe(self, tp: int, batch_size: int, context_tokens: int, replicas: int, seconds: float) -> None:
        """Take in a measured decode step of one replica; see `CorrectedPredictor.observe`."""
        self._steps += 1 / replicas
        self.predictor.observe(tp, batch_size, context_tokens, replicas, seconds)

    def observe_switch(self, predicted_s: float, seconds: float) -> None:
        """Take in what a switch took, without groups and capture. Memory that was put to other use since the last one
        makes it longer."""
        if predicted_s > 0 and seconds > 0:
            surprise = self._surprise + SURPRISE_RATE * math.log(seconds / predicted_s)
            self._surprise = min(MOST_SURPRISE, max(-MOST_SURPRISE, surprise))

    def decide(self, snapshot: Snapshot) -> Decision:
        """Compare what is left to do under each degree.

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
        """What each sequence has, and what it is taken to make: of each replica, and of those that wait."""
        # in turns, so that of equal sequences not all of the first replica are taken to end first
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
        """Of a switch to `tp` from the snapshot's degree, with the snapshot's groups."""
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
        """To stay with `tp` to the end; then, if that is looked for, to leave it at one of some times."""
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
        """From the snapshot's degree, when nothing is left that could be moved."""
        return 0.0 if snapshot.tp == home_tp else self._cost(snapshot, home_tp, [[]], [[]]).sum_s()

    def _groups_s(self, snapshot: Snapshot, tp: int) -> float:
        """Of the new degree, and of the one in which state is exchanged; a rank alone needs none."""
        needed = {tp, math.lcm(snapshot.tp, tp)} - snapshot.groups - {1}
        longest = max(self._profile.group_s.values(), default=0.0)
        return sum(self._profile.group_s.get(degree, longest) for degree in needed)

    def _prefill_s(self, tp: int, works: Sequence[Work]) -> float:
        """Equation 4, on one replica; replicas prefill beside each other."""
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
    """Running sequences by the replicas of another degree, of as many ranks.

    Ranks exchange state in groups of lcm(tp, target), so sequences stay within theirs: replicas that become one keep
    theirs, and what becomes several is dealt out, so that numbers differ by one at most and, in the second place,
    context tokens differ little.

    Args:
        replicas: of degree `tp`.
        tokens: of a sequence's context.

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
    """The largest first, each to the part with the fewest sequences, and of these to that with the fewest tokens."""
    dealt: list[list[Item]] = [[] for _ in range(parts)]
    held = [0] * parts
    for sequence in sorted(pool, key=tokens, reverse=True):
        index = min(range(parts), key=lambda i: (len(dealt[i]), held[i]))
        dealt[index].append(sequence)
        held[index] += tokens(sequence)
    return dealt


def _after(snapshot: Snapshot, tp: int) -> Snapshot:
    """The degree and the groups that there are then; the rest is of no account."""
    return msgspec.structs.replace(snapshot, tp=tp, groups=snapshot.groups | {tp, math.lcm(snapshot.tp, tp)})


def sent_bytes(running: Sequence[Sequence[Work]], tp: int, kv_bytes_per_token: int) -> float:
    """Keys and values that the rank sends which has to send most (PAT, eq. 1). Others wait for it in the exchange."""
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

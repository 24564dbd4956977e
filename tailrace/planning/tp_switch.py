"""Decides whether an engine should change its TP degree while a batch drains (PAT, Algorithm 1).

    Snapshot ──estimate──▶ remaining tokens ──for each degree: merge, drain, cost──▶ Candidate ──least total──▶ Decision
    measured steps ──observe──▶ CorrectedPredictor ──────────────┘

The engine asks between two steps, whenever `due` is true, and waits for the answer. That takes some milliseconds for
hundreds of sequences, and tens of milliseconds where a thousand more wait. The same decision at the start of a stage
chooses the arrangement for its full batch, to which the engine returns at the end of the stage.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tailrace.errors import ConfigError
from tailrace.planning.drain import Work, drain, drain_s
from tailrace.planning.latency import CorrectedPredictor, LatencyPredictor
from tailrace.planning.remaining import RemainingEstimate
from tailrace.planning.tp_cost import SwitchCosts
from tailrace.planning.tp_decision import Candidate, Decision, Snapshot, SwitchTerms
from tailrace.planning.tp_merge import context, merge
from tailrace.planning.tp_profile import TPProfile

LATER = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16)
"""Shares of the present unfinished sequences at which a later switch is simulated."""


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
        self._costs = SwitchCosts(profile, self.predictor)
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
        """Learn from the time of a switch; see `SwitchCosts.observe`."""
        self._costs.observe(predicted_s, seconds)

    def return_cost(self, snapshot: Snapshot, home_tp: int) -> SwitchTerms:
        """See `SwitchCosts.return_cost`."""
        return self._costs.return_cost(snapshot, home_tp)

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
        current_s = current.remaining_s + self._costs.return_s(snapshot, snapshot.home_tp or snapshot.tp)
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
        merged = merge(running, snapshot.tp, tp, tokens=context)
        plans = self._plans(snapshot, tp, merged.replicas, waiting, home_tp=snapshot.home_tp or tp)
        stay = plans[0]
        margin_s = self._least_gain * stay.total_s
        plan = min(plans, key=lambda plan: plan.total_s + margin_s * plan.switches)
        cost = SwitchTerms() if tp == snapshot.tp else self._costs.cost(snapshot, tp, running, merged)
        return Candidate(
            tp=tp,
            batch_sizes=tuple(map(len, merged.replicas)),
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

    def _plans(
        self, snapshot: Snapshot, tp: int, running: Sequence[Sequence[Work]], waiting: Sequence[Work], *, home_tp: int
    ) -> "list[_Plan]":
        """The plans from degree `tp` on: stay with it to the end; with look-ahead, also leave it at some times."""
        others = {*snapshot.degrees, snapshot.tp} - self._ruled_out(snapshot).keys() - {tp}
        stops = {round(share * snapshot.unfinished) for share in LATER if self._look_ahead and others}
        stops -= {0, snapshot.unfinished}
        *states, end = drain(self.predictor, tp, running, waiting, slots=self._max_batch_size, stops=stops)
        here = _after(snapshot, tp)
        plans = [_Plan(end.seconds, self._costs.return_s(here, home_tp), switches=int(tp != home_tp))]
        for then in states:
            for other in others:
                merged = merge(then.replicas, tp, other, tokens=context)
                rest_s = drain_s(self.predictor, other, merged.replicas, then.waiting, slots=self._max_batch_size)
                seconds = then.seconds + self._costs.cost(here, other, then.replicas, merged).sum_s() + rest_s
                return_s = self._costs.return_s(_after(here, other), home_tp)
                plans.append(_Plan(seconds, return_s, 1 + (other != home_tp), other, then.unfinished))
        return plans

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


def _after(snapshot: Snapshot, tp: int) -> Snapshot:
    """The snapshot with the degree and the groups after a switch to `tp`. Its sequences are as before."""
    return msgspec.structs.replace(snapshot, tp=tp, groups=snapshot.groups | {tp, math.lcm(snapshot.tp, tp)})


def _seconds(candidate: Candidate) -> str:
    if candidate.later_tp is None:
        return f"TP {candidate.tp} in {candidate.total_s:.3g} s"
    later = f"TP {candidate.later_tp} from {candidate.later_unfinished} unfinished on"
    return f"TP {candidate.tp}, then {later}, in {candidate.total_s:.3g} s"


def _listed(degrees: Sequence[int]) -> str:
    return ", ".join(map(str, degrees))

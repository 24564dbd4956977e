"""Decides whether an engine should change its TP degree while a batch drains (PAT, Algorithm 1).

    Snapshot ──estimate──▶ remaining tokens ──for each degree: merge, course, cost──▶ path ──▶ Candidate ──┐
    measured steps ──observe──▶ CorrectedPredictor ──────────────┘                 least total ──▶ Decision

The engine asks between two steps, whenever `due` is true, and waits for the answer. That takes a few milliseconds for
hundreds of sequences, and tens of milliseconds where a thousand more wait. The same decision at the start of a stage
chooses the arrangement for its full batch, to which the engine returns at the end of the stage.
"""

import itertools
import math
from collections.abc import Mapping, Sequence, Set

import msgspec
import numpy as np

from tailrace.errors import ConfigError
from tailrace.planning.drain import Held, Work
from tailrace.planning.latency import CorrectedPredictor, DecodedStep, LatencyPredictor
from tailrace.planning.remaining import RemainingEstimate
from tailrace.planning.tp_cost import SwitchCosts
from tailrace.planning.tp_course import Course, InOrder, course, moments
from tailrace.planning.tp_decision import Candidate, Decision, Snapshot, SwitchTerms
from tailrace.planning.tp_merge import Merged, counted_once, held_context, merge
from tailrace.planning.tp_path import Path, Paths
from tailrace.planning.tp_profile import TPProfile


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
        returns: bool = True,
    ) -> None:
        """Start without measurements or decisions.

        Args:
            max_batch_size: the most sequences that a replica decodes together, at any degree.
            least_gain: share of the remaining time that each switch has to save, including later ones and the return:
                predictions are never exact.
            steps_between: decode steps since the last decision after which `due` is true even if the batch stays as it
                is; contexts grow.
            look_ahead: also consider every degree with further switches at later times. Algorithm 1 does not: it
                switches as soon as that is better than never, though later may be better still.
            returns: whether the engine returns at the end of a stage. What that takes is then part of every sum.
        """
        self.predictor = CorrectedPredictor(LatencyPredictor(profile))
        self._profile = profile
        self._costs = SwitchCosts(profile, self.predictor)
        self._estimate = estimate
        self._max_batch_size = max_batch_size
        self._least_gain = least_gain
        self._steps_between = steps_between
        self._look_ahead = look_ahead
        self._returns = returns
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

    def observe(self, step: DecodedStep) -> None:
        """Learn from a measured decode step of one replica; see `CorrectedPredictor.observe`."""
        self._steps += 1 / step.replicas
        self.predictor.observe(step)

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
        degrees = sorted({*snapshot.degrees, snapshot.tp} - ruled_out.keys())
        merged = {tp: merge(running, snapshot.tp, tp, tokens=held_context) for tp in degrees}
        at = moments(snapshot.unfinished) if self._look_ahead else [snapshot.unfinished]
        in_order = InOrder.of([*itertools.chain.from_iterable(running), *waiting])
        courses = {tp: self._course(snapshot, tp, merged[tp], waiting, in_order, at) for tp in degrees}
        current_s = float(courses[snapshot.tp].seconds[-1]) + self._return_s(
            snapshot, snapshot.tp, snapshot.home_tp or snapshot.tp
        )
        margin_s = self._least_gain * current_s
        paths = self._paths(snapshot, courses, at, margin_s)
        candidates = tuple(self._candidate(snapshot, tp, running, merged[tp], courses[tp], paths[tp]) for tp in degrees)
        current = next(candidate for candidate in candidates if candidate.tp == snapshot.tp)
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

    def _planned(self, snapshot: Snapshot) -> tuple[list[list[Held]], list[Held]]:
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
        held = [
            list(zip(works, counted_once(row, [remaining for _, remaining in works]), strict=True))
            for row, works in zip(snapshot.replicas, running, strict=True)
        ]
        waiting, remaining = snapshot.waiting, [remaining for _, remaining in works[len(turns) :]]
        groups = {sequence.group for row in snapshot.replicas for sequence in row}
        once = counted_once(waiting, remaining, held=groups)  # one computes the prompt, and the others find it cached
        return held, list(zip(works[len(turns) :], once, strict=True))

    def _course(
        self,
        snapshot: Snapshot,
        tp: int,
        merged: Merged[Held],
        waiting: Sequence[Held],
        in_order: InOrder,
        at: Sequence[int],
    ) -> Course:
        return course(
            self.predictor,
            tp,
            merged.replicas,
            waiting,
            in_order,
            slots=self._max_batch_size,
            cache_tokens=snapshot.cache_tokens.get(tp, math.inf),
            at=at,
        )

    def _paths(
        self, snapshot: Snapshot, courses: Mapping[int, Course], at: Sequence[int], margin_s: float
    ) -> dict[int, Path]:
        """The best path from each degree on, with it for a while at least."""
        degrees = tuple(courses)
        run_s = np.array([courses[tp].runs_s for tp in degrees]).T
        later_s = self._costs.later_s(courses, snapshot.kv_bytes_per_token)
        alike: dict[tuple[Set[int], int | None], Paths] = {}
        """The paths of the degrees after which there are the same groups, and which return to the same degree."""
        found = {}
        for tp in degrees:
            known, home_tp = _after(snapshot, tp), snapshot.home_tp or tp
            key = known.groups, home_tp if self._returns else None
            if key not in alike:
                groups_s = [[self._costs.groups_s(a, b, known.groups) for b in degrees] for a in degrees]
                back_s = [
                    self._return_s(known, last, home_tp) + margin_s * self._goes_back(last, home_tp) for last in degrees
                ]
                alike[key] = Paths(degrees, at, run_s, later_s + groups_s, np.array(back_s), margin_s=margin_s)
            found[tp] = alike[key].path(tp, courses[tp].seconds, courses[tp].stretch)
        return found

    def _candidate(
        self,
        snapshot: Snapshot,
        tp: int,
        running: Sequence[Sequence[Held]],
        merged: Merged[Held],
        alone: Course,
        path: Path,
    ) -> Candidate:
        """The candidate for degree `tp`. `alone`: its course without further switches."""
        home_tp, last = snapshot.home_tp or tp, path.later[-1][0] if path.later else tp
        return_s = self._return_s(_after(snapshot, tp), last, home_tp)
        cost = SwitchTerms() if tp == snapshot.tp else self._costs.cost(snapshot, tp, running, merged)
        return Candidate(
            tp=tp,
            batch_sizes=tuple(map(len, merged.replicas)),
            remaining_s=float(alone.seconds[-1]),
            plan_s=path.seconds,
            later=path.later,
            **msgspec.structs.asdict(cost),
            switch_s=cost.sum_s(),
            return_s=return_s,
            total_s=cost.sum_s() + path.seconds + return_s,
            switches=len(path.later) + (tp != snapshot.tp) + self._goes_back(last, home_tp),
        )

    def _goes_back(self, last: int, home_tp: int) -> bool:
        """Whether a switch back follows the end of a batch with degree `last`."""
        return self._returns and last != home_tp

    def _return_s(self, snapshot: Snapshot, last: int, home_tp: int) -> float:
        """Seconds to return from degree `last` when no sequence is left, with the snapshot's groups."""
        if not self._goes_back(last, home_tp):
            return 0.0
        groups = snapshot.groups | {last}
        return self._costs.fixed_s(last, home_tp) + self._costs.groups_s(last, home_tp, groups)

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
    path = [f"TP {candidate.tp}", *(f"TP {tp} from {unfinished} unfinished on" for tp, unfinished in candidate.later)]
    return f"{', then '.join(path)}{',' if candidate.later else ''} in {candidate.total_s:.3g} s"


def _listed(degrees: Sequence[int]) -> str:
    return ", ".join(map(str, degrees))

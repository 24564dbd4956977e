"""What a switch of the TP degree costs (PAT, eq. 1 to 4)."""

import math
from collections.abc import Mapping, Sequence, Set

import numpy as np

from tailrace.planning.curves import Floats
from tailrace.planning.drain import Held
from tailrace.planning.latency import CorrectedPredictor, alike, alike_by_sums
from tailrace.planning.tp_course import Course
from tailrace.planning.tp_decision import Snapshot, SwitchTerms
from tailrace.planning.tp_merge import Merged, sent_bytes
from tailrace.planning.tp_profile import TPProfile

MOST_SURPRISE = math.log(16.0)
"""Bound of the ratio of a switch's time to the profiled time, and of its inverse, as a logarithm."""
SURPRISE_RATE = 0.5
"""Part of a switch's error by which the correction of all switches moves: there are few to learn from."""


_NOTHING: Merged[Held] = Merged([[]], [[]])
"""The sequences of an engine that is done."""


class SwitchCosts:
    """Predicts the costs of switches from a profile, and corrects them by measured switches."""

    def __init__(self, profile: TPProfile, predictor: CorrectedPredictor) -> None:
        """`predictor`: predicts the prefill of sequences that are computed again."""
        self._profile = profile
        self._predictor = predictor
        self._profiled = {(cost.source_tp, cost.target_tp): cost for cost in profile.switches}
        self._surprise = 0.0
        """Logarithm of the ratio of measured to profiled times of switches."""

    def observe(self, predicted_s: float, seconds: float) -> None:
        """Learn from the time of a switch, without groups and capture.

        A switch takes longer when memory was put to other use since the last one.
        """
        if predicted_s > 0 and seconds > 0:
            surprise = self._surprise + SURPRISE_RATE * math.log(seconds / predicted_s)
            self._surprise = min(MOST_SURPRISE, max(-MOST_SURPRISE, surprise))

    def cost(self, snapshot: Snapshot, tp: int, running: Sequence[Sequence[Held]], merged: Merged[Held]) -> SwitchTerms:
        """The terms of a switch to `tp` from the snapshot's degree, with the snapshot's groups.

        Prompts that a group shares on its replica are sent once. Where their cache is computed again they count once as
        well, so those of a group that is divided count too little.
        """
        cost, longer = self._profiled[snapshot.tp, tp], math.exp(self._surprise)
        move_s = longer * self._sent_bytes(snapshot, tp, running, merged) / cost.kv_bytes_per_s
        recompute_s = max(self._prefill_s(tp, held) for held in merged.replicas)
        return SwitchTerms(
            groups_s=self.groups_s(snapshot.tp, tp, snapshot.groups, across=any(merged.across)),
            reshard_s=longer * cost.reshard_s,
            rest_s=longer * cost.rest_s,
            capture_s=self._profile.capture_s.get(tp, 0.0),
            move_s=move_s,
            recompute_s=recompute_s,
            state="none" if not any(merged.replicas) else "move" if move_s <= recompute_s else "recompute",
        )

    def return_cost(self, snapshot: Snapshot, home_tp: int) -> SwitchTerms:
        """The terms of the return from the snapshot's degree, when no sequence is left."""
        return SwitchTerms() if snapshot.tp == home_tp else self.cost(snapshot, home_tp, [[]], _NOTHING)

    def fixed_s(self, tp: int, target: int) -> float:
        """Seconds of a switch without groups and sequences."""
        cost, longer = self._profiled[tp, target], math.exp(self._surprise)
        return longer * (cost.reshard_s + cost.rest_s) + self._profile.capture_s.get(target, 0.0)

    def later_s(self, courses: Mapping[int, Course], kv_bytes_per_token: int) -> Floats:
        """[S, D, D] seconds of a switch at each moment of the courses, by its old degree and its new one.

        Sequences are taken to be spread evenly over the replicas, and groups to exist.
        """
        longer = math.exp(self._surprise)
        again_s = {tp: self._again_s(tp, there) for tp, there in courses.items()}
        seconds = np.zeros((len(next(iter(again_s.values()))), len(courses), len(courses)))
        for row, (tp, here) in enumerate(courses.items()):
            sent = here.tokens * self._share(tp, here) * kv_bytes_per_token / tp
            for column, target in enumerate(courses):
                if target != tp:
                    move_s = longer * sent / self._profiled[tp, target].kv_bytes_per_s
                    seconds[:, row, column] = self.fixed_s(tp, target) + np.minimum(move_s, again_s[target])
        return seconds

    def _again_s(self, tp: int, there: Course) -> Floats:
        """[S] seconds to compute the caches again under `tp`."""
        moments = zip(self._share(tp, there).tolist(), there.tokens.tolist(), there.pairs.tolist(), strict=True)
        each = ((share, *alike_by_sums(tokens, pairs)) for share, tokens, pairs in moments)
        return np.array([self._predictor.prefill_s(tp, share * number, length) for share, number, length in each])

    def _share(self, tp: int, there: Course) -> Floats:
        """[S] the part of all sequences that is on the fullest replica under `tp`."""
        return np.ceil(there.unfinished * tp / self._profile.key.ranks) / np.maximum(there.unfinished, 1.0)

    def _sent_bytes(
        self, snapshot: Snapshot, tp: int, running: Sequence[Sequence[Held]], merged: Merged[Held]
    ) -> float:
        """Bytes of equation 1, each counted as often as the exchange that was profiled would take as long.

        A rank receives from all others that exchange with it. There are more of these where sequences go across.
        """
        near, all_ranks = math.lcm(snapshot.tp, tp), self._profile.key.ranks
        sent, across = (
            sent_bytes([_cached(held) for held in rows], snapshot.tp, snapshot.kv_bytes_per_token)
            for rows in (running, merged.across)
        )
        return max(0.0, sent - across) + across * (all_ranks - 1) / (near - 1)

    def groups_s(self, tp: int, target: int, existing: Set[int], *, across: bool = False) -> float:
        """Seconds to make the groups of the new degree and of the exchanges of state; a single rank needs none.

        across: whether sequences leave the ranks that exchange weights.
        """
        needed = {target, math.lcm(tp, target), *([self._profile.key.ranks] if across else [])} - existing - {1}
        longest = max(self._profile.group_s.values(), default=0.0)
        return sum(self._profile.group_s.get(degree, longest) for degree in needed)

    def _prefill_s(self, tp: int, held: Sequence[Held]) -> float:
        """Seconds of equation 4 on one replica; replicas prefill at the same time."""
        return self._predictor.prefill_s(tp, *alike(_cached(held)))


def _cached(held: Sequence[Held]) -> list[int]:
    return [cached for _, cached in held]

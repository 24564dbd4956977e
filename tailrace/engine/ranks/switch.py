"""Rearranges rank processes: the same processes get other shards and form other replicas.

    check memory ──▶ make the groups that are missing ──▶ move weights and cache ──▶ the same processes, as new replicas
         │                        │                                │
         └── SwitchRefused: nothing has changed                     └── EngineError: the ranks are of no further use

Groups are made when an arrangement first needs them. The processes keep them, idle, for the next time (PAT, section
4.3). A group is made again where one of its processes has been replaced.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from math import lcm
from multiprocessing.connection import wait

from tailrace.config.base import GIB
from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.factory import meeting_bytes
from tailrace.engine.collectives.rendezvous import rendezvous
from tailrace.engine.ranks.process import ProcessReplica
from tailrace.engine.ranks.wire import Answer, Measure, Meet, Order, Switch
from tailrace.engine.scheduling.migration import Migration
from tailrace.errors import EngineError
from tailrace.planning.tp_verdict import SwitchReport


class SwitchRefused(EngineError):
    """There is no room for the switch, in memory or for the files of its groups; everything is as it was."""


class SwitchExecutor:
    """Carries out switches, and remembers which groups the processes have. Not thread-safe."""

    def __init__(self, config: NativeEngineConfig) -> None:
        """Start without known groups. The collectives of `config` must be resolved."""
        self._config = config
        self._groups: dict[tuple[int, int], tuple[int, ...]] = {}
        """The processes that made each group, by the group's degree and number."""

    def groups(self, replicas: Sequence[ProcessReplica], tp: int) -> frozenset[int]:
        """The degrees whose groups all exist, among the current processes."""
        degrees = {degree for degree, _ in self._groups} | {tp}
        return frozenset(degree for degree in degrees if not self._missing(replicas, tp, {degree}))

    def check(self, replicas: Sequence[ProcessReplica], extra_bytes: int) -> None:
        """Check that every rank has `extra_bytes` of memory to spare.

        Raises:
            SwitchRefused: a rank has less.
            EngineError: a rank died.
        """
        answers = _tell(replicas, [Measure()] * len(_pids(replicas)), "measuring its memory")
        for rank, answer in enumerate(answers):
            if answer.spare_bytes is not None and answer.spare_bytes < extra_bytes:
                raise SwitchRefused(
                    f"a switch needs {extra_bytes / GIB:.3f} GiB beside what rank {rank} holds, and there are "
                    f"{answer.spare_bytes / GIB:.3f}"
                )

    def move(
        self, replicas: Sequence[ProcessReplica], migrations: Sequence[list[Migration]], *, tp: int, target_tp: int
    ) -> SwitchReport:
        """Move weights and cache. Afterwards the processes are the target's ranks; the caller makes replicas of them.

        Args:
            migrations: Those of each new replica, see `Rank.switch`.

        Returns:
            The report up to now; the caller sets the total.

        Raises:
            SwitchRefused: a directory for a group cannot be made.
            EngineError: a rank died or ran out of memory; no rank is of any further use.
        """
        began = time.perf_counter()
        degrees = {target_tp, lcm(tp, target_tp), *(len(across.sources) * tp for across in migrations[0][1:])}
        made = self._make_groups(replicas, tp, degrees)
        met = time.perf_counter()
        orders = [Switch(target_tp, migrations[rank // target_tp]) for rank in range(len(_pids(replicas)))]
        times = [answer.times for answer in _tell(replicas, orders, f"switching to TP {target_tp}")]
        slowest = max((t for t in times if t is not None), key=lambda t: t.weights_s + t.kv_s)
        return SwitchReport(
            groups_s=met - began,
            weights_s=slowest.weights_s,
            kv_s=slowest.kv_s,
            total_s=time.perf_counter() - began,
            kv_bytes=max(t.kv_bytes for t in times if t is not None),
            made_groups=made,
        )

    def _make_groups(self, replicas: Sequence[ProcessReplica], tp: int, degrees: set[int]) -> tuple[int, ...]:
        missing = self._missing(replicas, tp, degrees)
        if not missing:
            return ()
        pids = _pids(replicas)
        places: list[dict[int, str]] = [{} for _ in pids]
        with ExitStack() as meetings:
            for degree, number in missing:
                try:
                    directory = meetings.enter_context(rendezvous(meeting_bytes(self._config, degree))).directory
                except OSError as error:
                    raise SwitchRefused(f"no directory can be made where ranks make a group: {error}") from error
                for rank in range(number * degree, (number + 1) * degree):
                    places[rank][degree] = directory
            _tell(replicas, [Meet(place) for place in places], "making communication groups")
        for degree, number in missing:
            self._groups[degree, number] = pids[number * degree : (number + 1) * degree]
        return tuple(sorted({degree for degree, _ in missing}))

    def _missing(self, replicas: Sequence[ProcessReplica], tp: int, degrees: set[int]) -> list[tuple[int, int]]:
        """The groups of these degrees that have to be made."""
        for number, replica in enumerate(replicas):  # their own groups are made with the ranks
            self._groups[tp, number] = tuple(replica.pids)
        pids = _pids(replicas)
        return [
            (degree, number)
            for degree in sorted(degrees - {1})
            for number in range(len(pids) // degree)
            if self._groups.get((degree, number)) != pids[number * degree : (number + 1) * degree]
        ]


def _pids(replicas: Sequence[ProcessReplica]) -> tuple[int, ...]:
    return tuple(pid for replica in replicas for pid in replica.pids)


def _tell(replicas: Sequence[ProcessReplica], orders: Sequence[Order], doing: str) -> list[Answer]:
    """Give each rank its order. Wait for all answers, or until the first rank dies or fails.

    Ranks exchange across replicas, so that those of one may wait for a dead one of another.
    """
    remaining = iter(orders)
    for replica in replicas:
        replica.tell([next(remaining) for _ in replica.pids], doing=doing)
    while silent := [descriptor for replica in replicas for descriptor in replica.silent]:
        ready = wait(silent, max(0.0, min(replica.patience_s for replica in replicas)))
        for replica in replicas:
            replica.hear([descriptor for descriptor in ready if isinstance(descriptor, int)])
    return [answer for replica in replicas for answer in replica.answers()]

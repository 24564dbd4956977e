"""Moves unfinished sequences from the replicas of one arrangement of ranks to those of another.

`planning.tp_merge.merge` chooses the new replica that goes on with a running sequence. The sequence's cache moves
along: each block once for each new replica that needs it, under a new number. A sequence that finds no room in its new
replica waits there and is computed again, as all do when nothing moves.

    old schedulers ──plan──▶ Transplant ──(the ranks move what it says)──▶ commit ──▶ new schedulers

Nothing of the old schedulers changes before `commit`, so a switch can be given up until then.
"""

from collections.abc import Callable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from math import lcm
from operator import attrgetter
from typing import NamedTuple

from tailrace.engine.scheduling.migration import Migration
from tailrace.engine.scheduling.scheduler import Scheduler
from tailrace.engine.scheduling.sequence import Sequence
from tailrace.planning.tp_merge import merge

_order = attrgetter("order")


@dataclass(slots=True)
class Transplant:
    """The plan of a move: the blocks that move, and the new places of sequences."""

    migrations: list[list[Migration]]
    """The blocks that move to each new replica: from the ranks that it exchanges weights with and, where any sequence
    goes further, from all ranks.
    """
    homes: dict[Sequence, Scheduler] = field(default_factory=dict)
    """The new scheduler of each running sequence."""
    blocks: dict[Sequence, list[int]] = field(default_factory=dict)
    """The new blocks of each sequence whose cache moves, so that it runs on."""

    def commit(self, old: Series[Scheduler], choose: Callable[[int], Scheduler]) -> None:
        """Hand the sequences over. The cache must have been moved. The old schedulers are of no further use.

        choose: Returns the new scheduler of a sequence that waits, by its group.
        """
        for sequence in sorted((sequence for scheduler in old for sequence in scheduler.sequences), key=_order):
            home = self.homes[sequence] if sequence in self.homes else choose(sequence.request.group_id)
            if sequence in self.blocks:
                home.resume(sequence, self.blocks[sequence])
            else:
                sequence.drop_cache()
                home.give([sequence])


def plan_transplant(
    old: Series[Scheduler], new: Series[Scheduler], *, source_tp: int, target_tp: int, move: bool
) -> Transplant:
    """Find a place for each running sequence, and its blocks.

    Args:
        old, new: One scheduler for each replica; those of `new` have no sequence.
        move: Whether the cache moves. If not, all sequences wait.
    """
    running = [
        [_Runner(index, sequence) for sequence in scheduler.sequences if sequence.cached]
        for index, scheduler in enumerate(old)
    ]
    transplant = Transplant([])
    homes = [_Home(scheduler) for scheduler in new]
    for home, runners in zip(homes, merge(running, source_tp, target_tp, tokens=_tokens).replicas, strict=True):
        for runner in sorted(runners, key=lambda runner: runner.sequence.order):
            transplant.homes[runner.sequence] = home.scheduler
            if move and home.fits(runner):
                transplant.blocks[runner.sequence] = home.take(runner)
    transplant.migrations = _migrations(homes, len(old), lcm(source_tp, target_tp) // source_tp)
    return transplant


_Moving = dict[tuple[int, int], int]
"""The number of each (old replica, block) in a new replica."""


class _Runner(NamedTuple):
    """A running sequence."""

    source: int
    """The number of its old replica."""
    sequence: Sequence


def _tokens(runner: _Runner) -> int:
    return len(runner.sequence.tokens)


class _Home:
    """A new replica that fills up."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.numbers: _Moving = {}
        self._blocks = scheduler.blocks
        self._sequences = 0

    def fits(self, runner: _Runner) -> bool:
        """Whether the replica has a place, and room with one more block for each sequence."""
        if self._sequences == self.scheduler.max_batch_size:
            return False
        found = sum((runner.source, block) in self.numbers for block in self._cached(runner.sequence))
        needed = self._blocks.blocks_for(len(runner.sequence.tokens)) - found
        return needed + self._sequences + 1 <= self._blocks.free

    def coming(self, near: range) -> tuple[_Moving, _Moving]:
        """The blocks that come from the old replicas of `near`, and those from others."""
        inside = {key: number for key, number in self.numbers.items() if key[0] in near}
        return inside, {key: number for key, number in self.numbers.items() if key not in inside}

    def take(self, runner: _Runner) -> list[int]:
        """Give the sequence its blocks here."""
        blocks = []
        for block in self._cached(runner.sequence):
            number = self.numbers.get((runner.source, block))
            if number is None:
                (number,) = self._blocks.allocate(1)
                self.numbers[runner.source, block] = number
            else:
                self._blocks.share([number])
            blocks.append(number)
        self._sequences += 1
        return blocks + self._blocks.allocate(self._blocks.blocks_for(len(runner.sequence.tokens)) - len(blocks))

    def _cached(self, sequence: Sequence) -> list[int]:
        """The sequence's blocks that hold cached tokens."""
        return sequence.blocks[: self._blocks.blocks_for(sequence.cached)]


def _migrations(homes: Series[_Home], replicas: int, meeting: int) -> list[list[Migration]]:
    """Make the migrations to the new replicas.

    Args:
        homes: All of the new replicas.
        replicas: The number of old replicas.
        meeting: The number of these whose ranks meet anyway.
    """
    each = len(homes) * meeting // replicas  # new replicas of the ranks that meet
    near: list[Migration] = []
    across: list[_Moving] = []
    for group in range(replicas // meeting):
        sources = range(group * meeting, (group + 1) * meeting)
        coming = [home.coming(sources) for home in homes[group * each : (group + 1) * each]]
        near += _exchange([inside for inside, _ in coming], sources)
        across += [outside for _, outside in coming]
    if not any(across):
        return [[migration] for migration in near]
    return list(map(list, zip(near, _exchange(across, range(replicas)), strict=True)))


def _exchange(moving: Series[_Moving], sources: range) -> list[Migration]:
    """Make the migrations of one exchange.

    Args:
        moving: The blocks that each of its new replicas gets.
        sources: Its old replicas.
    """
    positions: dict[int, dict[int, int]] = {source: {} for source in sources}
    for blocks in moving:
        for source, block in blocks:
            positions[source].setdefault(block, len(positions[source]))
    sent = [list(blocks) for blocks in positions.values()]
    return [
        Migration(
            sent,
            [(source - sources.start, positions[source][block], number) for (source, block), number in blocks.items()],
        )
        for blocks in moving
    ]

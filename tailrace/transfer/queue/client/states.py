"""The states of several controllers as one state, and back. A snapshot is the same whatever the number of controllers.

    states of the controllers ──join──▶ the state of one controller ──split──▶ states of any number of controllers

Rows get new ids on both ways: nobody knows the old ones when a queue is restored.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.client.shards import Shards
from tailrace.transfer.queue.rows.groups import Intervals
from tailrace.transfer.queue.rows.state import ControlState, RowRecord

Cells = dict[RowId, bytes]
"""One part for each row, with all of its cells."""


def join_states(shards: Shards, states: Sequence[tuple[ControlState, Cells]]) -> tuple[ControlState, Cells]:
    """Join the states of all controllers, in their order, each with the cells of its rows."""
    controls = [state for state, _ in states]
    rows = [
        (_with_leases(row, shards, controller), parts[row.id])
        for controller, (state, parts) in enumerate(states)
        for row in state.rows
    ]
    joined = ControlState(
        generations=[],
        next_lease=shards.outside(max(state.next_lease for state in controls), shards.controllers),
        version=min(state.version for state in controls),
        rows=[],
        seen=join_seen([state.seen for state in controls]),
        lost=[group for state in controls for group in state.lost],
        remade={group_id: times for state in controls for group_id, times in state.remade.items()},
        consumed=[sum(counts) for counts in zip(*(state.consumed for state in controls), strict=True)],
        expired=[sum(counts) for counts in zip(*(state.expired for state in controls), strict=True)],
    )
    return _numbered(joined, rows)


def split_state(shards: Shards, state: ControlState, parts: Cells) -> list[tuple[ControlState, Cells]]:
    """Split a state among controllers. The first one goes on with the counts of rows consumed and expired."""
    states = []
    for controller in range(shards.controllers):
        own = msgspec.structs.replace(
            state,
            seen=split_seen(state.seen, shards, controller),
            lost=[group for group in state.lost if shards.of_group(group.group_id) == controller],
            remade={number: times for number, times in state.remade.items() if shards.of_group(number) == controller},
            consumed=state.consumed if controller == 0 else [0] * len(state.consumed),
            expired=state.expired if controller == 0 else [0] * len(state.expired),
        )
        rows = [(row, parts[row.id]) for row in state.rows if shards.of_group(row.group_id) == controller]
        states.append(_numbered(own, rows))
    return states


def join_seen(seen: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Join `ControlState.seen` of all controllers, in their order: ranges of group_id."""
    size = len(seen)
    sets = [Intervals(ranges) for ranges in seen]
    joined: list[tuple[int, int]] = []
    for start, end in pairwise(sorted({bound for ranges in seen for pair in ranges for bound in pair})):
        having = [controller for controller, own in enumerate(sets) if start in own]
        if len(having) == size:
            joined.append((start * size, end * size))
        elif having:  # the newest groups alone: others are all there
            joined += [(k * size + own, k * size + own + 1) for k in range(start, end) for own in having]
    return _merged(joined)


def split_seen(seen: Iterable[tuple[int, int]], shards: Shards, controller: int) -> list[tuple[int, int]]:
    """`ControlState.seen` of one controller, from ranges of group_id."""
    size = shards.controllers
    own = [(-((controller - start) // size), -((controller - end) // size)) for start, end in seen]
    return _merged((start, end) for start, end in own if start < end)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _with_leases(row: RowRecord, shards: Shards, controller: int) -> RowRecord:
    """A row with the numbers outside of the leases under which it was consumed: 0 is no lease."""
    consumed = {task: lease and shards.outside(lease, controller) for task, lease in row.consumed.items()}
    return msgspec.structs.replace(row, consumed=consumed)


def _numbered(state: ControlState, rows: Sequence[tuple[RowRecord, bytes]]) -> tuple[ControlState, Cells]:
    """The state with these rows in the first slots, and their cells."""
    ids = [RowId(slot, 0) for slot in range(len(rows))]
    records = [msgspec.structs.replace(row, id=own) for own, (row, _) in zip(ids, rows, strict=True)]
    cells: Mapping[RowId, bytes] = {own: part for own, (_, part) in zip(ids, rows, strict=True)}
    return msgspec.structs.replace(state, generations=[0] * len(rows), rows=records), dict(cells)

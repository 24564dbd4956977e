"""A random user of a unit that compares every answer with dicts.

It checks four things. Cells are read as they were written, whatever is written and read along with them. Settled rows
are gone and stay gone. Shared memory does not change while it is pinned. The inventory is complete.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tailrace.errors import ColumnError, StaleRowError, StorageFull
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import (
    Cells,
    Done,
    Inventory,
    Parts,
    Reserve,
    Reserved,
    Settle,
    Write,
    pack,
    unpack,
)
from tailrace.transfer.queue.storage.arena import ArenaStorage, Place
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.messages import Accepted
from tailrace.types import Value
from tests.transfer.storage.views import view_of
from tests.transfer.unit.conftest import Running
from tests.transfer.unit.controller import COLUMNS, Client, cells_in, described, read
from tests.transfer.wire.rows import packed

ROWS = [RowId(slot, generation) for slot in range(4) for generation in range(2)]
TAGS = (0, 7, 2**40)


def cells_of(part: PartId) -> dict[str, Value]:
    """The cells that are written for a part, always the same."""
    rng = np.random.default_rng(part)
    every: dict[str, Value] = {
        "ids": rng.integers(-9, 9, rng.choice([0, 1, 9, 9000])),
        "probs": rng.random(int(rng.choice([0, 1, 7, 5001]))).astype(np.float32),
        "number": int(rng.integers(-(2**62), 2**62)),
        "text": "ü" * int(rng.integers(0, 9)),
    }
    columns = list(rng.permutation(list(COLUMNS)))[: 4 if part.tag == 0 else int(rng.integers(1, 4))]
    return {str(column): every[column] for column in columns}


def same(got: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return got.keys() == expected.keys() and all(np.array_equal(got[column], expected[column]) for column in got)


class UnitMachine(RuleBasedStateMachine):
    def __init__(self, start: Callable[[], AbstractContextManager[Running]]) -> None:
        super().__init__()
        self.context = start()
        self.unit = self.context.__enter__()
        self.client = Client(self.unit.endpoint)
        self.parts: set[PartId] = set()
        self.left: dict[int, int] = {}
        self.told: list[RowId] = []
        self.pins: dict[int, tuple[list[dict[str, Value]], list[dict[str, Value]]]] = {}

    @rule(rows=st.lists(st.sampled_from(ROWS), unique=True, min_size=1), tag=st.sampled_from(TAGS), place=st.booleans())
    def write(self, rows: list[RowId], tag: int, place: bool) -> None:
        cells = {row: cells_of(PartId(*row, tag)) for row in rows}
        try:
            if place and isinstance(self.unit.storage, ArenaStorage):
                self.write_in_place(cells, tag)
            else:
                self.client.write(cells, tag)
        except StorageFull:
            return
        except StaleRowError:
            assert any(row.generation <= self.left.get(row.slot, -1) for row in rows)
            return
        assert all(row.generation > self.left.get(row.slot, -1) for row in rows)
        self.parts |= {PartId(*row, tag) for row in rows}
        if tag == 0:
            self.told += rows

    def write_in_place(self, cells: dict[RowId, dict[str, Value]], tag: int) -> None:
        runs, memory = described(cells)
        reserved = self.client.ask(Reserve(len(memory)))
        assert isinstance(reserved, Reserved)
        place = Place(int(reserved.segment), reserved.offset, len(memory), reserved.place)
        view_of(self.unit.view, place)[:] = memory
        try:
            assert self.client.ask(Write(tag, pack(cells), runs, reserved.place)) == Accepted()
        except StaleRowError:
            self.client.ask(Done([], [reserved.place]))
            raise

    @precondition(lambda self: self.parts)
    @rule(data=st.data(), shared=st.booleans())
    def read(self, data: st.DataObject, shared: bool) -> None:
        parts = data.draw(st.lists(st.sampled_from(sorted(self.parts)), min_size=1))
        columns = data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), unique=True, min_size=1))
        tags = [[self.tag_with(part, column, data.draw(st.booleans())) for column in columns] for part in parts]
        rows = [RowId(part.slot, part.generation) for part in parts]
        expected = [
            {column: cells_of(PartId(*row, tag)).get(column) for column, tag in zip(columns, of_row, strict=True)}
            for row, of_row in zip(rows, tags, strict=True)
        ]
        try:
            reply = self.client.call(read(rows, columns, tags, shared=shared))
        except ColumnError:
            assert any(value is None for cells in expected for value in cells.values())
            return
        assert isinstance(reply.answer, Cells)
        memories: list[Any] = list(reply.frames)
        if reply.answer.pin is not None:
            assert shared
            directory = self.unit.view
            memories = [view_of(directory, Place(int(name), 0, size, 0)) for name, size in self.segments(reply.answer)]
        got = cells_in(reply.answer, columns, memories)
        assert all(map(same, got, expected))
        if reply.answer.pin is not None:
            self.pins[reply.answer.pin] = (got, expected)

    def tag_with(self, part: PartId, column: str, other: bool) -> int:
        """A tag of a part of the same row that has `column`, if `other` and there is one; else the part's own tag."""
        tags = [tag for tag in TAGS if part._replace(tag=tag) in self.parts]
        return next((tag for tag in tags if other and column in cells_of(part._replace(tag=tag))), part.tag)

    def segments(self, cells: Cells) -> list[tuple[str, int]]:
        assert isinstance(self.unit.storage, ArenaStorage)
        return [(name, (self.unit.storage.directory / name).stat().st_size) for name in cells.segments]

    @rule(row=st.sampled_from(ROWS), tag=st.sampled_from(TAGS))
    def read_what_may_be_missing(self, row: RowId, tag: int) -> None:
        part = PartId(*row, tag)
        column = next(iter(cells_of(part)))
        if part not in self.parts:
            with pytest.raises(StaleRowError, match=rf"slot={row.slot}, generation={row.generation}, tag={tag}"):
                self.client.read([row], [column], tag)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(sorted(self.pins)))
        del self.pins[pin]
        self.client.ask(Done([pin], []))

    @rule(
        parts=st.lists(st.sampled_from([PartId(row.slot, row.generation, tag) for row in ROWS for tag in TAGS])),
        rows=st.lists(st.sampled_from(ROWS), max_size=2),
    )
    def settle(self, parts: list[PartId], rows: list[RowId]) -> None:
        self.client.ask(Settle(packed(parts), pack(rows)))
        self.parts = {part for part in self.parts if part not in parts and part[:2] not in rows}
        for row in rows:
            self.left[row.slot] = max(row.generation, self.left.get(row.slot, -1))

    @invariant()
    def the_inventory_is_what_is_there(self) -> None:
        answer = self.client.ask(Inventory())
        assert isinstance(answer, Parts)
        assert {PartId(*part) for part in unpack(answer.parts, 3).tolist()} == self.parts

    @invariant()
    def pinned_cells_stay_as_they_are(self) -> None:
        for got, expected in self.pins.values():
            assert all(map(same, got, expected))

    def teardown(self) -> None:
        recorder = self.unit.controller
        recorder.wait_for(lambda: sum(len(rows) for _, rows in recorder.written) == len(self.told))
        assert sorted(row for _, rows in recorder.written for row in rows) == sorted(self.told)
        self.client.ask(Done(list(self.pins), []))
        self.pins.clear()
        self.client.ask(Settle(packed(sorted(self.parts)), b""))
        assert self.unit.storage.nbytes == 0
        self.client.close()
        self.context.__exit__(None, None, None)


def run_machine(start: Callable[[], AbstractContextManager[Running]]) -> None:
    """Run random users on the units that `start` starts."""
    run: Any = run_state_machine_as_test
    run(
        lambda: UnitMachine(start),
        settings=settings(max_examples=40, stateful_step_count=30),
    )

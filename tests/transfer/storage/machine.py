"""A random user of a storage who compares every answer with a dict.

What it holds: bytes are exact, those of a place that is being written, of a stored part and of a pinned one; live
places never overlap; a refused call changes nothing; and what is taken is counted to the byte.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.storage.arena import ArenaStorage, ArenaView
from tailrace.transfer.queue.storage.base import PartId, Place, Storage
from tests.transfer.storage.views import view_of

MAX_BYTES = 256
PARTS = [PartId(slot, generation, tag) for slot in range(3) for generation in range(2) for tag in (0, 7)]
CONTENTS = st.binary(max_size=48) | st.binary(min_size=16, max_size=96)
NAMES = count()


@dataclass(eq=False)
class Stored:
    content: bytes
    pins: int = 0


@dataclass(eq=False)
class Pin:
    id: int
    parts: list[Stored]
    places: list[Place]


class StorageMachine(RuleBasedStateMachine):
    def __init__(self, make: Callable[[str], Storage]) -> None:
        super().__init__()
        self.make = make
        self.name = f"queue-{next(NAMES)}"
        self.storage = make(self.name)
        self.view = ArenaView(self.storage.directory) if isinstance(self.storage, ArenaStorage) else None
        self.parts: dict[PartId, Stored] = {}
        self.reserved: dict[Place, bytes] = {}
        self.pins: list[Pin] = []

    @property
    def taken(self) -> int:
        stored = {*self.parts.values(), *(part for pin in self.pins for part in pin.parts)}
        return sum(len(part.content) for part in stored) + sum(map(len, self.reserved.values()))

    @rule(content=CONTENTS)
    def reserve(self, content: bytes) -> None:
        self.try_reserve(content)

    def try_reserve(self, content: bytes) -> Place | None:
        """Reserve and write; None where it is full."""
        try:
            place = self.storage.reserve(len(content))
        except StorageFull:
            assert self.view is not None or self.taken + len(content) > MAX_BYTES
            return None
        assert self.taken + len(content) <= MAX_BYTES
        assert place.size == len(content)
        assert place.offset % 8 == 0
        memory = self.storage.memory(place) if self.view is None else view_of(self.view, place)
        memory[:] = content
        self.reserved[place] = content
        return place

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.reserved)))
        content = self.reserved[place]
        ids = data.draw(st.lists(st.sampled_from(PARTS), unique=True, min_size=1, max_size=4))
        cuts = sorted(data.draw(st.lists(st.integers(0, place.size), min_size=len(ids) - 1, max_size=len(ids) - 1)))
        pieces = [content[start:end] for start, end in pairwise([0, *cuts, place.size])]
        written = dict(zip(ids, pieces, strict=True))
        parts = [(part, len(piece)) for part, piece in written.items()]
        if any(part in self.parts and self.parts[part].content != piece for part, piece in written.items()):
            with pytest.raises(QueueError, match="other bytes"):
                self.storage.commit(place, parts)
            return
        self.storage.commit(place, parts)
        self.forget(place)
        self.parts = {part: Stored(piece) for part, piece in written.items()} | self.parts

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.parts)), unique=True, min_size=1))
        place = self.try_reserve(b"".join(self.parts[part].content for part in ids))
        if place is not None:
            self.storage.commit(place, [(part, len(self.parts[part].content)) for part in ids])
            self.forget(place)

    @precondition(lambda self: self.view is not None)
    @rule()
    def trim(self) -> None:
        assert isinstance(self.storage, ArenaStorage)
        self.storage.trim()

    @rule(written=st.dictionaries(st.sampled_from(PARTS), CONTENTS, max_size=4))
    def store(self, written: dict[PartId, bytes]) -> None:
        parts = [(part, memoryview(content)) for part, content in written.items()]
        if any(part in self.parts and self.parts[part].content != content for part, content in written.items()):
            with pytest.raises(QueueError, match="other bytes"):
                self.storage.store(parts)
            return
        fresh = {part: Stored(content) for part, content in written.items() if part not in self.parts}
        needed = sum(len(stored.content) for stored in fresh.values())
        try:
            self.storage.store(parts)
        except StorageFull:
            assert self.view is not None or self.taken + needed > MAX_BYTES
            return
        assert self.taken + needed <= MAX_BYTES
        self.parts |= fresh

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), wrong=st.sampled_from([-1, 1]))
    def commit_badly(self, data: st.DataObject, wrong: int) -> None:
        place = data.draw(st.sampled_from(sorted(self.reserved)))
        for parts, message in (
            ([(PARTS[0], place.size + wrong)], r"bytes in all came in|must be 0 or more"),
            ([(PARTS[0], place.size), (PARTS[0], 0)], "named twice"),
            ([(PARTS[0], place.size + 1), (PARTS[1], -1)], "must be 0 or more"),
        ):
            with pytest.raises(QueueError, match=message):
                self.storage.commit(place, parts)
        with pytest.raises(QueueError, match="is not reserved"):
            self.storage.commit(place._replace(size=place.size + wrong), [(PARTS[0], place.size + wrong)])

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.reserved)))
        self.storage.abandon(place)
        self.forget(place)

    @rule(parts=st.lists(st.sampled_from(PARTS)))
    def drop(self, parts: Sequence[PartId]) -> None:
        self.storage.drop(parts)
        for part in parts:
            self.parts.pop(part, None)
            for call in (self.storage.read, self.storage.size, lambda part: self.storage.read_many([part])):
                with pytest.raises(StaleRowError, match="not stored"):
                    call(part)

    @precondition(lambda self: self.view is not None and self.parts)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        assert isinstance(self.storage, ArenaStorage)
        ids = data.draw(st.lists(st.sampled_from(sorted(self.parts)), max_size=4))
        self.pins.append(Pin(self.storage.pin(ids), [self.parts[part] for part in ids], self.storage.places(ids)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        assert isinstance(self.storage, ArenaStorage)
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.storage.unpin(pin.id)
        with pytest.raises(QueueError, match="there is no pin"):
            self.storage.unpin(pin.id)

    @invariant()
    def parts_are_those_of_the_model(self) -> None:
        assert sorted(self.storage.parts()) == sorted(self.parts)
        for part, stored in self.parts.items():
            assert part in self.storage
            read = self.storage.read(part)
            assert read.readonly
            assert read == stored.content
            assert self.storage.size(part) == len(stored.content)
        assert self.storage.read_many([*self.parts]) == [stored.content for stored in self.parts.values()]
        assert self.storage.nbytes == self.taken

    @invariant()
    def places_hold_what_was_written(self) -> None:
        for place, content in self.reserved.items():
            assert self.storage.memory(place) == content

    @invariant()
    def clients_see_what_is_pinned(self) -> None:
        for pin in self.pins:
            assert self.view is not None
            for part, place in zip(pin.parts, pin.places, strict=True):
                assert view_of(self.view, place) == part.content

    @invariant()
    def live_places_do_not_overlap(self) -> None:
        if isinstance(self.storage, ArenaStorage):
            pinned = (place for pin in self.pins for place in pin.places)
            places = {place[:3] for place in (*self.reserved, *self.storage.places(self.parts), *pinned) if place.size}
            for before, after in pairwise(sorted(places)):
                assert before[0] < after[0] or before[1] + before[2] <= after[1]

    def forget(self, place: Place) -> None:
        """It is reserved no more, and every further call with it is refused."""
        del self.reserved[place]
        for call in (self.storage.memory, self.storage.abandon, lambda place: self.storage.commit(place, [])):
            with pytest.raises(QueueError, match="is not reserved"):
                call(place)

    def teardown(self) -> None:
        for pin in self.pins:
            assert isinstance(self.storage, ArenaStorage)
            self.storage.unpin(pin.id)
        for place in self.reserved:
            self.storage.abandon(place)
        self.storage.drop(PARTS)
        assert self.storage.nbytes == 0
        self.storage.abandon(self.storage.reserve(MAX_BYTES))
        self.storage.close()


class DurableMachine(StorageMachine):
    """Of a storage whose parts survive it."""

    @rule()
    def restart(self) -> None:
        self.storage.close()
        self.storage = self.make(self.name)
        self.reserved.clear()


def run_machine(make: Callable[[], StorageMachine]) -> None:
    """Let random users loose on what `make` makes."""
    run: Any = run_state_machine_as_test
    run(make, settings=settings(max_examples=30, stateful_step_count=30))

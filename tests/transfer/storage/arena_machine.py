"""A random user of an arena and its shared memory; `StorageMachine` is that of any storage.

It checks three things more. Bytes are exact also in a place that is being written, and in a pinned part. Live places
never overlap. Both are counted as taken.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tailrace.errors import QueueError, StorageFull
from tailrace.transfer.queue.storage.arena import ArenaStorage, ArenaView, Place
from tests.transfer.storage.machine import CONTENTS, MAX_BYTES, PARTS, StorageMachine, Stored
from tests.transfer.storage.views import view_of


@dataclass(eq=False)
class Pin:
    id: int
    parts: list[Stored]
    places: list[Place]


class ArenaMachine(StorageMachine):
    storage: ArenaStorage

    def __init__(self, parent: Path) -> None:
        super().__init__(lambda name: ArenaStorage(parent=parent, max_bytes=MAX_BYTES, segment_bytes=64))
        self.view = ArenaView(self.storage.directory)
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
        """Reserve a place and write to it. Return None if the arena is full."""
        try:
            place = self.storage.reserve(len(content))
        except StorageFull:
            return None
        assert self.taken + len(content) <= MAX_BYTES
        assert place.size == len(content)
        assert place.offset % 8 == 0
        view_of(self.view, place)[:] = content
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

    @rule()
    def trim(self) -> None:
        self.storage.trim()

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

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.parts)), max_size=4))
        self.pins.append(Pin(self.storage.pin(ids), [self.parts[part] for part in ids], self.storage.places(ids)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.storage.unpin(pin.id)
        with pytest.raises(QueueError, match="there is no pin"):
            self.storage.unpin(pin.id)

    @invariant()
    def places_hold_what_was_written(self) -> None:
        for place, content in self.reserved.items():
            assert self.storage.memory(place) == content

    @invariant()
    def clients_see_what_is_pinned(self) -> None:
        for pin in self.pins:
            for part, place in zip(pin.parts, pin.places, strict=True):
                assert view_of(self.view, place) == part.content

    @invariant()
    def live_places_do_not_overlap(self) -> None:
        pinned = (place for pin in self.pins for place in pin.places)
        places = {place[:3] for place in (*self.reserved, *self.storage.places(self.parts), *pinned) if place.size}
        for before, after in pairwise(sorted(places)):
            assert before[0] < after[0] or before[1] + before[2] <= after[1]

    def forget(self, place: Place) -> None:
        """Forget a place: it is no longer reserved, and every further call with it is refused."""
        del self.reserved[place]
        for call in (self.storage.memory, self.storage.abandon, lambda place: self.storage.commit(place, [])):
            with pytest.raises(QueueError, match="is not reserved"):
                call(place)

    def teardown(self) -> None:
        for pin in self.pins:
            self.storage.unpin(pin.id)
        for place in self.reserved:
            self.storage.abandon(place)
        super().teardown()

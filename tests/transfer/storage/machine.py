"""A random user of a storage that compares every answer with a dict.

It checks that bytes are exact, that a refused call changes nothing, and that the taken bytes are counted exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.storage.arena import ArenaStorage
from tailrace.transfer.queue.storage.base import PartId, Storage
from tests.transfer.storage.writing import found, lengths_of, store

MAX_BYTES = 256
PARTS = [PartId(slot, generation, tag) for slot in range(3) for generation in range(2) for tag in (0, 7)]
CONTENTS = st.binary(max_size=48) | st.binary(min_size=16, max_size=96)
NAMES = count()


@dataclass(eq=False)
class Stored:
    content: bytes


class StorageMachine(RuleBasedStateMachine):
    def __init__(self, make: Callable[[str], Storage]) -> None:
        super().__init__()
        self.make = make
        self.name = f"queue-{next(NAMES)}"
        self.storage = make(self.name)
        self.parts: dict[PartId, Stored] = {}

    @property
    def taken(self) -> int:
        return sum(len(part.content) for part in self.parts.values())

    def assert_full(self, needed: int) -> None:
        """Assert that the bytes do not fit. The free bytes of an arena need not lie together."""
        assert isinstance(self.storage, ArenaStorage) or self.taken + needed > MAX_BYTES

    @rule(written=st.dictionaries(st.sampled_from(PARTS), CONTENTS, max_size=4))
    def store(self, written: dict[PartId, bytes]) -> None:
        if any(part in self.parts and self.parts[part].content != content for part, content in written.items()):
            with pytest.raises(QueueError, match="other bytes"):
                store(self.storage, written.items())
            return
        fresh = {part: Stored(content) for part, content in written.items() if part not in self.parts}
        needed = sum(len(stored.content) for stored in fresh.values())
        try:
            store(self.storage, written.items())
        except StorageFull:
            self.assert_full(needed)
            return
        assert self.taken + needed <= MAX_BYTES
        self.parts |= fresh

    @rule(parts=st.lists(st.sampled_from(PARTS)))
    def drop(self, parts: Sequence[PartId]) -> None:
        self.storage.drop(parts)
        for part in parts:
            self.parts.pop(part, None)
            for call in (self.storage.read, lambda part: self.storage.read_many([part])):
                with pytest.raises(StaleRowError, match="not stored"):
                    call(part)

    @invariant()
    def parts_are_those_of_the_model(self) -> None:
        assert sorted(self.storage.parts()) == sorted(self.parts)
        for part, stored in self.parts.items():
            assert part in self.storage
            read = self.storage.read(part)
            assert read.readonly
            assert read == stored.content
        assert self.storage.read_many([*self.parts]) == [stored.content for stored in self.parts.values()]
        assert self.storage.nbytes == self.taken

    def teardown(self) -> None:
        self.storage.drop(PARTS)
        assert self.storage.nbytes == 0
        store(self.storage, [(PARTS[0], bytes(MAX_BYTES))])
        self.storage.close()


class DurableMachine(StorageMachine):
    """The machine of a storage whose parts survive it."""

    @rule()
    def restart(self) -> None:
        self.storage.close()
        self.storage = self.make(self.name)

    @invariant()
    def another_one_would_know_what_is_there(self) -> None:
        sizes = {part: len(stored.content) for part, stored in self.parts.items()}
        assert found(self.storage) == {part: (size, lengths_of(size)) for part, size in sizes.items()}


def run_machine(make: Callable[[], StorageMachine]) -> None:
    """Run random users on the machines that `make` makes."""
    run: Any = run_state_machine_as_test
    run(make, settings=settings(max_examples=30, stateful_step_count=30))

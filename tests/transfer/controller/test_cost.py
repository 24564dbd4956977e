"""The cost of a small put in its controller, without the wire. It is a count of calls, the same on every machine."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tailrace.transfer.queue import controller, rows
from tailrace.transfer.queue.policies.first_in import FirstIn
from tests.transfer.controller.fakes import FakeUnit, Site
from tests.transfer.controller.talk import small
from tests.transfer.tables import group, table

FOLDERS = tuple(folder for package in (controller, rows) for folder in package.__path__)


def calls_of(action: Callable[[], None]) -> int:
    """The number of calls of functions in FOLDERS, and of calls by them to built-in functions."""
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(FOLDERS)

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(previous)
    return calls


@pytest.mark.parametrize(("group_size", "most"), [(1, 200), (4, 250)])
def test_a_small_put_takes_few_calls_in_the_controller(tmp_path: Path, group_size: int, most: int) -> None:
    """The calls are counted from Admit to its answer, with the unit's answer to the write between them."""
    queue = Site(lambda: table(FirstIn(9)), tmp_path, units=[FakeUnit("a"), FakeUnit("b")])

    def put(number: int) -> None:
        ticket = queue.send(small(group(number, group_size)))
        for unit in queue.units:
            unit.write_all()
        assert queue.answer(ticket).units == []

    put(0)
    assert calls_of(lambda: put(1)) <= most

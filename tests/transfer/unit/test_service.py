"""What a unit answers, over real sockets, on a storage of every kind."""

from collections.abc import Callable

from tailrace.transfer.queue.storage.base import Storage
from tests.transfer.unit.conftest import running
from tests.transfer.unit.machine import run_machine


def test_cells_are_as_they_were_written_until_they_are_settled(make: Callable[[], Storage]) -> None:
    run_machine(lambda: running(make()))

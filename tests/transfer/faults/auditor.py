"""The auditor, which counts the rows that come out of a queue, and the feeder, which puts lost groups again."""

import threading
from contextlib import suppress

import numpy as np

from tailrace.errors import GroupExists, LeaseError, PeerLost, QueueClosed, QueueTimeout, StaleRowError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import Claim
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tests.transfer.faults.rows import GROUP_SIZE, group, prompt, response
from tests.transfer.faults.worker import SILENCE_S, TIMEOUT_S


class Auditor:
    """A consumer of finished rows that remembers what it has seen."""

    def __init__(self, address: QueueAddress, *, silence_s: float = SILENCE_S) -> None:
        self._queue = SyncQueue(address, name="auditor", timeout_s=TIMEOUT_S, limit_s=silence_s)
        self.groups: set[int] = set()
        """The groups whose rows were acked."""
        self.doubtful: set[int] = set()
        """Groups whose ack may have been taken: the controller was killed before its answer. The journal knows."""

    def audit(self) -> bool:
        """Check a group and ack it. Return whether that succeeded."""
        try:
            claim = self._queue.claim("audit")
            group_id = _check(claim)
        except PeerLost:
            return False
        assert group_id not in self.groups, f"group {group_id} came again after its ack"
        try:
            self._queue.ack(claim, {row.id: {} for row in claim.rows})
        except (LeaseError, StaleRowError):
            return False  # lost, or too late: the group comes again
        except PeerLost:
            self.doubtful.add(group_id)
            return False
        self.groups.add(group_id)
        return True

    def close(self) -> None:
        """Close the connection."""
        self._queue.__exit__(None, None, None)


def _check(claim: Claim) -> int:
    """Assert that all rows of a claim are right, and return its group."""
    first = claim.rows[0].group_id * GROUP_SIZE
    assert sorted(row.order for row in claim.rows) == list(range(first, first + GROUP_SIZE))
    for row in claim.rows:
        wanted = prompt(row.order)
        np.testing.assert_array_equal(row.cells["prompt_ids"], wanted)
        np.testing.assert_array_equal(row.cells["response_ids"], response(wanted))
    return claim.rows[0].group_id


class Feeder:
    """A thread that puts lost groups again, until the queue is closed."""

    def __init__(self, address: QueueAddress) -> None:
        self._address = address
        self.lost: list[int] = []
        """The lost groups. A group is here once for each time it was lost."""
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread; the queue must be closed."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def _feed(self) -> None:
        with SyncQueue(self._address, name="feeder", timeout_s=TIMEOUT_S, limit_s=SILENCE_S) as queue:
            try:
                while True:
                    self._put_lost(queue)
            except QueueClosed:
                return
            except BaseException as error:
                self._failure = error

    def _put_lost(self, queue: SyncQueue) -> None:
        try:
            for group_id in queue.lost_groups():
                self.lost.append(group_id)
                with suppress(GroupExists):  # its restarted producer was quicker
                    queue.put(group(group_id))
        except (PeerLost, QueueTimeout):
            return  # the next call asks again

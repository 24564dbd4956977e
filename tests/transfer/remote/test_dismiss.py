"""A process that sees a client end reports it, and the client's rows go back at once."""

from pathlib import Path

import pytest

from tailrace.errors import LeaseError
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tests.transfer.client.servers import serving
from tests.transfer.tables import group, one_task

FOREVER_S = 1e6


@pytest.mark.parametrize("name", ["rollout-0", "a-name-with-dashes-" + 40 * "x"])
async def test_rows_of_a_dismissed_client_go_to_the_next_at_once(tmp_path: Path, name: str) -> None:
    with serving(tmp_path, tasks=one_task(FirstIn(9)), unit_limit_s=FOREVER_S) as served:
        async with (
            RemoteQueue(served.address, name="driver", limit_s=FOREVER_S) as driver,
            RemoteQueue(served.address, name=name, limit_s=FOREVER_S) as gone,
            RemoteQueue(served.address, name=f"{name}-1", limit_s=FOREVER_S) as other,
        ):
            await driver.put(group(1, 2))
            lost, kept = await gone.claim("only", limit=1), await other.claim("only", limit=1)
            await driver.dismiss(name)
            again = await driver.claim("only", timeout=20)
            assert [row.id for row in again.rows] == [row.id for row in lost.rows]
            await other.ack(kept, {row.id: {} for row in kept.rows})
            with pytest.raises(LeaseError):
                await gone.ack(lost, {row.id: {} for row in lost.rows})

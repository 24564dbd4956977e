"""A client in a network of its own: python -m tests.transfer.remote.far_client HOST-AND-PORT GROUPS

It puts rows, claims and acks them, and prints a line for each group.
"""

import sys

from tailrace.transfer.queue.client.ack import ack_rows
from tailrace.transfer.queue.client.claim import claim_rows
from tailrace.transfer.queue.client.put import put_rows
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import QUEUE
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.sync import SyncClient
from tests.transfer.client.servers import LIMIT_S, TOKEN
from tests.transfer.tables import group, outputs

LONG = 16_000


def main() -> None:
    endpoint, groups = sys.argv[1], int(sys.argv[2])
    session = Session(endpoint, shared_memory=False)
    with SyncClient("far", TOKEN, QUEUE, patience=Patience(retry_s=0.5)) as client:
        for number in range(groups):
            client.run(put_rows(session, group(number, prompt=LONG), timeout=LIMIT_S))
            claim = client.run(claim_rows(session, "only", limit=1, rank=None, timeout=LIMIT_S))
            client.run(ack_rows(session, claim, outputs(claim), timeout=LIMIT_S))
            print(claim.rows[0].group_id, len(claim.rows[0].cells["prompt_ids"]), flush=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

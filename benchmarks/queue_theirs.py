"""TransferQueue's side of `make bench-queue`: LOGS, or --join ADDRESS for one of its workers.

It runs in TransferQueue's environment and imports nothing of Tailrace. It has one controller and two units of its
SimpleStorage, which talk over TCP. The calls are those of TransferQueue's own synchronous client:

    put       put                claim     get_meta, which marks the rows consumed: there is nothing to release
    end       clear_partition    fetch     get_data

Its controller is in polling mode: by default a `get_meta` that has to wait blocks the controller for everybody. So a
consumer that gets nothing asks again after POLL_S.
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"TQ_NUM_THREADS": "2", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from queue_turns import Array, Rows, Side, take_turns, work
from tensordict import TensorDict

POLL_S = 0.001
ACTORS = 8
"""The number of cores given to Ray: with fewer cores than actors, starting hangs."""


class TheirSide(Side):
    """Rows of a TensorDict: dense where all cells of a column have one length, otherwise jagged."""

    def __init__(self) -> None:
        self._client = transfer_queue.get_client()
        self._partition = ""

    def begin(self, name: str) -> None:
        """See `Side.begin`."""
        self._partition = name

    def prepare(self, rows: Rows) -> TensorDict:
        """See `Side.prepare`."""
        fields = {column: _tensor(cells) for column, cells in rows.items()}
        return TensorDict(fields, batch_size=[len(next(iter(rows.values())))])

    def put(self, prepared: TensorDict) -> None:
        """See `Side.put`."""
        self._client.put(prepared, partition_id=self._partition)

    def claim(self, columns: Sequence[str], rows: int) -> Any:
        """See `Side.claim`."""
        while True:
            meta = self._client.get_meta(list(columns), rows, self._partition, task_name="task")
            if meta.size:
                return meta
            time.sleep(POLL_S)

    def fetch(self, claimed: Any) -> TensorDict:
        """See `Side.fetch`."""
        return self._client.get_data(claimed)

    def arrays(self, fetched: TensorDict) -> dict[str, list[Array]]:
        """See `Side.arrays`."""
        return {
            column: [(tensor.values() if tensor.is_nested else tensor).numpy()] for column, tensor in fetched.items()
        }

    def release(self, claimed: Any) -> None:
        """See `Side.release`."""

    def rows(self, claimed: Any) -> int:
        """See `Side.rows`."""
        return int(claimed.size)

    def end(self) -> None:
        """See `Side.end`."""
        self._client.clear_partition(self._partition)


def _tensor(cells: list[Array]) -> torch.Tensor:
    if len({len(cell) for cell in cells}) == 1:
        return torch.from_numpy(np.stack(cells))
    return torch.nested.as_nested_tensor([torch.from_numpy(cell) for cell in cells], layout=torch.jagged)


def main(logs: Path) -> None:
    """Serve a queue and take turns with it."""
    ray.init(num_cpus=ACTORS, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    config = {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"num_data_storage_units": 2}}}
    transfer_queue.init(OmegaConf.create(config))
    try:
        worker = [__file__, "--join", ray.get_runtime_context().gcs_address]
        take_turns(TheirSide(), worker, logs)
    finally:
        transfer_queue.close()
        ray.shutdown()


def join(address: str) -> None:
    """Be a worker: a client of the queue at `address`."""
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    transfer_queue.init()
    work(TheirSide())


if __name__ == "__main__":
    if sys.argv[1] == "--join":
        join(sys.argv[2])
    else:
        main(Path(sys.argv[1]))

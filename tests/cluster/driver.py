"""A driver in a process of its own: `python -m tests.cluster.driver END`.

It prints, as JSON, the pids of its worker and of what that started, and the directories of its sockets and its shared
memory. When these were looked at, and a line has come in, END says how it goes on: `error` raises, `wait` waits for
Ctrl-C, and then calls the worker once more, `lose` says what it hears when Ray has ended, `close` ends, and waits for a
second only for Ray to do so.
"""

import asyncio
import json
import sys
from contextlib import closing, suppress

import psutil

from tailrace.cluster import ray_process
from tailrace.cluster.base import Cluster
from tailrace.cluster.factory import make_cluster
from tailrace.cluster.ray_process import RayProcess
from tailrace.errors import ClusterLost, ModelError, WorkerDied
from tailrace.host.interrupt import Interrupt
from tailrace.transfer.socket_directory import socket_directory
from tailrace.transfer.weights.segments import Pool
from tests.cluster.conftest import CONFIG, POOL, servant


def around(cluster: Cluster) -> list[int]:
    """The pids of all that has been started for Ray."""
    assert isinstance(cluster, RayProcess)
    assert cluster._process is not None
    guard = psutil.Process(cluster._process.pid).parent()
    return [process.pid for process in (guard, *guard.children(recursive=True))]


async def main(end: str) -> None:
    async with make_cluster(CONFIG, {"rollout": POOL}) as cluster:
        with Interrupt().watching() as interrupt, socket_directory() as sockets, closing(Pool()) as memory:
            handle = await cluster.start(servant())
            pids = [handle.pid, await handle.call("start_child"), *around(cluster)]
            print(json.dumps([pids, [str(sockets), str(memory.directory)]]), flush=True)
            sys.stdin.readline()
            try:
                if end == "error":
                    raise ModelError("broken")
                if end == "close":
                    ray_process._CLOSE_LIMIT_S = 1.0
                    return
                if end == "lose":
                    try:
                        with suppress(WorkerDied):  # which may be told first
                            await handle.call("linger", "for ever")
                        await cluster.start(servant("rollout-1"))
                    except ClusterLost as lost:
                        print(lost, flush=True)
                    print(await handle.close(), flush=True)
                    return
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                interrupt.accept()
                print(await handle.call("add", 1, 2), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

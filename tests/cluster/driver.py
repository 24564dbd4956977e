"""A driver in a process of its own: `python -m tests.cluster.driver END`.

It prints, as JSON, the pids of its worker and of the processes around it, and the directories of its sockets and its
shared memory. Then it waits for a line of input. END says how it goes on:

error   raises an error
wait    waits for Ctrl-C, then calls the worker once more
lose    prints the error that it gets when Ray has ended
close   ends, and gives Ray only one second to end
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
    """The pids of all processes that were started for Ray."""
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
                        with suppress(WorkerDied):  # the worker's death may be reported first
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

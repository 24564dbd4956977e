"""A driver in a process of its own: `python -m tests.cluster.driver END`.

It prints, as JSON, the pids of its worker and of what that started, and the directories of its sockets and its shared
memory. When these were looked at, and a line has come in, END says how it goes on: `error` raises, `wait` waits for
Ctrl-C, and then calls the worker once more, `disconnect` lets go of Ray behind the cluster's back, ends, and says
whether there is a Ray again.
"""

import asyncio
import json
import sys
from contextlib import closing

import ray

from tailrace.cluster.factory import make_cluster
from tailrace.errors import ModelError
from tailrace.interrupt import Interrupt
from tailrace.transfer.queue.socket_directory import socket_directory
from tailrace.transfer.weights.segments import Pool
from tests.cluster.conftest import CONFIG, POOL, servant


async def main(end: str) -> None:
    async with make_cluster(CONFIG, {"rollout": POOL}) as cluster:
        with Interrupt().watching() as interrupt, socket_directory() as sockets, closing(Pool()) as memory:
            handle = await cluster.start(servant())
            pids = [handle.pid, await handle.call("start_child")]
            print(json.dumps([pids, [str(sockets), str(memory.directory)]]), flush=True)
            sys.stdin.readline()
            try:
                if end == "error":
                    raise ModelError("broken")
                if end == "disconnect":
                    ray.shutdown()
                    await handle.close()
                    print(ray.is_initialized(), flush=True)
                    return
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                interrupt.accept()
                print(await handle.call("add", 1, 2), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

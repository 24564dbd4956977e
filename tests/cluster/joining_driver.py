"""A driver that joins a cluster of two hosts: `python -m tests.cluster.joining_driver ADDRESS END`.

It prints its datacentre. It starts two workers, each of which takes the one CPU of a host. It prints the facts about
them as JSON, then the pids of the processes that they have started. END says how it goes on: `death` kills the second
worker and prints the error that follows; `wait` waits to be killed itself.
"""

import asyncio
import json
import sys

from tailrace.cluster.factory import make_cluster
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.errors import WorkerDied
from tests.cluster.conftest import servant


async def main(address: str, end: str) -> None:
    pool = PoolConfig(workers=2)
    async with make_cluster(ClusterConfig(address=address, start_limit_s=60.0), {"rollout": pool}) as cluster:
        print(cluster.datacentre, flush=True)
        workers = [await cluster.start(servant(f"rollout-{index}", pool=pool)) for index in range(2)]
        print(json.dumps([worker.facts for worker in workers]), flush=True)
        print(json.dumps([await worker.call("start_child") for worker in workers]), flush=True)
        if end == "wait":
            await asyncio.Event().wait()
        try:
            await workers[1].call("die", 9)
        except WorkerDied as death:
            print(death)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

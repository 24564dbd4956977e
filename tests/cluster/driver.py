"""A driver in a process of its own: `python -m tests.cluster.driver END`.

It prints the pids of its worker and of what that started, as JSON. Then END says how it goes on: `error` raises,
`wait` waits for Ctrl-C, and then calls the worker once more.
"""

import asyncio
import json
import sys

from tailrace.cluster.factory import make_cluster
from tailrace.errors import ModelError
from tailrace.interrupt import Interrupt
from tests.cluster.conftest import CONFIG, POOL, servant


async def main(end: str) -> None:
    async with make_cluster(CONFIG, {"rollout": POOL}) as cluster:
        with Interrupt().watching() as interrupt:
            handle = await cluster.start(servant())
            print(json.dumps([handle.pid, await handle.call("start_child")]), flush=True)
            try:
                if end == "error":
                    raise ModelError("broken")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                interrupt.accept()
                print(await handle.call("add", 1, 2), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

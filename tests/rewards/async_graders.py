"""An asynchronous grader that does as the response says."""

import asyncio
import os
import sys
import time
from typing import Any

_here: list[asyncio.Future[float]] = []


async def meet() -> float:
    """Wait until four gradings are here, and return that number."""
    _here.append(asyncio.get_running_loop().create_future())
    if len(_here) == 4:
        for waiting in _here:
            waiting.set_result(4.0)
    mine = _here[-1]
    if len(_here) == 4:
        _here.clear()
    return await mine


async def score(response: str) -> Any:
    """Do as the response says. A number is the reward."""
    match response:
        case "meet":
            return await meet()
        case "wait":
            await asyncio.sleep(600)
        case "block":
            time.sleep(600)
        case "divide":
            return 1 / 0
        case "exit":
            sys.exit(2)
        case "interrupt":
            raise KeyboardInterrupt
        case "die":
            os._exit(7)
        case "part":
            return {"reward": 0.5, "correct": True}
        case "too late of its own":
            raise TimeoutError("the service")
    return float(response)

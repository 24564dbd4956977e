"""The graders of a reward's workers, as the driver asks them for an evaluation.

A reward model is loaded by its workers alone: the driver's machine may have no device for it. All other graders of an
evaluation are processes beside the driver.
"""

import asyncio
import itertools

from tailrace.cluster.pool import Pool
from tailrace.errors import WorkerDied
from tailrace.rewards.base import Grade, GradingRequest

_AT_ONCE = 64
"""Responses that a worker is asked to grade at a time. An actor has places for a thousand calls, and questions whether
it is alive need one."""


class WorkerGraders:
    """Asks the workers of a pool by turns."""

    def __init__(self, pool: Pool, reward: str) -> None:
        """`reward`: see `RewardsConfig.each`."""
        self._pool = pool
        self._reward = reward
        self._turns = itertools.cycle(range(len(pool.names)))
        self._free = [asyncio.Semaphore(_AT_ONCE) for _ in pool.names]

    async def grade(self, request: GradingRequest) -> Grade:
        """The grade of `request`. A worker that dies meanwhile is asked again when another has taken its place.

        Raises:
            ClusterError: too many workers have died.
        """
        index = next(self._turns)
        async with self._free[index]:
            while True:
                try:
                    grade: Grade = await self._pool.call(index, "grade", self._reward, request)
                    return grade
                except WorkerDied:  # within cluster.max_deaths, which ends the run otherwise
                    continue

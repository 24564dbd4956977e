"""The pool's end of one worker process."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import TypeVar

import msgspec

from tailrace.config.rewards import Grader as GraderConfig
from tailrace.errors import RewardError, UserError, how_ended
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.rewards.wire import LENGTH, Ready, frame

Message = TypeVar("Message")

START_LIMIT_S = 120.0
"""Importing a grader's libraries on a busy machine takes seconds; a module that takes longer hangs."""
_REAP_LIMIT_S = 5.0
"""A killed process is gone in milliseconds; one stuck in the kernel is left to it."""
_EXIT_LIMIT_S = 1.0
"""An interpreter closes its pipes a moment before it exits; the exit code is worth the wait."""
_TAIL_BYTES = 2000


class GraderDied(RewardError):
    """The process ended, or broke the protocol, in the middle of a conversation: `died: how`."""


class GraderProcess:
    """One running worker. An error or the cancellation of a call kills it: make another."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._killed = False
        self._reaped = False
        self._tail = bytearray()
        self._chores = {asyncio.create_task(self._keep_tail()), asyncio.create_task(self._kill_group_at_exit())}

    @classmethod
    async def spawn(cls) -> "GraderProcess":
        """Start a process, which waits for `prepare`.

        Raises:
            GraderDied: the machine has no room for another process.
        """
        # -P: a file of the working directory named like a module of Python must not take its place.
        command = (sys.executable, "-P", "-m", "tailrace.rewards.worker")
        try:
            return cls(
                await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
                )
            )
        except OSError as error:
            raise GraderDied(f"died: no process could be started: {error.strerror}") from None

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return not self._killed and self._process.returncode is None

    async def prepare(self, config: GraderConfig) -> None:
        """Wait until the grader is made.

        Raises:
            UserError: it cannot be made.
            GraderDied: the process died on the way, or was killed after START_LIMIT_S.
        """
        try:
            ready = await self._ask(config.model_dump_json().encode(), Ready, START_LIMIT_S)
        except TimeoutError:
            raise GraderDied(f"died: its grader was not made within {START_LIMIT_S:g} s") from None
        if ready.error is not None:
            await self.kill()
            raise UserError(ready.error)

    async def grade(self, request: GradingRequest, limit_s: float) -> Grade:
        """What the worker says of `request`.

        Raises:
            GraderDied: the process died.
            TimeoutError: it took longer than `limit_s`, and was killed.
        """
        return await self._ask(request, Grade, limit_s)

    async def kill(self) -> None:
        """Kill the whole process group and reap it. Killing twice is harmless."""
        self._killed = True
        if not self._reaped:
            self._kill_group()
        _, stuck = await asyncio.wait(self._chores, timeout=_REAP_LIMIT_S)
        for chore in stuck:
            chore.cancel()

    async def _kill_group_at_exit(self) -> None:
        # What the grader started goes with the worker. Not later on, when the group's number may be another's.
        await self._process.wait()
        self._kill_group()
        self._reaped = True

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):  # gone already
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _ask(self, message: bytes | GradingRequest, kind: type[Message], limit_s: float) -> Message:
        try:
            async with asyncio.timeout(limit_s):
                return await self._exchange(message, kind)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            await self._end()
            raise GraderDied(self._obituary()) from None
        except BaseException:  # too late, or cancelled: its reply would be taken for the next one's
            await self.kill()
            raise

    async def _end(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_LIMIT_S):
                await self._process.wait()
        await self.kill()

    async def _exchange(self, message: bytes | GradingRequest, kind: type[Message]) -> Message:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(frame(message))
        await stdin.drain()
        (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        return msgspec.msgpack.decode(await stdout.readexactly(length), type=kind)

    async def _keep_tail(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while chunk := await stderr.read(65536):
            self._tail += chunk
            del self._tail[:-_TAIL_BYTES]

    def _obituary(self) -> str:
        how = how_ended(self._process.returncode)
        last = " ".join(self._tail.decode(errors="replace").split())
        return f"died: {how}; its last output: {last}" if last else f"died: {how}"

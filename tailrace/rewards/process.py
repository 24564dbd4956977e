"""The pool's end of one grader process.

    grade() ──Call──▶ grader          _listen ◀──Spent, Reply── grader: each to the call with its number
                                      _hear_output ◀──output of the grader

Waiting: a call waits for its reply, up to its limit. When the process ends, every call gets an error that says how.
"""

import asyncio
import itertools
import os
import secrets
import signal
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import psutil

from tailrace.config.rewards import GradingConfig
from tailrace.errors import UNREADABLE, RewardError, UserError, how_ended
from tailrace.host.children import EXIT_LIMIT_S, kill_group, last_output, python_module
from tailrace.host.descendants import kill_all, living
from tailrace.host.frames import frame, receive_frame
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.rewards.output import Lines
from tailrace.rewards.wire import Answer, Call, Ready, Setup, Spent

_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_MARK = "TAILRACE_GRADER"
_REAP_LIMIT_S = 5.0
"""Seconds in which a guard must end. Mostly it ends at once, with all that it guards; a stopped guard is killed."""
_GRACE_S = 1.0
"""Further seconds in which a process with several gradings may itself report that one took too long."""


class GraderDied(RewardError):
    """The process ended or broke the protocol in the middle of its work. The text is `died: how`."""


class _Waiting(NamedTuple):
    """A call without a reply yet."""

    reply: asyncio.Future[list[Grade]]
    spent: Counter[str]


class GraderProcess:
    """One running grader process. A late call kills it. A cancelled call also kills it, if it was alone."""

    def __init__(self, process: Process, mark: str, on_line: Callable[[str], None]) -> None:
        self.concurrency = 1
        """The number of concurrent calls that it takes."""
        self._process = process
        self._mark = mark
        """A mark in the environment of the process and of all that it starts."""
        self._killed = False
        self._why = ""
        self._lines = Lines(on_line)
        self._calls: dict[int, _Waiting] = {}
        self._numbers = itertools.count()
        self._listening: asyncio.Task[None] | None = None
        self._hearing = asyncio.create_task(self._hear_output())

    @classmethod
    async def spawn(cls, on_line: Callable[[str], None]) -> "GraderProcess":
        """Start a process, which waits for `prepare`. `on_line` is called with each line that its grader prints.

        Raises:
            GraderDied: the machine has no room for another process.
        """
        command = python_module("tailrace.rewards.serve")
        mark = secrets.token_hex(16)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, env={**os.environ, _MARK: mark}
            )
        except OSError as error:
            raise GraderDied(f"died: no process could be started: {error.strerror}") from None
        return cls(process, mark, on_line)

    @property
    def alive(self) -> bool:
        """Whether the process can take calls."""
        return not self._killed and self._process.returncode is None

    async def prepare(self, config: GradingConfig, key: str) -> None:
        """Wait until the grader is made. `key`: see `Setup`.

        Raises:
            UserError: the grader cannot be made.
            GraderDied: the process died on the way, or was killed after `config.start_limit_s`.
        """
        setup = Setup(grader=config.grader.model_dump(mode="json"), key=key, timeout_s=config.timeout_s)
        try:
            async with asyncio.timeout(config.start_limit_s):
                await self._send(setup)
                ready = msgspec.msgpack.decode(await self._receive(), type=Ready)
        except TimeoutError:
            await self.kill()
            raise GraderDied(f"died: its grader was not made within {config.start_limit_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, *UNREADABLE):
            raise await self._death() from None
        except BaseException:  # cancelled
            await self.kill()
            raise
        if ready.error is not None:
            await self.kill()
            raise UserError(ready.error)
        self.concurrency = ready.concurrency
        self._listening = asyncio.create_task(self._listen())

    async def grade(
        self, requests: Sequence[GradingRequest], limit_s: float, spent: Counter[str], *, is_check: bool = False
    ) -> list[Grade]:
        """Have the worker grade `requests` together. `is_check`: see `Call`.

        What it spends is added to `spent` when it does, and so stays there when an error is raised.

        Raises:
            GraderDied: the process died.
            TimeoutError: the grading took longer than `limit_s`, and the process was killed.
        """
        alone = self.concurrency == 1
        number = next(self._numbers)
        reply: asyncio.Future[list[Grade]] = asyncio.get_running_loop().create_future()
        self._calls[number] = _Waiting(reply, spent)
        try:
            async with asyncio.timeout(limit_s if alone else limit_s + _GRACE_S):
                with suppress(ConnectionError):  # the process has ended: `_listen` says how
                    await self._send(Call(number, list(requests), is_check))
                return await reply
        except TimeoutError:
            self._why = "killed, since another grading in its process gave no way"
            await self.kill()
            raise
        except asyncio.CancelledError:
            if alone:  # the process would go on with this call, not with the next
                await self.kill()
            raise
        finally:
            del self._calls[number]

    async def kill(self) -> None:
        """End the process with all that its grader has started, and reap it. Calling it twice is harmless."""
        self._killed = True
        for end in (_terminate, kill_group):
            if self._process.returncode is None:
                end(self._process.pid)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_REAP_LIMIT_S):
                        await self._process.wait()
        if self._process.returncode in (None, -signal.SIGKILL):  # its guard may have been killed, and killed nothing
            await asyncio.to_thread(kill_all, lambda: living(self._has_mark))
        tasks = {self._hearing, *({self._listening} if self._listening else ())} - {asyncio.current_task()}
        _, stuck = await asyncio.wait(tasks, timeout=_REAP_LIMIT_S)
        for task in stuck:
            task.cancel()

    def _has_mark(self, process: psutil.Process) -> bool:
        return bool(process.environ().get(_MARK) == self._mark)

    async def _listen(self) -> None:
        """Hand each answer to its call, until the process ends or breaks the protocol."""
        try:
            while True:
                answer = _ANSWERS.decode(await self._receive())
                call = self._calls.get(answer.number)
                if call is None:
                    continue
                if isinstance(answer, Spent):
                    call.spent.update(answer.amounts)
                elif not call.reply.done():
                    call.reply.set_result(answer.grades)
        except (asyncio.IncompleteReadError, ConnectionError, *UNREADABLE):
            death = await self._death()
        for call in self._calls.values():
            if not call.reply.done():
                call.reply.set_exception(death)

    async def _death(self) -> GraderDied:
        """End the process if it has not ended, and return the error that says how it ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_LIMIT_S):
                await self._process.wait()
        await self.kill()
        how = self._why or how_ended(self._process.returncode)
        return GraderDied(f"died: {how}{last_output(self._lines.last)}")

    async def _send(self, message: Setup | Call) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(frame(message))
        await stdin.drain()

    async def _receive(self) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        return await receive_frame(stdout)

    async def _hear_output(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while chunk := await stderr.read(65536):
            self._lines.add(chunk)
        self._lines.end()


def _terminate(guard: int) -> None:
    """Ask a guard to end, and with it all that it guards.

    `Process.terminate` would look first whether the guard has ended, and so reap it; asyncio would then miss its
    status, and report exit code 255.
    """
    with suppress(ProcessLookupError):
        os.kill(guard, signal.SIGTERM)

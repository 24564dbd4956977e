"""The first Ctrl-C, SIGTERM or SIGHUP cancels, a later one exits."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tailrace.host.interrupt import INTERRUPTED, Interrupt, Signalled, stop_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", SIGNALS)
async def test_the_first_signal_cancels_and_the_task_can_go_on_to_save(number: signal.Signals) -> None:
    with Interrupt().watching() as interrupt:
        os.kill(os.getpid(), number)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
        interrupt.accept()
        assert interrupt.asked
        async with asyncio.timeout(10), asyncio.TaskGroup() as saving:
            saved = saving.create_task(asyncio.to_thread(lambda: "saved"))
    assert saved.result() == "saved"


async def test_a_signal_cancels_where_nobody_reads_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Interrupt().watching() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
            interrupt.accept()
        with pytest.raises(BrokenPipeError):
            stderr.flush()
        monkeypatch.undo()
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), writer)


async def test_a_second_signal_exits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exited = asyncio.Event()
    codes: list[int] = []

    def record(code: int) -> None:
        codes.append(code)
        exited.set()

    now = 0.0
    monkeypatch.setattr("tailrace.host.interrupt.os._exit", record)
    with Interrupt(clock=lambda: now).watching() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
        interrupt.accept()
        now = 1.0
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(exited.wait(), timeout=10)
    assert codes == [INTERRUPTED]


async def test_signals_that_come_together_are_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`timeout` sends one signal to its child and one to the child's group."""
    exits: list[int] = []
    monkeypatch.setattr("tailrace.host.interrupt.os._exit", exits.append)
    with Interrupt(clock=lambda: 0.0).watching() as interrupt:
        for number in SIGNALS:  # the system could merge two of one kind
            os.kill(os.getpid(), number)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
        interrupt.accept()
        await asyncio.sleep(0)  # both have been read by now
    assert exits == []
    assert capsys.readouterr().err.count("Stopping") == 1


def test_a_signal_counts_again_after_those_that_came_with_it() -> None:
    now = 5.0
    signalled = Signalled(clock=lambda: now)
    assert [signalled.counts(number) for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)] == [
        True,
        False,
        False,
    ]
    now = 7.0
    assert [signalled.counts(number) for number in (signal.SIGHUP, signal.SIGINT)] == [False, True]


async def test_signals_are_handled_again_after_a_library_took_them() -> None:
    taken: list[int] = []
    with Interrupt().watching() as interrupt:
        signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
        interrupt.handle_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
        interrupt.accept()
    assert taken == []


async def test_signals_are_left_alone_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt().watching():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("before", [False, True])
def test_a_task_of_another_thread_is_cancelled_when_it_is_asked_before_it_begins_or_later(before: bool) -> None:
    interrupt = Interrupt()
    watching = threading.Event()

    async def work() -> str:
        with interrupt.watching():
            watching.set()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
            interrupt.accept()
        return "saved"

    if before:
        interrupt.ask()
    with ThreadPoolExecutor(1) as thread:
        saved = thread.submit(lambda: asyncio.run(work()))
        assert watching.wait(10)
        interrupt.ask()
        interrupt.ask()
        assert saved.result(10) == "saved"
    interrupt.ask()


WATCHER = """
import asyncio, sys
from tailrace.host.interrupt import Interrupt
from tailrace.host.streams import outliving_readers

@outliving_readers()
def main():
    asyncio.run(watch())

async def watch():
    with Interrupt().watching() as interrupt:
        print("watching", flush=True)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        except asyncio.CancelledError:
            interrupt.accept()
            print("a line for nobody", flush=True)
            open(sys.argv[1], "w").write("saved")

main()
"""


def test_a_terminal_that_closes_lets_a_run_save_and_print(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    saved = tmp_path / "saved"
    command = ["setsid", "--ctty", sys.executable, "-c", WATCHER, str(saved)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            assert terminal.readline() == b"watching\r\n"
        assert process.wait(30) == 0
    assert saved.read_text() == "saved"


def test_an_interrupt_that_ends_who_reads_the_output_lets_a_run_save_and_print(tmp_path: Path) -> None:
    """In `train | tee log`, tee gets the Ctrl-C, too."""
    saved = tmp_path / "saved"
    command = [sys.executable, "-c", WATCHER, str(saved)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"watching\n"
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert saved.read_text() == "saved"


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in stop_signals()


async def test_a_second_hang_up_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell passes on its own hang-up, and the kernel sends another when the shell has ended."""
    exits: list[int] = []
    now = 0.0
    monkeypatch.setattr("tailrace.host.interrupt.os._exit", exits.append)
    with Interrupt(clock=lambda: now).watching() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
        interrupt.accept()
        now = 10.0
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
    assert exits == []

"""The first Ctrl-C or SIGTERM cancels, a later one exits."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tailrace.interrupt import INTERRUPTED, SIGNALS, Interrupt


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


async def test_a_second_signal_exits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exited = asyncio.Event()
    codes: list[int] = []

    def record(code: int) -> None:
        codes.append(code)
        exited.set()

    now = 0.0
    monkeypatch.setattr("tailrace.interrupt.os._exit", record)
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
    """`timeout` sends one to its child and one to the child's group."""
    exits: list[int] = []
    monkeypatch.setattr("tailrace.interrupt.os._exit", exits.append)
    with Interrupt(clock=lambda: 0.0).watching() as interrupt:
        for number in SIGNALS:  # two of one kind could be one for the system
            os.kill(os.getpid(), number)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
        interrupt.accept()
        await asyncio.sleep(0)  # both have been read by now
    assert exits == []
    assert capsys.readouterr().err.count("Stopping") == 1


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

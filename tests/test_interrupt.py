"""The first Ctrl-C cancels, the second one exits."""

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

    monkeypatch.setattr("tailrace.interrupt.os._exit", record)
    with Interrupt().watching() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
        interrupt.accept()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(exited.wait(), timeout=10)
    assert codes == [INTERRUPTED]


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

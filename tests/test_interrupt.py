"""The first Ctrl-C cancels, the second one exits."""

import asyncio
import os
import signal

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

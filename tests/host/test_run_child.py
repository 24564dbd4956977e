"""A program that is run to its end, or of which nothing is left."""

import os
import select
import signal
import sys
from subprocess import DEVNULL, Popen, TimeoutExpired

import pytest

from tailrace.host.interrupt import stop_signals
from tailrace.host.run_child import run_child

PROGRAM = "trap {at_interrupt} INT; sleep 600 & echo up; wait"
"""Its child holds its output as well, and does not end at Ctrl-C."""


def test_the_exit_code_is_returned() -> None:
    assert run_child([sys.executable, "-c", "raise SystemExit(7)"], stdout=DEVNULL) == 7


def test_variables_are_added_to_those_of_this_process() -> None:
    program = "import os; raise SystemExit(int(os.environ['MORE']) if 'PATH' in os.environ else 1)"
    assert run_child([sys.executable, "-c", program], stdout=DEVNULL, environment={"MORE": "5"}) == 5


def test_what_cannot_be_started_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        run_child(["no-such-program"], stdout=DEVNULL)


@pytest.mark.parametrize("at_interrupt", ["'exit 3'", "''"])
@pytest.mark.parametrize(
    ("number", "raised"),
    [(None, TimeoutExpired), (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, KeyboardInterrupt)],
)
def test_nothing_is_left_of_a_program_that_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals | None, raised: type[BaseException], at_interrupt: str
) -> None:
    def wait_until_up(child: "Popen[bytes]", timeout: float | None = None) -> int:
        if not up:
            up.append(os.read(output, 3))
            if number is not None:
                signal.raise_signal(number)
        return wait(child, timeout)

    def send_after_another(child: "Popen[bytes]", asked: int) -> None:
        if number == signal.SIGTERM:
            signal.raise_signal(number)  # `timeout` sends it twice
        send(child, asked)

    up: list[bytes] = []
    wait, send, (output, written) = Popen.wait, Popen.send_signal, os.pipe()
    handlers = [signal.getsignal(number) for number in stop_signals()]
    monkeypatch.setattr(Popen, "wait", wait_until_up)
    monkeypatch.setattr(Popen, "send_signal", send_after_another)
    monkeypatch.setattr("tailrace.host.run_child._ASKED_LIMIT_S", 0.5)
    with pytest.raises(raised):
        run_child(["sh", "-c", PROGRAM.format(at_interrupt=at_interrupt)], stdout=written, limit_s=0.01)
    os.close(written)
    [ended], _, _ = select.select([output], [], [], 10)  # the end of file comes with the end of the last writer
    assert (up, os.read(ended, 1)) == ([b"up\n"], b"")
    os.close(output)
    assert [signal.getsignal(number) for number in stop_signals()] == handlers

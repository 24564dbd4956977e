"""The memory of this process and of those below it."""

import subprocess
import sys

import pytest

from tailrace.host import memory
from tailrace.host.memory import ProcessMemory

MIB = 2**20


class Clock:
    """A clock on which each look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


TOUCHED = f"""
import mmap
from tailrace.host.memory import ProcessMemory

process = ProcessMemory()
data = b"x" * {64 * MIB}
before = process.resident()
with mmap.mmap(-1, {64 * MIB}) as block:
    mapped = process.resident()
    block.write(data)
    print(mapped - before, process.resident() - before)
"""


def test_memory_that_is_touched_is_resident() -> None:
    # a process of its own: in this one, libraries give memory back whenever they like
    done = subprocess.run([sys.executable, "-c", TOUCHED], check=True, capture_output=True, text=True, timeout=60)
    mapped, touched = map(int, done.stdout.split())
    assert mapped < 32 * MIB
    assert touched >= 60 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell no PSS")
def test_a_process_below_counts_and_pages_that_it_shares_count_once() -> None:
    process = ProcessMemory()
    alone = process.shared_out()
    assert alone is not None
    assert alone <= process.resident()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        below = ProcessMemory()
        together = below.shared_out()
        assert together is not None
        assert together < below.resident()
        assert below.resident() > process.resident()
        child.kill()


def test_the_pages_are_not_visited_more_often_than_their_cost_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    process = ProcessMemory(clock=clock)
    monkeypatch.setattr(memory, "_proportional", lambda _: MIB)
    answers = []
    for _ in range(int(2 / memory.COST)):
        answers.append(process.shared_out())
    first, second = (index for index, answer in enumerate(answers) if answer is not None)
    assert first == 0
    assert second == pytest.approx(1 / memory.COST, rel=0.01), "a look took one second"


def test_there_is_no_peak_of_an_allocator_without_a_gpu() -> None:
    assert memory.take_peak("cpu") is None


def test_asking_for_a_peak_does_not_begin_to_use_a_gpu() -> None:
    code = (
        "import sys, torch; from tailrace.host.memory import take_peak; "
        "sys.exit(take_peak('cuda') != 0 or take_peak('cuda:0') != 0 or torch.cuda.is_initialized())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

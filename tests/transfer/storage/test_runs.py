from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tailrace.transfer.queue.storage.runs import Runs

ALIGN = 8
GAP = 1000
"""The distance of regions, which therefore do not touch."""


class RunsMachine(RuleBasedStateMachine):
    """Compare with a set of free bytes, and with a scan of it for the best fit."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs(align=ALIGN)
        self.free: set[int] = set()
        self.taken: list[tuple[int, int]] = []
        self.regions: list[tuple[int, int]] = []

    @rule(size=st.integers(1, 120))
    def add_region(self, size: int) -> None:
        start = len(self.regions) * GAP
        self.regions.append((start, size))
        self.give(start, size)

    @rule(size=st.integers(1, 60))
    def allocate(self, size: int) -> None:
        fits = [length for start, end in self.free_runs() if (length := end - -(-start // ALIGN) * ALIGN) >= size]
        address = self.runs.allocate(size)
        if address is None:
            assert not fits
            return
        assert address % ALIGN == 0
        (run,) = [run for run in self.free_runs() if run[0] <= address < run[1]]
        assert run[1] - -(-run[0] // ALIGN) * ALIGN == min(fits)
        assert self.free.issuperset(range(address, address + size))
        self.free.difference_update(range(address, address + size))
        self.taken.append((address, size))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_a_piece(self, data: st.DataObject) -> None:
        start, size = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        cut = data.draw(st.integers(0, size))
        if cut < size:
            self.taken.append((start + cut, size - cut))
        self.give(start, cut)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_several(self, data: st.DataObject) -> None:
        runs = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        self.runs.free_all(runs)
        for run in runs:
            self.taken.remove(run)
            self.free.update(range(run[0], sum(run)))

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def withdraw_a_region(self, data: st.DataObject) -> None:
        start, size = data.draw(st.sampled_from(self.regions))
        whole = size > 0 and self.free.issuperset(range(start, start + size))
        assert self.runs.is_free(start, size) == whole
        if whole:
            self.runs.withdraw(start)
            self.free.difference_update(range(start, start + size))

    @invariant()
    def free_runs_are_whole(self) -> None:
        for start, end in self.free_runs():
            assert self.runs.is_free(start, end - start)

    def give(self, start: int, size: int) -> None:
        self.runs.free(start, size)
        self.free.update(range(start, start + size))

    def free_runs(self) -> list[tuple[int, int]]:
        starts = sorted(byte for byte in self.free if byte - 1 not in self.free)
        ends = sorted(byte + 1 for byte in self.free if byte + 1 not in self.free)
        return list(zip(starts, ends, strict=True))


test_runs_are_the_free_bytes_and_the_best_fit_is_taken = RunsMachine.TestCase
test_runs_are_the_free_bytes_and_the_best_fit_is_taken.settings = settings(max_examples=50)

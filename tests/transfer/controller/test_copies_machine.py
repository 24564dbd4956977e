"""Units join, leave and die while rows are put, claimed and acked: no row is lost that a unit has, or comes twice.

After quiet, each row is on `replicas` units, as far as there are so many, and units keep nothing that nobody will read.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tailrace.errors import PeerLost, QueueError, QueueTimeout
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import Ack, Nack, Retire, pack
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.queue.storage.base import PartId
from tests.helpers.effort import effort
from tests.transfer.controller.fakes import FakeUnit, Site
from tests.transfer.controller.talk import claim, stats, store
from tests.transfer.controller.test_controller_machine import ints, one_run
from tests.transfer.tables import group, table

OUTPUTS: dict[str, dict[str, int]] = {"rollout": {"response_ids": 2}, "reward": {"reward": 1}, "actor": {}}
SMALL = 64
"""Bytes of a unit that is soon full."""
TASKS = st.sampled_from(["rollout", "rollout", "reward", "actor"])


@dataclass(frozen=True, slots=True)
class Held:
    """A claim, with the units of each row at that time: its client writes outputs to these."""

    lease: int
    task: str
    units: dict[RowId, tuple[int, ...]]


class UnitsMachine(RuleBasedStateMachine):
    """A user of a controller whose units come and go."""

    @initialize(units=st.integers(1, 3), replicas=st.sampled_from([2, 2, 1]), groups=st.integers(0, 4))
    def start(self, units: int, replicas: int, groups: int) -> None:
        self.folder = TemporaryDirectory()
        self.replicas = min(units, replicas)
        self.site = Site(
            lambda: table(FirstIn(4), WholeGroups(2), WholeGroups(2)),
            Path(self.folder.name),
            units=[FakeUnit(f"u{number}") for number in range(units)],
            replicas=self.replicas,
            lease_s=1e6,
            unit_limit_s=1e6,
        )
        self.made = units
        self.sizes: list[int] = []
        """The rows of each group."""
        self.rows: dict[RowId, int] = {}
        """The group of each row that has not left."""
        self.lost: set[int] = set()
        """Groups that were lost and did not find room yet."""
        self.retired: set[str] = set()
        """The names of units that are to leave."""
        self.held: list[Held] = []
        self.consumed: Counter[tuple[str, RowId]] = Counter()
        for _ in range(groups):
            self.put(2)

    @property
    def control(self) -> ControlPlane:
        return self.site.controller._context.control

    @rule(size=st.integers(1, 3))
    def put(self, size: int) -> None:
        self.sizes.append(size)
        self.enter(len(self.sizes) - 1)

    def enter(self, number: int) -> None:
        try:
            rows = store(self.site, group(number, self.sizes[number]))
        except QueueTimeout:  # no unit has room
            self.lost.add(number)
        else:
            self.lost.discard(number)
            self.rows.update(dict.fromkeys(filter(self.control.is_stored, rows), number))

    @rule(task=TASKS, limit=st.none() | st.integers(1, 4))
    def claim(self, task: str, limit: int | None) -> None:
        try:
            lease, rows = claim(self.site, task, limit=limit)
        except QueueError:
            return  # nothing is ready, or a group is larger than the limit
        for row in rows:
            assert row in self.rows, "a row that has left was handed out"
            assert not self.consumed[task, row], "a row was handed out after its ack"
            assert not any(row in held.units for held in self.held if held.task == task), "a row has two holders"
        self.held.append(Held(lease, task, {row: self.control.units(row) for row in rows}))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), misses=st.booleans())
    def ack(self, data: st.DataObject, misses: bool) -> None:
        """Ack a claim. Of two units or more, one may miss the outputs."""
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        numbers = {unit.number for unit in self.site.units}
        missed = set().union(*held.units.values()) - numbers
        if misses and all(len(numbers.intersection(units)) > 1 for units in held.units.values()):
            missed.add(min(set().union(*held.units.values()) & numbers))
        if OUTPUTS[held.task] and not all(set(units) - missed for units in held.units.values()):
            self.site.ask(Nack(held.lease, None))  # its client has not reached any unit of a row
        else:
            self.do_ack(held, missed if OUTPUTS[held.task] else set())

    def do_ack(self, held: Held, missed: set[int]) -> None:
        for row, units in held.units.items():
            for number in set(units) - missed if OUTPUTS[held.task] else ():
                self.site.unit(number).parts.add(PartId(*row, held.lease))
        rows, runs = list(held.units), one_run(OUTPUTS[held.task], len(held.units))
        self.site.ask(Ack(held.lease, pack(rows), ints([[-1]] * len(rows)), runs, sorted(missed)))
        self.consumed.update((held.task, row) for row in rows)
        self.rows = {row: number for row, number in self.rows.items() if self.control.is_stored(row)}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.site.ask(Nack(held.lease, None))

    @precondition(lambda self: len(self.site.units) < 5)
    @rule(max_bytes=st.sampled_from([2**30, 2**30, SMALL]))
    def join(self, max_bytes: int) -> None:
        self.site.add(FakeUnit(f"u{self.made}", max_bytes=max_bytes))
        self.made += 1

    @precondition(lambda self: len(self.site.units) > 1)
    @rule(data=st.data(), asked=st.booleans())
    def leave(self, data: st.DataObject, asked: bool) -> None:
        unit = data.draw(st.sampled_from(self.site.units))
        if not asked:
            unit.leaving = True
        elif any(other is not unit and not self.is_to_leave(other) for other in self.site.units):
            self.site.ask(Retire(unit.name))
            self.retired.add(unit.name)

    def is_to_leave(self, unit: FakeUnit) -> bool:
        return unit.leaving or unit.name in self.retired

    @precondition(lambda self: len(self.site.units) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Kill a unit. Rows that another unit has stay; the others are lost with their groups, and put again."""
        unit = data.draw(st.sampled_from(self.site.units))
        groups = {number for row, number in self.rows.items() if self.control.units(row) == (unit.number,)}
        unit.die()
        self.retired.discard(unit.name)
        self.site.join(unit)
        gone = {row for row, number in self.rows.items() if number in groups}
        assert not any(map(self.control.is_stored, gone))
        self.rows = {row: number for row, number in self.rows.items() if row not in gone}
        assert all(map(self.control.is_stored, self.rows)), "a row was lost that a unit has"
        left = ({row: units for row, units in held.units.items() if row not in gone} for held in self.held)
        self.held = [replace(held, units=units) for held, units in zip(self.held, left, strict=True) if units]
        for number in groups | self.lost:
            self.enter(number)

    @precondition(lambda self: any(unit.copies for unit in self.site.units))
    @rule(fails=st.sampled_from([False, False, True]))
    def copy(self, fails: bool) -> None:
        self.site.copy(PeerLost("no answer") if fails else None)

    @rule()
    def crash(self) -> None:
        """Kill and restart the controller."""
        self.site.start()

    @rule()
    def live(self) -> None:
        """Let a second pass, in which every unit gives signs of life."""
        for unit in list(self.site.units):
            self.site.join(unit)
        self.site.tick(1.0)

    @invariant()
    def every_row_is_where_it_should_be(self) -> None:
        for row in self.rows:
            assert self.control.is_stored(row), "a row was lost"
            for number in self.control.units(row):
                unit = self.site.unit(number)
                assert {PartId(*row, tag) for tag in self.control.parts(row)} <= unit.parts, "a unit lacks a row"
                assert row not in unit.left, "a unit was told that a row has left that is there"
        counted = {unit.number: unit.rows for unit in stats(self.site).units}
        assert +Counter(counted) == Counter(number for row in self.rows for number in self.control.units(row))

    def teardown(self) -> None:
        if hasattr(self, "site"):
            try:
                self.become_quiet()
                self.drain()
            finally:
                self.site.end()
                self.folder.cleanup()

    def become_quiet(self) -> None:
        for held in self.held:
            self.site.ask(Nack(held.lease, None))
        self.held.clear()
        still = rounds = 0
        while still < 3:
            rounds += 1
            assert rounds < 200, "copies never end"
            self.live()
            still = 0 if any(unit.copies for unit in self.site.units) else still + 1
            self.site.copy()
        self.every_row_is_where_it_should_be()
        staying = {unit.number for unit in self.site.units if not unit.leaving}
        roomy = {unit.number for unit in self.site.units if not unit.leaving and unit.max_bytes > SMALL}
        copies = [len(staying.intersection(self.control.units(row))) for row in self.rows]
        assert all(number >= min(self.replicas, len(roomy)) for number in copies), "a row lacks copies"
        if roomy and min(self.replicas, len(staying)) <= len(roomy):
            assert len(staying) == len(self.site.units), "a unit has not left"
            assert self.retired.isdisjoint(unit.name for unit in self.site.units), "a unit was to leave and stays"
        assert stats(self.site).lacking_rows == sum(number < self.replicas for number in copies)

    def drain(self) -> None:
        for task in OUTPUTS:
            while self.control.stats()[task].ready:
                lease, rows = claim(self.site, task)
                assert not any(self.consumed[task, row] for row in rows)
                self.do_ack(Held(lease, task, {row: self.control.units(row) for row in rows}), set())
        self.live()
        assert not self.rows
        assert set(self.consumed.values()) <= {1}, "a row was consumed twice"
        assert not any(unit.parts for unit in self.site.units), "units keep what nobody will read"


TestUnitsComeAndGo = UnitsMachine.TestCase
TestUnitsComeAndGo.settings = settings(max_examples=effort(150, 40), stateful_step_count=50)

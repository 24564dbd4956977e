"""Short functions for what producers, consumers and units say to a controller without sockets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailrace.transfer.queue.base import NewRow, QueueStats, RowId
from tailrace.transfer.queue.messages import Ack, Admit, Admitted, Claim, Claimed, Stats, Written, pack, row_ids, unpack
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.messages import Accepted
from tests.transfer.controller.fakes import FakeUnit, Site
from tests.transfer.controller.test_controller_machine import admit, ints, one_run
from tests.transfer.tables import table

LIMIT_S = 10.0


def site(directory: Path, units: int = 1, *, lasting: bool = False, **config: Any) -> Site:
    made = [FakeUnit("abc"[number], lasting=lasting) for number in range(units)]
    return Site(lambda: table(FirstIn(9)), directory, units=made, unit_limit_s=LIMIT_S, **config)


def alive(site: Site, seconds: float, *units: FakeUnit) -> None:
    """Let time pass in which `units` give signs of life."""
    for _ in range(int(seconds)):
        for unit in units:
            site.join(unit)
        site.tick(1.0)


def store(site: Site, rows: list[NewRow]) -> list[RowId]:
    """Put rows and write them, and return their ids."""
    admitted: Admitted = site.ask(admit(rows))
    write(site, admitted)
    return row_ids(admitted.rows)


def write(site: Site, admitted: Admitted) -> None:
    for number in admitted.units:
        site.unit(number).parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
        site.ask(Written(number, admitted.rows))


def claim(site: Site, task: str, *, limit: int | None = None, client: str = "client") -> tuple[int, list[RowId]]:
    claimed: Claimed = site.ask(Claim(task, limit, None, 0.0), client)
    return claimed.lease_id, [RowId(slot, generation) for slot, generation, _, _ in unpack(claimed.rows, 4).tolist()]


def ack(site: Site, lease: int, rows: list[RowId], **lengths: int) -> None:
    ack_missing(site, lease, rows, lengths, [])


def ack_missing(site: Site, lease: int, rows: list[RowId], lengths: Mapping[str, int], missed: list[int]) -> None:
    """Ack, with outputs on all units that have the rows, except those in `missed`."""
    for row in rows:
        for unit in site.units:
            if lengths and PartId(*row, 0) in unit.parts and unit.number not in missed:
                unit.parts.add(PartId(*row, lease))
    versions = ints([[-1]] * len(rows))
    assert site.ask(Ack(lease, pack(rows), versions, one_run(lengths, len(rows)), missed)) == Accepted()


def work(site: Site, task: str, **lengths: int) -> list[RowId]:
    lease, rows = claim(site, task)
    ack(site, lease, rows, **lengths)
    return rows


def stats(site: Site) -> QueueStats:
    counts: QueueStats = site.ask(Stats()).stats
    return counts


def small(rows: list[NewRow], **changes: Any) -> Admit:
    """The request of a put whose cells come along."""
    return replaced(admit(rows), cells=b"".join(bytes(8 * len(row.cells["prompt_ids"])) for row in rows), **changes)  # type: ignore[arg-type]


def replaced(message: Admit, **changes: Any) -> Admit:
    return Admit(**{**{field: getattr(message, field) for field in message.__struct_fields__}, **changes})

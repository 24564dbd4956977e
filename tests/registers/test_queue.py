"""All counts of a queue are in the register, and the page of the queue has their series."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tailrace.registers.queue import QUEUE_COUNTS, TASK_COUNTS, UNIT_COUNTS, UP, QueueCount
from tailrace.transfer.queue.base import QueueStats, TaskStats, UnitStats


@pytest.mark.parametrize(
    ("counts", "stats", "no_counts"),
    [
        (QUEUE_COUNTS, QueueStats, {"blocked_by", "closed", "tasks", "units"}),
        (TASK_COUNTS, TaskStats, set()),
        (UNIT_COUNTS, UnitStats, {"number", "name"}),
    ],
)
def test_every_count_that_a_queue_has_is_in_the_register(
    counts: tuple[QueueCount, ...], stats: type[QueueStats] | type[TaskStats] | type[UnitStats], no_counts: set[str]
) -> None:
    assert {count.name for count in counts} == {field.name for field in fields(stats)} - no_counts


def test_the_page_of_the_queue_has_every_series_and_its_labels() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transfer_queue.md").read_text()
    section = page[page.index("## Metrics") :].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|([^|]*)\|", section, re.MULTILINE)
    shown = {
        name: tuple(re.findall(r"`(\w+)`", labels)) for cell, labels in rows for name in re.findall(r"`(\w+)`", cell)
    }
    series = [UP, *(count.series for count in (*QUEUE_COUNTS, *TASK_COUNTS, *UNIT_COUNTS))]
    assert shown == {entry.scraped_name.removeprefix("tailrace_queue_"): entry.labels for entry in series}

import pytest

from tailrace.config.columns import COLUMNS
from tailrace.errors import QueueError
from tailrace.transfer.queue.policies.base import Policy
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.schema import put_columns
from tailrace.transfer.queue.rows.table import QueueTask, check_table
from tailrace.types import TaskSpec
from tests.transfer.tables import table


def task(name: str, reads: tuple[str, ...], writes: tuple[str, ...] = (), policy: Policy | None = None) -> QueueTask:
    return QueueTask(TaskSpec(name=name, reads=reads, writes=writes), policy or FirstIn(1))


SHARED = FirstIn(1)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "at least one task"),
        ([task("a", ("prompt",)), task("a", ("seed",))], "task 'a' is in the table twice"),
        ([task("a", ("prompt",), policy=SHARED), task("b", ("seed",), policy=SHARED)], "share one policy object"),
        ([task("a", ("speed",))], "task 'a' reads 'speed', which is no column of the queue"),
        ([task("a", ("prompt",), ("speed",))], "task 'a' writes 'speed', which is no column of the queue"),
        ([task("a", ("prompt",), ("reward",)), task("b", ("seed",), ("reward",))], "'reward' is written by tasks"),
        ([task("a", ("reward",), ("reward",))], "wait for each other's outputs"),
        ([task("a", ("reward",), ("advantages",)), task("b", ("advantages",), ("reward",))], r"\['a', 'b'\] wait"),
        (
            [task("a", ("prompt_ids",), policy=TokenBudget(8, window=1))],
            "policy of task 'a' looks at 'response_ids'",
        ),
    ],
)
def test_a_table_that_rows_could_not_pass_is_refused(tasks: list[QueueTask], message: str) -> None:
    with pytest.raises(QueueError, match=message):
        check_table(tasks, COLUMNS)


def test_a_sound_table_is_accepted_and_knows_what_rows_must_bring() -> None:
    check_table(table(), COLUMNS)
    assert put_columns(task.spec for task in table()) == {"prompt_ids"}


def test_the_order_of_the_table_does_not_matter() -> None:
    check_table(table()[::-1], COLUMNS)

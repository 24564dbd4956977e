"""A table or a queue that makes no sense is refused in one line."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.load import load_config, parse_as
from tailrace.config.queue_table import ServeConfig, TableConfig
from tailrace.config.transfer import ArenaStorageConfig, ServiceQueueConfig
from tailrace.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
COLUMNS = {"ids": "int64 array", "weights": "float32 array", "text": "str", "score": "float", "extra": "JSON value"}


def table(reads: list[str], policy: dict[str, Any] | None = None) -> TableConfig:
    task = {"name": "sink", "reads": reads} | ({"policy": policy} if policy else {})
    return parse_as(ServeConfig, {"table": {"tasks": [task], "columns": COLUMNS}}, source="t.yaml").table


def balanced(*columns: str) -> dict[str, Any]:
    return {"type": "balanced", "ranks": 2, "rows": 4, "cost_columns": columns}


def token_budget(column: str, tokens: int | None) -> dict[str, Any]:
    return {"type": "token_budget", "tokens": tokens, "prompt_column": "ids", "response_column": column}


def test_a_task_reads_something() -> None:
    with pytest.raises(ConfigError, match=r"^t\.yaml: table\.tasks\.0\.reads is \[\]: it should have at least 1 item"):
        table([])


@pytest.mark.parametrize("column", ["text", "score", "extra"])
def test_a_policy_counts_the_elements_of_arrays_alone(column: str) -> None:
    for policy in (balanced("ids", column), token_budget(column, tokens=8)):
        with pytest.raises(ConfigError, match=f"task 'sink', whose policy {policy['type']} .* '{column}', but that"):
            table(["ids", column], policy)


@pytest.mark.parametrize("policy", [balanced("ids", "weights"), token_budget("weights", 8), token_budget("text", None)])
def test_a_policy_that_counts_arrays_or_nothing_is_as_it_was(policy: dict[str, Any]) -> None:
    assert table(["ids", "weights", "text"], policy).tasks[0].policy.type == policy["type"]


def test_a_row_cannot_be_on_more_units_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"queue\.replicas 3 is more than queue\.units, 2; .* raise units$"):
        load_config(QUICKSTART, ["queue.type=service", "queue.replicas=3"])
    with pytest.raises(ConfigError, match=r"queue\.units is 0: .*greater than 0$"):
        load_config(QUICKSTART, ["queue.type=service", "queue.units=0", "queue.replicas=3"])
    config = load_config(QUICKSTART, ["queue.type=service", "queue.replicas=3", "queue.units=3"])
    assert config.queue == ServiceQueueConfig(units=3, replicas=3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["queue.units=3"], r"queue\.units 3 is no multiple of queue\.controllers, 2"),
        (["queue.units=4", "queue.max_units=7"], r"queue\.max_units 7 is no multiple of queue\.controllers, 2"),
        (["queue.units=4", "queue.replicas=3"], r"queue\.replicas 3 is more than the 2 units of each controller"),
    ],
)
def test_controllers_share_the_units_evenly(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, ["queue.type=service", "queue.controllers=2", *keys])


def test_a_variant_within_a_variant_has_its_default_type_too() -> None:
    config = load_config(QUICKSTART, ["queue.type=service", "queue.storage.directory=/mnt/memory"])
    assert config.queue == ServiceQueueConfig(storage=ArenaStorageConfig(directory="/mnt/memory"))
    with pytest.raises(ConfigError, match=r"queue\.storage\.memory_bytes; it belongs to queue\.storage\.type spill"):
        load_config(QUICKSTART, ["queue.type=service", "queue.storage.memory_bytes=9"])

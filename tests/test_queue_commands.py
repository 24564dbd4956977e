"""`tailrace queue serve` and `tailrace queue top` as a person uses them."""

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from rich.console import Console

from tailrace import queue_top
from tailrace.config.queue_table import TokenBudgetConfig
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.errors import ConfigError, UserError
from tailrace.queue_serving import load_served
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats, TaskStats, UnitStats
from tailrace.transfer.queue.wire.sockets import host_id
from tests.conftest import TinyModel
from tests.runs import small_run, write_prompts

LIMIT_S = 60
COMMAND = (sys.executable, "-m", "tailrace", "queue")
TABLE = {
    "queue": {"units": 1, "storage": {"type": "memory"}},
    "table": {
        "tasks": [
            {"name": "rollout", "reads": ["prompt_ids"], "writes": ["response_ids"]},
            {"name": "sink", "reads": ["response_ids"], "policy": {"type": "first_in", "max_rows": 8}},
        ]
    },
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(TABLE))
    return path


def tailrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)


@contextmanager
def serving(table: Path, directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that serves, and the lines that it has said."""
    command = [*COMMAND, "serve", str(table), "--directory", str(directory), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, [process.stdout.readline() for _ in range(3 if options else 2)]
        finally:
            process.terminate()
            process.wait(LIMIT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_queue_is_served_until_a_signal(table: Path, tmp_path: Path, number: signal.Signals) -> None:
    connection = tmp_path / "queue" / "connection.json"
    with serving(table, tmp_path / "queue") as (process, lines):
        assert f"queue.type=remote queue.connection={connection}" in lines[0]
        assert f"tailrace queue top {connection}" in lines[1]
        done = tailrace("top", str(connection), "--once")
        assert (done.returncode, done.stderr) == (0, "")
        assert [word for word in ("rollout", "sink", "unit-0") if word not in done.stdout] == []
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 0


def test_metrics_are_served_beside_it(table: Path, tmp_path: Path) -> None:
    with (
        serving(table, tmp_path / "queue", "--metrics-port", "0") as (_, lines),
        urlopen(lines[2].split()[-1], timeout=LIMIT_S) as answer,
    ):
        assert b"tailrace_queue_up 1.0" in answer.read()


def test_a_queue_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = tailrace("top", str(tmp_path / "connection.json"), "--once")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "connection.json" in done.stderr


def test_a_queue_that_has_ended_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_top, "_LIMIT_S", 0.2)
    ended = QueueAddress(endpoints=[f"ipc://{tmp_path}/socket"], host=host_id(), token=bytes(32))
    ended.write(tmp_path / "connection.json")
    with pytest.raises(UserError, match=r"^no queue answers at ipc:.* within 0.2 s.*tailrace queue serve`$"):
        queue_top.show(tmp_path / "connection.json", once=True)


def test_a_mistake_in_the_table_is_one_line_and_exit_code_2(table: Path, tmp_path: Path) -> None:
    done = tailrace("serve", str(table), "queue.unit=3", "--directory", str(tmp_path / "queue"))
    assert done.returncode == 2
    assert done.stderr == f"tailrace: {table}: unknown key queue.unit; did you mean queue.units?\n"
    assert not (tmp_path / "queue").exists()


@pytest.mark.parametrize(
    "queue", [{}, {"queue": {"type": "remote", "connection": "c.json"}}, {"queue": {"max_rows": 99}}]
)
def test_the_recipe_of_a_run_serves_the_table_of_the_run(
    tmp_path: Path, tiny_model: TinyModel, queue: dict[str, object]
) -> None:
    run = small_run(tmp_path / "run", tiny_model("llama"), write_prompts(tmp_path / "p.jsonl"))
    values = run.model_dump(mode="json", exclude={"queue"})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**values, **queue}))
    served = load_served(recipe, ["queue.units=3"])
    assert served.queue == ServiceQueueConfig(units=3, max_rows=99 if "max_rows" in str(queue) else 65536)
    assert [task.name for task in served.table.tasks] == ["rollout", "reward", "advantage", "actor"]
    assert isinstance(served.table.tasks[-1].policy, TokenBudgetConfig)


def test_a_recipe_that_is_neither_a_run_nor_a_table_says_what_is_missing(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("queue: {units: 1}")
    with pytest.raises(ConfigError, match="is required and missing"):
        load_served(recipe, [])


def test_the_page_says_why_puts_are_blocked_and_what_is_lost() -> None:
    task = TaskStats(waiting=1, ready=2, leased=3, consumed=40, expired=5, claims=6, wait_s=7.25)
    unit = UnitStats(number=0, name="unit-0", alive=False, rows=8, bytes=9 * 2**20, max_bytes=2**30)
    stats = QueueStats(
        rows=10, bytes=2**20, blocked_puts=2, blocked_by="10 of 10 rows are taken", put_wait_s=1.5, version=3,
        lost_groups=4, tasks={"actor": task}, units=(unit,),
    )  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(queue_top.render(stats))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert " ".join(lines[0]) == "10 rows, 1.0 MiB, weight version 3"
    assert " ".join(lines[1]) == "2 puts are blocked: 10 of 10 rows are taken"
    assert " ".join(lines[2]) == "puts have waited 1.5 s"
    assert " ".join(lines[3]) == "4 groups are lost and have to be put again"
    assert ["actor", "1", "2", "3", "40", "5", "6", "7.2"] in lines
    assert ["unit-0", "dead", "8", "9.0", "1024.0"] in lines

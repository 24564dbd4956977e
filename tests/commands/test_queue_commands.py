"""`tailrace queue serve` and `tailrace queue top` as a person uses them."""

import io
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from rich.console import Console

from tailrace.commands import queue_top
from tailrace.commands.queue_serve import Served, greeting, load_served, serve
from tailrace.config.queue_policies import TokenBudgetConfig
from tailrace.config.queue_table import ServeConfig
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.errors import ConfigError, UserError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats, TaskStats, UnitStats
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.wire.sockets import host_id
from tests.conftest import TinyModel
from tests.helpers.runs import small_run, write_prompts
from tests.transfer.tables import group

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
def serving(
    table: Path, directory: Path, *options: str, last: str = "Watch"
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start a process that serves. Yield it and its output up to the line that begins with `last`."""
    command = [*COMMAND, "serve", str(table), "--directory", str(directory), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline()]
            while lines[-1] and not lines[-1].startswith(last):
                lines.append(process.stdout.readline())
            yield process, lines
        finally:
            process.terminate()
            process.wait(LIMIT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_queue_is_served_until_a_signal(table: Path, tmp_path: Path, number: signal.Signals) -> None:
    connection = tmp_path / "queue" / "connection.json"
    with serving(table, tmp_path / "queue") as (process, lines):
        assert lines[-1] == f"Watch it with: tailrace queue top {connection}\n"
        done = tailrace("top", str(connection), "--once")
        assert (done.returncode, done.stderr) == (0, "")
        assert [word for word in ("rollout", "sink", "unit-0") if word not in done.stdout] == []
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 0


def test_metrics_are_served_beside_it(table: Path, tmp_path: Path) -> None:
    with (
        serving(table, tmp_path / "queue", "--metrics-port", "0", last="Metrics") as (_, lines),
        urlopen(lines[-1].split()[-1], timeout=LIMIT_S) as answer,
    ):
        assert b"tailrace_queue_up 1.0" in answer.read()


def test_a_queue_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = tailrace("top", str(tmp_path / "connection.json"), "--once")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "connection.json" in done.stderr


def test_an_empty_path_is_refused(table: Path) -> None:
    done = tailrace("serve", str(table), "--directory", "")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is empty; give a path" in done.stderr


def test_a_queue_that_has_ended_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_top, "_LIMIT_S", 0.2)
    ended = QueueAddress(endpoints=[f"ipc://{tmp_path}/socket"], host=host_id(), token=bytes(32))
    ended.write(tmp_path / "connection.json")
    with pytest.raises(
        UserError, match=r"^no queue answers at ipc:.* within 0.2 s.*that of a run .* ends with the run"
    ):
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
    assert served.of_run
    assert served.config.queue == ServiceQueueConfig(units=3, max_rows=99 if "max_rows" in str(queue) else 65536)
    assert [task.name for task in served.config.table.tasks] == ["rollout", "reward", "advantage", "actor"]
    assert isinstance(served.config.table.tasks[-1].policy, TokenBudgetConfig)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("queue: {units: 1}", "is neither a table nor a training recipe: it has queue; "),
        ("", "is neither a table nor a training recipe: it has no keys; "),
        ("fruit: red", "is neither a table nor a training recipe: it has fruit; "),
        ("tabel: {tasks: []}", r"unknown key tabel; did you mean table\?$"),
        ("modle: {path: p}", r"unknown key modle; did you mean model\?$"),
        ("output_dir: runs/mine", "is required and missing"),
    ],
)
def test_a_file_that_is_neither_a_run_nor_a_table_is_told_what_it_may_be(
    tmp_path: Path, text: str, message: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_served(recipe, [])
    assert "\n" not in str(caught.value)


def test_a_table_of_ones_own_is_not_for_a_run_but_for_the_lines_that_are_printed(table: Path, tmp_path: Path) -> None:
    with serving(table, tmp_path / "queue") as (_, lines):
        assert "queue.type=remote" not in "".join(lines)
        names: dict[str, Any] = {}
        exec("".join(line.strip() + "\n" for line in lines if line.startswith("    ")), names)
        with names["queue"] as queue:
            queue.put(group(0, size=2))
            assert queue.stats().rows == 2


def test_the_table_of_a_run_is_for_a_run() -> None:
    config = ServeConfig.model_validate(TABLE)
    first, last = greeting(Served(config=config, of_run=True), Path("q/connection.json"))
    assert first.endswith("queue.type=remote queue.connection=q/connection.json")
    assert last == "Watch it with: tailrace queue top q/connection.json"
    first, last = greeting(Served(config=config, of_run=True), Path("my queue/connection.json"))
    assert first.endswith("queue.type=remote 'queue.connection=my queue/connection.json'")
    assert last == "Watch it with: tailrace queue top 'my queue/connection.json'"


def test_what_a_queue_drops_at_its_end_is_said_then_and_when_it_is_served_again(table: Path, tmp_path: Path) -> None:
    with serving(table, tmp_path / "queue") as (process, _):
        assert process.stdout is not None
        with SyncQueue(QueueAddress.read(tmp_path / "queue" / "connection.json"), name="test") as queue:
            queue.put(group(0, size=2))
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().startswith("2 rows are dropped: queue.storage.type=memory")
    with serving(table, tmp_path / "queue", last="1 groups are lost and have to be put again") as (process, lines):
        assert process.stdout is not None
        assert lines[-1]
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""


def test_a_port_of_the_metrics_that_is_taken_is_one_line_before_anything_is_made(tmp_path: Path) -> None:
    served = Served(config=ServeConfig.model_validate(TABLE), of_run=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^--metrics-port {port} cannot be had .*: Address already in use; give"):
            serve(served, tmp_path / "queue", metrics_port=port)
    assert not (tmp_path / "queue").exists()


class Pipe(io.StringIO):
    """A text file that keeps what was flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_without_a_terminal_the_counts_are_printed_each_time_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    QueueAddress(endpoints=[f"ipc://{tmp_path}/s"], host=host_id(), token=bytes(32)).write(tmp_path / "c.json")
    pipe, seen = Pipe(), list[int]()

    def sleep(_: float) -> None:
        seen.append(pipe.flushed.count("3 rows,"))
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr("tailrace.commands.queue_top.time.sleep", sleep)
    monkeypatch.setattr(queue_top, "read_stats", lambda *_, **__: QueueStats(rows=3, bytes=0, blocked_puts=0, tasks={}))
    queue_top.show(tmp_path / "c.json", once=False)
    assert seen == [1, 2, 3]


def test_the_page_says_why_puts_are_blocked_and_what_is_lost() -> None:
    task = TaskStats(waiting=1, ready=2, leased=3, consumed=40, expired=5, claims=6, wait_s=7.25)
    unit = UnitStats(number=0, name="unit-0", alive=False, rows=8, bytes=9 * 2**20, max_bytes=2**30)
    stats = QueueStats(
        rows=10, bytes=2**20, blocked_puts=2, blocked_by="10 of 10 rows are taken", put_wait_s=1.5, version=3,
        lost_groups=4, lacking_rows=6, tasks={"reward[math]": task}, units=(unit,),
    )  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(queue_top.render(stats))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert " ".join(lines[0]) == "10 rows, 1.0 MiB, weight version 3"
    assert " ".join(lines[1]) == "2 puts are blocked: 10 of 10 rows are taken"
    assert " ".join(lines[2]) == "puts have waited 1.5 s"
    assert " ".join(lines[3]) == "4 groups have to be put again"
    assert " ".join(lines[4]) == "6 rows lack copies"
    assert ["reward[math]", "1", "2", "3", "40", "5", "6", "7.2"] in lines
    assert ["unit-0", "dead", "8", "9.0", "1024.0"] in lines

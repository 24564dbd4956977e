"""The documentation shows what really happens."""

import ast
import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.main import get_command

from tailrace.cli import app
from tailrace.commands.generate import Line
from tailrace.commands.queue_serve import load_served
from tailrace.config.columns import ColumnKind
from tailrace.config.generate import EvalConfig
from tailrace.config.load import load_config
from tailrace.config.queue_table import TableConfig
from tailrace.config.shorthand import split_arguments
from tailrace.config.task_source import task_sources
from tailrace.run.queue import run_table
from tailrace.transfer.queue.adapters.tensors import PaddedTensor
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import NewRow, QueueStats
from tailrace.transfer.queue.client.look import read_stats
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tailrace.transfer.queue.rows.table import check_table
from tailrace.transfer.queue.table_factory import make_tasks
from tailrace.types import Value
from tailrace.workloads.trace import COLUMNS
from tests.conftest import TinyModel
from tests.helpers.runs import small_run
from tests.transfer.processes.test_supervisor import queue

ROOT = Path(__file__).parents[1]


def test_the_engine_is_used_from_python_as_its_page_shows(
    tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engine.md").read_text(), re.DOTALL)
    assert "runs/mine/model" in code
    exec(code.replace("runs/mine/model", str(tiny_model("llama"))), {})
    printed = re.findall(r"^(\d) (stop|length|abort) \[", capsys.readouterr().out, re.MULTILINE)
    assert sorted(request_id for request_id, _ in printed) == ["0", "1", "2", "3"]
    assert dict(printed)["3"] == "abort"


QUEUE_PAGE = (ROOT / "docs" / "transfer_queue.md").read_text()


def example(mark: str) -> str:
    """The program on the queue's page that contains `mark`."""
    codes: list[str] = re.findall(r"```python\n(.*?)```", QUEUE_PAGE, re.DOTALL)
    (found,) = [code for code in codes if mark in code]
    return found


@pytest.fixture
def address(tmp_path: Path) -> Iterator[QueueAddress]:
    """The address of a queue with the page's table."""
    (table,) = re.findall(r"```yaml\n(.*?)```", QUEUE_PAGE, re.DOTALL)
    (tmp_path / "table.yaml").write_text(table)
    served = load_served(tmp_path / "table.yaml", ["queue.units=1", "queue.storage.type=memory"]).config
    with QueueProcesses(served.queue, served.table, tmp_path / "queue") as processes:
        yield processes.address


def put_two_groups(address: QueueAddress) -> None:
    cells: dict[str, Value] = {"prompt": "1 + 2 =", "prompt_ids": np.array([5, 6, 7])}
    with SyncQueue(address, name="producer") as queue:
        rows = [NewRow(group_id=k // 4, group_size=4, order=k, cells=cells) for k in range(8)]
        queue.put(rows)


def stats(address: QueueAddress) -> QueueStats:
    return read_stats(address, name="test", limit_s=10.0)


def test_the_table_of_the_reference_can_be_served() -> None:
    tables = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL)
    (table,) = [yaml.safe_load(text)["table"] for text in tables if "table:" in text]
    config = TableConfig.model_validate(table)
    check_table(make_tasks(config), config.columns)


def test_every_kind_of_a_column_is_explained() -> None:
    _, _, table = QUEUE_PAGE.partition("| kind of a column | its cells |")
    explained = re.findall(
        r"`([^`]+)`", "".join(row.split("|")[1] for row in table.partition("\n\n")[0].split("\n")[2:])
    )
    assert explained == [kind.value for kind in ColumnKind]


def test_rows_are_put_claimed_and_acked_as_the_page_shows(
    address: QueueAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(example("SIZE = 4").replace("/var/lib/queue", str(tmp_path / "queue")), {})
    assert capsys.readouterr().out.splitlines() == [f"0 {order} 1 + 2 = [8 9]" for order in range(4)]
    tasks = stats(address).tasks
    assert (tasks["rollout"].ready, tasks["rollout"].consumed, tasks["reward"].ready) == (4, 4, 4)


def test_rows_are_claimed_in_an_event_loop_as_the_page_shows(address: QueueAddress) -> None:
    put_two_groups(address)
    names: dict[str, Any] = {"address": address, "sample": lambda ids: ids[:2]}
    exec(example("async def roll_out"), names)
    asyncio.run(names["roll_out"]())
    assert stats(address).tasks["reward"].ready == 4


def test_rows_come_as_tensors_as_the_page_shows(address: QueueAddress) -> None:
    put_two_groups(address)
    steps: list[tuple[str, dict[str, Value]]]
    steps = [("rollout", {"response_ids": np.array([8, 9])}), ("reward", {"reward": 1.0})]
    with SyncQueue(address, name="test") as queue:
        for task, cells in steps * 2:
            claim = queue.claim(task, limit=4)
            queue.ack(claim, {row.id: cells for row in claim.rows})
    trained = []
    names = {"address": address, "train": lambda *columns: trained.append([tuple(column.shape) for column in columns])}
    exec(example("StreamingDataset(").replace("rows=512", "rows=8"), names)
    assert trained == [[(8, 2), (8,), (8,)]]
    assert stats(address).rows == 0


def test_experience_is_put_and_had_as_the_page_shows(address: QueueAddress) -> None:
    generated = []

    def generate(prompts: PaddedTensor) -> list[torch.Tensor]:
        generated.append(prompts.values.tolist())
        return list(prompts.values)

    exec(example("Experience(queue)"), {"address": address, "generate": generate})
    assert generated == [[[5, 6, 7]] * 4]
    tasks = stats(address).tasks
    assert (tasks["rollout"].ready, tasks["reward"].ready) == (4, 4)


def test_a_program_grades_through_the_queue_of_a_run_as_its_page_shows(tmp_path: Path) -> None:
    table = run_table(small_run(tmp_path, tmp_path, tmp_path))
    with queue(tmp_path / "queue", table=table) as served, SyncQueue(served.address, name="run") as run:
        prompt: dict[str, Value] = {
            "prompt_ids": np.arange(2),
            "prompt": "p",
            "question": "q",
            "answer": "a",
            "metadata": {},
            "task": "",
            "seed": 0,
        }
        run.put([NewRow(group_id=0, group_size=1, order=0, cells=prompt)])
        claim = run.claim("rollout")
        ids = np.arange(3)
        response: dict[str, Value] = {
            "response_ids": ids,
            "response_mask": ids,
            "weight_versions": ids,
            "response": "four",
        }
        sampled: dict[str, Value] = {"rollout_log_probs": np.zeros(3, np.float32), "finish_reason": "stop"}
        run.ack(claim, {row.id: {**response, **sampled} for row in claim.rows})

        def score(response: str) -> float:
            run.close()  # this ends the run, and with it the loop of the example
            return float(len(response))

        exec(example("graded = {"), {"path": served.connection, "score": score})
        assert run.stats().tasks["reward"].consumed == 1


def test_every_field_of_an_output_line_is_explained() -> None:
    _, _, table = (ROOT / "README.md").read_text().partition("| field | |")
    rows = table.partition("\n\n")[0].splitlines()
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")}
    assert explained == set(Line.__struct_fields__)


def test_recipes_of_the_page_on_data_are_valid() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    sections = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    prompts = {"source": {"type": "jsonl", "path": "p.jsonl"}}
    rest = {"output_dir": "x", "rewards": {"grader": {"type": "math"}}, "prompts": prompts}
    evaluated = [load_config({**rest, **yaml.safe_load(section)}).prompts.validation for section in sections]
    assert [list(sets) for sets in evaluated] == [[], ["test", "hard"], [], ["test"]]


def test_the_commands_of_the_page_on_data_are_options_that_there_are() -> None:
    page = (ROOT / "docs" / "data.md").read_text() + (ROOT / "README.md").read_text()
    used = {
        option
        for line in re.findall(r"^\$ tailrace eval .*$", page, re.MULTILINE)
        for option in re.findall(r"--\w+", line)
    }
    assert used == {"--step", "--output", "--prompts", "--samples", "--recipe", "--json"}
    assert used <= {option for parameter in get_command(app).commands["eval"].params for option in parameter.opts}  # type: ignore[attr-defined]


def test_the_tasks_of_the_pages_are_sources_of_prompts() -> None:
    page = (ROOT / "docs" / "data.md").read_text() + (ROOT / "README.md").read_text()
    names: set[str] = set()
    for line in re.findall(r"^\$ tailrace eval (.*)$", page, re.MULTILINE):
        words = shlex.split(line, comments=True)
        values = {words[at + 1] for at, word in enumerate(words) if word.startswith("--") and word != "--json"}
        arguments = [word for word in words[1:] if not word.startswith("--") and word not in values]
        tasks, _ = split_arguments(arguments, EvalConfig.model_fields)
        names |= task_sources(tasks, {}).keys()
    assert names >= {"chain_sum", "leg_counting", "test", "gsm8k"}


def test_the_recipe_of_the_readme_is_valid() -> None:
    (recipe,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert load_config(yaml.safe_load(recipe)).prompts.held_out == 64


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def call_trees(page: Path) -> Iterator[tuple[str, Path]]:
    """Each call that a tree of the page names, such as `Lane.begin`, with the files that the tree gives for it."""
    for head, tree in re.findall(r"```text\ncall +file in (\S+)\n(.*?)```", page.read_text(), re.DOTALL):
        for line in filter(None, tree.splitlines()):
            calls, _, files = line.strip().rpartition("   ")
            names = re.split(r", or |, then |; ", re.split(r":| ──|, meanwhile", calls)[0].strip())
            paths = re.split(r", |; ", files.strip())
            for place, name in enumerate(names):
                yield name, ROOT / head / paths[min(place, len(paths) - 1)]


def defined(file: Path) -> set[str]:
    """The functions, classes and methods that a file defines, methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_every_call_of_a_call_tree_is_in_its_file() -> None:
    calls = [call for page in PAGES for call in call_trees(page)]
    assert len(calls) > 80
    assert [(name, file) for name, file in calls if name not in defined(file)] == []


def test_every_column_of_a_trace_is_explained() -> None:
    page = (ROOT / "docs" / "workloads.md").read_text()
    for name, column in COLUMNS.items():
        assert f"| `{name}` | {'always' if column.is_required else ''} | {column.meaning} |" in page


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)(?:#[\w-]+)?\)", (ROOT / "docs" / "README.md").read_text()))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}

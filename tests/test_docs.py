"""What the documentation shows is what happens."""

import re
from pathlib import Path

import numpy as np
import pytest

from tailrace.algorithms.factory import make_algorithm
from tailrace.config.algorithm import GrpoConfig
from tailrace.generate import Line
from tailrace.run_queue import run_table
from tailrace.transfer.queue.base import NewRow
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.types import Value
from tests.conftest import TinyModel
from tests.runs import small_run
from tests.transfer.test_processes import queue

ROOT = Path(__file__).parents[1]


def test_the_engine_is_used_from_python_as_its_page_shows(
    tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engine.md").read_text(), re.DOTALL)
    assert "runs/mine/model" in example
    exec(example.replace("runs/mine/model", str(tiny_model("llama"))), {})
    printed = re.findall(r"^(\d) (stop|length|abort) \[", capsys.readouterr().out, re.MULTILINE)
    assert sorted(request_id for request_id, _ in printed) == ["0", "1", "2", "3"]
    assert dict(printed)["3"] == "abort"


def test_a_program_grades_through_the_queue_of_a_run_as_its_page_shows(tmp_path: Path) -> None:
    example, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transfer_queue.md").read_text(), re.DOTALL)
    table = run_table(small_run(tmp_path, tmp_path, tmp_path), make_algorithm(GrpoConfig()))
    with queue(tmp_path / "queue", table=table) as served, SyncQueue(served.address, name="run") as run:
        prompt: dict[str, Value] = {"prompt_ids": np.arange(2), "prompt": "p", "answer": "a", "metadata": {}, "seed": 0}
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
        exec(example, {"path": served.connection, "score": lambda response: float(len(response))})
        assert run.stats().tasks["reward"].consumed == 1


def test_every_field_of_an_output_line_is_explained() -> None:
    _, _, table = (ROOT / "README.md").read_text().partition("| field | |")
    rows = table.partition("\n\n")[0].splitlines()
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")}
    assert explained == set(Line.__struct_fields__)

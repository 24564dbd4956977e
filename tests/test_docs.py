"""What the documentation shows is what happens."""

import re
from pathlib import Path

import pytest

from tailrace.generate import Line
from tests.conftest import TinyModel

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


def test_every_field_of_an_output_line_is_explained() -> None:
    _, _, table = (ROOT / "README.md").read_text().partition("| field | |")
    rows = table.partition("\n\n")[0].splitlines()
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")}
    assert explained == set(Line.__struct_fields__)

"""Claims on the file of a prediction."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.errors import PlanError
from tailrace.planning.foretold import Foretold, content_of, read_foretold
from tests.planning.foretold import FIGURES, figures, foretold


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(foretold()))
    assert read_foretold(path) == foretold()
    assert content_of(path, name="it") == path.read_bytes()


def changed(**values: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(foretold()), **values})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "observe.plan 'x' cannot be read: No such file or directory; write it with tailrace plan --output"),
        (b"", "observe.plan 'x' is no prediction: "),
        (b"[1]", "is no prediction: Expected `object`, got `array`"),
        (changed(steps=3), "Object contains unknown field `steps`"),
        (changed(least_s=-1), r"Expected `float` > 0.0 - at `$.least_s`"),
        (changed(tailrace_plan=9), "is a prediction of form 9, and this Tailrace reads form 1; plan anew"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as refused:
        content_of(path, name="observe.plan 'x'")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_decode_step_is_foretold_of_the_batch_that_there_was() -> None:
    plan = foretold()
    assert plan.token_s(FIGURES) == pytest.approx(FIGURES.token_s)
    assert plan.token_s(figures(batch=60.0)) == pytest.approx(2 * FIGURES.token_s), "10 + 30 ms beside 10 + 10"
    halves = Foretold(**{name: getattr(plan, name) for name in plan.__struct_fields__} | {"replicas": 2})
    assert halves.decode_s(FIGURES) == pytest.approx(0.015)

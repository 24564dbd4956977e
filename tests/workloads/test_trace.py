"""A trace holds what can be, and says what cannot."""

import re
from typing import Any

import polars as pl
import pytest

from tailrace.errors import TraceError
from tailrace.workloads.trace import COLUMNS, Provenance, Trace

HERE = Provenance(source="here", context=100, max_new_tokens=50)


def sample(**values: Any) -> dict[str, Any]:
    return {"step": 0, "group": 0, "sample": 0, "prompt_tokens": 10, "response_tokens": 20, **values}


def trace(*rows: dict[str, Any]) -> Trace:
    return Trace.of(pl.DataFrame(list(rows)), HERE)


def test_a_trace_has_every_column_and_is_in_order() -> None:
    made = trace(sample(step=1), sample(group=1), sample(sample=1), sample())
    assert made.samples.columns == list(COLUMNS)
    assert made.samples.select("step", "group", "sample").rows() == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert made.steps == [0, 1]
    assert len(made) == 4


TURN = {"prompt_tokens": 10, "cached_tokens": None, "generated_tokens": 5, "engine_s": 0.5}
CALL = {"turn": 0, "name": "search", "seconds": 0.1, "returned_tokens": 3, "status": "success", "cached": None}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"response_tokens": 0}, ": response_tokens is 0; expected 1 or more"),
        ({"prompt_tokens": -3}, ": prompt_tokens is -3; expected 1 or more"),
        ({"response_tokens": None}, ": response_tokens is None; expected a number"),
        ({"response_tokens": 51}, ": response_tokens is 51; expected at most max_new_tokens, 50"),
        ({"prompt_tokens": 99}, ": response_tokens is 20; expected with its prompt at most the context"),
        ({"reward": float("nan")}, ": reward is nan; expected a finite number"),
        ({"reward_s": -1.0}, ": reward_s is -1.0; expected 0 or more"),
        ({"start": float("inf")}, ": start is inf; expected a finite number"),
        ({"start": -2.0, "end": 1.0}, ": start is -2.0; expected 0 or more"),
        ({"start": 2.0, "end": 1.0}, ": end is 1.0; expected a time after `start`"),
        (
            {"first_version": 2, "last_version": 1},
            ": last_version is 1; expected `first_version` or newer",
        ),
        ({"finish_reason": "eos"}, ": finish_reason is eos; expected one of stop, length, abort"),
        ({"turns": [TURN | {"engine_s": -0.5}]}, ": turns.engine_s is -0.5; expected 0 or more"),
        (
            {"turns": [TURN, TURN | {"engine_s": float("nan")}]},
            ": turns.engine_s is nan; expected 0 or more",
        ),
        ({"tool_calls": [CALL | {"seconds": -0.1}]}, ": tool_calls.seconds is -0.1; expected 0 or more"),
        (
            {"tool_calls": [CALL | {"returned_tokens": -1}]},
            ": tool_calls.returned_tokens is -1; expected",
        ),
        (
            {"response_tokens": 9, "turns": [TURN, TURN]},
            ": response_tokens is 9; expected the sum of the `generated_tokens` of its turns",
        ),
        ({"sample": 0}, "here, row 2 (step 0, group 0, sample 0) was there before"),
    ],
)
def test_a_sample_that_cannot_be_is_named(values: dict[str, Any], message: str) -> None:
    first = dict.fromkeys(values) | sample()
    where = "" if message.startswith("here") else "here, row 2 (step 0, group 0, sample 1)"
    with pytest.raises(TraceError, match=re.escape(where + message)):
        trace(first, sample(sample=1) | values)


def test_a_trace_needs_samples_and_known_columns() -> None:
    with pytest.raises(TraceError, match="here has no samples; a trace needs at least one"):
        Trace.of(pl.DataFrame(schema={"step": pl.Int32}), HERE)
    with pytest.raises(TraceError, match="here has no column 'response_tokens', which every sample needs"):
        trace({name: value for name, value in sample().items() if name != "response_tokens"})
    with pytest.raises(TraceError, match="here has the column 'text'; a trace has step, group"):
        trace(sample(text="no texts"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": "first"}, "here has String in the column 'step'; expected Int32"),
        ({"response_tokens": "20"}, "here has String in the column 'response_tokens'; expected Int32"),
        ({"response_tokens": True}, "here has Boolean in the column 'response_tokens'; expected Int32"),
        ({"kept": 1}, "in the column 'kept'; expected Boolean"),
        ({"group": 5.5}, "here, row 1: group is 5.5; expected Int64"),
        ({"turns": [TURN | {"prompt_tokens": 10.5}]}, "here, row 1: turns is"),
        ({"turns": [TURN | {"text": "no texts"}]}, "in the column 'turns'; expected List"),
        ({"turns": [TURN | {"prompt_tokens": "10"}]}, "in the column 'turns'; expected List"),
    ],
)
def test_a_value_of_another_type_is_not_made_one_of_its_column(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=re.escape(message)):
        trace(sample(**values))


def test_numbers_of_another_width_keep_their_values_and_no_parts_are_unknown() -> None:
    [row] = trace(sample(group=5.0, reward=1, turns=[], tool_calls=[])).samples.rows(named=True)
    assert (row["group"], row["reward"], row["turns"], row["tool_calls"]) == (5, 1.0, None, None)

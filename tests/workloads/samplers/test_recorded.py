"""Recorded groups are drawn whole, with all that belongs to their samples."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import TraceError
from tailrace.workloads.samplers.recorded import Recorded
from tailrace.workloads.trace import Provenance, Trace

TURN = {"prompt_tokens": 3, "cached_tokens": 1, "generated_tokens": 5, "engine_s": 0.5}


def recorded(sizes: list[int]) -> Trace:
    """A trace of two steps with groups of these sizes; every length is another, prompts are numbered from 1."""
    rows = [(step, group, sample) for step in (4, 7) for group, size in enumerate(sizes) for sample in range(size)]
    count = len(rows)
    frame = pl.DataFrame(rows, schema=["step", "group", "sample"], orient="row").with_columns(
        prompt_tokens=pl.col("step") * 100 + pl.col("group") + 1,
        response_tokens=pl.Series(range(1, count + 1)),
        reward_s=pl.Series([float(number) for number in range(count)]),
        kept=pl.Series([number % 2 == 0 for number in range(count)]),
        turns=pl.Series([[TURN | {"generated_tokens": tokens}] for tokens in range(1, count + 1)]),
        start=pl.lit(1.0),
        first_version=pl.lit(3),
    )
    return Trace.of(frame, Provenance(source="run", context=900, max_new_tokens=100, model="m"))


@settings(max_examples=20)
@given(groups=st.integers(1, 9), steps=st.integers(1, 4), seed=st.integers(0, 50))
def test_groups_of_the_recorded_size_stay_whole(groups: int, steps: int, seed: int) -> None:
    trace = recorded([3, 3])
    drawn = Recorded(trace).sample(steps=steps, groups=groups, group_size=3, seed=seed)
    of_prompt = {
        prompt: frame["response_tokens"].to_list() for (prompt,), frame in trace.samples.group_by("prompt_tokens")
    }
    assert (drawn.steps, drawn.groups, len(drawn)) == (list(range(steps)), steps * groups, 3 * steps * groups)
    for _, group in drawn.samples.group_by("step", "group"):
        assert group["sample"].to_list() == [0, 1, 2]
        assert group["response_tokens"].to_list() == of_prompt[group["prompt_tokens"][0]]


@pytest.mark.parametrize("size", [2, 5])
def test_a_group_of_another_size_gives_its_own_samples_alone(size: int) -> None:
    trace = recorded([3, 4])
    drawn = Recorded(trace).sample(steps=2, groups=20, group_size=size, seed=0)
    assert drawn.samples.group_by("step", "group").len()["len"].unique().to_list() == [size]
    known = set(trace.samples.select("prompt_tokens", "response_tokens").rows())
    assert set(drawn.samples.select("prompt_tokens", "response_tokens").rows()) <= known
    assert drawn.samples.group_by("step", "group").agg(pl.col("prompt_tokens").n_unique())["prompt_tokens"].max() == 1


def test_a_sample_keeps_what_belongs_to_it_and_not_the_time_of_its_run() -> None:
    trace = recorded([3, 3])
    drawn = Recorded(trace).sample(steps=1, groups=4, group_size=3, seed=0)
    columns = ["response_tokens", "reward_s", "kept", "turns"]
    assert drawn.samples.select(columns).join(trace.samples.select(columns), on="response_tokens", how="left").select(
        (pl.col("reward_s") == pl.col("reward_s_right")).all(),
        (pl.col("kept") == pl.col("kept_right")).all(),
        (pl.col("turns") == pl.col("turns_right")).all(),
    ).row(0) == (True, True, True)
    assert drawn.samples.select("start", "end", "first_version", "last_version").null_count().row(0) == (12,) * 4
    assert drawn.provenance == Provenance(source="run", context=900, max_new_tokens=100)


def test_a_service_has_no_groups() -> None:
    frame = pl.DataFrame(
        {"step": 0, "group": range(5), "sample": 0, "prompt_tokens": 4, "response_tokens": range(1, 6)}
    )
    service = Recorded(Trace.of(frame, Provenance(source="a service", is_service=True)))
    with pytest.raises(TraceError, match=r"a service has one sample of each prompt, .* draw groups of 1, or fit it"):
        service.sample(steps=1, groups=2, group_size=2, seed=0)
    drawn = service.sample(steps=2, groups=9, group_size=1, seed=0)
    assert (len(drawn), drawn.provenance.is_service) == (18, False)

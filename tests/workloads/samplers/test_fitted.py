"""Samples of parameters have their distributions, their prompts' effects, their limits, and follow from the seed."""

from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import TraceError
from tailrace.workloads.characterization.prompts import intraclass_correlation
from tailrace.workloads.marginals.gamma import Gamma
from tailrace.workloads.marginals.lognormal import Lognormal
from tailrace.workloads.marginals.mixture import Mixture
from tailrace.workloads.marginals.pareto_tail import ParetoTail
from tailrace.workloads.marginals.quantiles import Quantiles
from tailrace.workloads.marginals.shares import Shares
from tailrace.workloads.parameters import (
    FORMAT,
    Amount,
    Figures,
    Parameters,
    Regime,
    Single,
    Tool,
    Trend,
    Turns,
)
from tailrace.workloads.parts import turns_of
from tailrace.workloads.samplers.base import MOST_TOKENS
from tailrace.workloads.samplers.factory import open_workload
from tailrace.workloads.samplers.fitted import Fitted
from tailrace.workloads.trace import Provenance, Trace

LENGTHS = Lognormal(log_mean=6.0, log_deviation=0.6)
MIXTURE = Mixture(weights=[0.1, 0.9], log_means=[2.0, 6.0], log_deviations=[0.8, 0.4])
TALK = Turns(
    count=Amount(distribution=Shares(shares=[0.2, 0.3, 0.5]), prompt_share=0.3),
    calling=[Amount(distribution=Lognormal(log_mean=3.5, log_deviation=0.3)), Amount(distribution=LENGTHS)],
    final=[Amount(distribution=Lognormal(log_mean=5.0, log_deviation=0.5), prompt_share=0.4)],
    tool=Tool(
        name="search",
        returned_tokens=Lognormal(log_mean=6.0, log_deviation=0.2),
        seconds=Quantiles(shares=[0.0, 1.0], values=[1.0, 2.0]),
        hit_share=0.25,
        hit_seconds=Quantiles(shares=[0.0, 1.0], values=[0.0, 0.5]),
    ),
    template_tokens=17,
    first_cached_share=0.9,
    later_cached_share=1.0,
)


def parameters(response: Single | Turns, **changes: Any) -> Parameters:
    plain: dict[str, Any] = {
        "name": "w",
        "about": "",
        "rests_on": "",
        "provenance": Provenance(source="test"),
        "prompt_tokens": Lognormal(log_mean=5.0, log_deviation=0.4),
        "prompt_figures": Figures(mean=1.0),
        "response_figures": Figures(mean=1.0),
    }
    return Parameters(tailrace_workload=FORMAT, response=response, **plain | changes)


def single(distribution: Any = LENGTHS, prompt_share: float = 0.0, **changes: Any) -> Single:
    return Single(tokens=Amount(distribution=distribution, prompt_share=prompt_share), **changes)


def draw(parameters: Parameters, *, steps: int = 1, groups: int = 3000, group_size: int = 4, seed: int = 0) -> Trace:
    return Fitted(parameters).sample(steps=steps, groups=groups, group_size=group_size, seed=seed)


@pytest.mark.parametrize("response", [single(prompt_share=0.2), TALK], ids=["single", "turns"])
def test_the_seed_fixes_every_value_and_a_step_does_not_depend_on_their_number(response: Single | Turns) -> None:
    workload = parameters(response, kept_share=0.5, correct_share=0.5, reward_s=LENGTHS, task="t")
    three = draw(workload, steps=3, groups=20, seed=5)
    assert three.samples.equals(draw(workload, steps=3, groups=20, seed=5).samples)
    two = draw(workload, steps=2, groups=20, seed=5)
    assert three.samples.filter(pl.col("step") < 2).equals(two.samples)
    assert not two.samples.equals(draw(workload, steps=2, groups=20, seed=6).samples)
    first, second = two.samples.partition_by("step", maintain_order=True)
    assert first["response_tokens"].to_list() != second["response_tokens"].to_list()


def test_a_seed_gives_the_same_lengths_on_every_machine() -> None:
    for response, lengths in (
        (single(prompt_share=0.2), [694, 400, 281, 296, 675, 1086]),
        (TALK, [696, 135, 134, 84, 341, 462]),
    ):
        drawn = draw(parameters(response), groups=2, group_size=3, seed=5)
        assert drawn.samples["response_tokens"].to_list() == lengths


@settings(max_examples=8)
@given(
    distribution=st.sampled_from([LENGTHS, MIXTURE, Gamma(shape=0.8, scale=900.0)]),
    share=st.floats(0.0, 0.9),
    seed=st.integers(0, 9),
)
def test_the_prompt_explains_as_much_as_the_parameter_says_and_the_distribution_stays(
    distribution: Any, share: float, seed: int
) -> None:
    drawn = draw(parameters(single(distribution, share)), seed=seed)
    lengths = drawn.samples["response_tokens"].to_numpy()
    assert intraclass_correlation(lengths, drawn.samples["group"], drawn.samples["step"]) == pytest.approx(
        share, abs=0.05
    )
    known = np.maximum(1, distribution.quantile(np.array([0.5, 0.9])))
    assert np.quantile(lengths, [0.5, 0.9]) == pytest.approx(known, rel=0.12)


@pytest.mark.parametrize("correlation", [-0.5, 0.0, 0.3])
def test_prompts_tell_of_responses_what_the_correlation_says(correlation: float) -> None:
    drawn = draw(parameters(single(prompt_share=0.1, rank_correlation=correlation)))
    found = drawn.samples.select(pl.corr("prompt_tokens", "response_tokens", method="spearman")).item()
    assert found == pytest.approx(correlation, abs=0.04)
    assert drawn.samples.group_by("group").agg(pl.col("prompt_tokens").n_unique())["prompt_tokens"].max() == 1


def test_what_is_longer_than_a_limit_is_cut_there() -> None:
    limits = Provenance(source="test", max_new_tokens=600, context=700)
    drawn = draw(parameters(single(), provenance=limits)).samples
    room = pl.min_horizontal(pl.lit(600), 700 - pl.col("prompt_tokens"))
    assert drawn.select((pl.col("response_tokens") <= room).all()).item()
    is_cut = drawn["finish_reason"] == "length"
    assert drawn.select(((pl.col("response_tokens") == room) == is_cut).all()).item()
    assert is_cut.mean() == pytest.approx(0.38, abs=0.1)


def test_as_many_samples_as_the_parameter_says_end_at_the_limit() -> None:
    limited = Provenance(source="test", max_new_tokens=2000)
    drawn = draw(parameters(single(capped_share=0.2), provenance=limited)).samples
    assert (drawn["finish_reason"] == "length").mean() == pytest.approx(0.2, abs=0.02)
    assert drawn.filter(pl.col("finish_reason") == "length")["response_tokens"].unique().to_list() == [2000]
    others = drawn.filter(pl.col("finish_reason") == "stop")["response_tokens"]
    assert others.median() == pytest.approx(np.exp(6.0), rel=0.05)


@pytest.mark.parametrize("change", [0.5, 2.0])
def test_lengths_that_drift_fill_the_room_below_the_limit_and_as_many_are_cut(change: float) -> None:
    limited = Provenance(source="test", max_new_tokens=600)
    drift = Regime(step=1, change=change)
    drawn = draw(parameters(single(capped_share=0.2), provenance=limited, drift=drift), steps=2, groups=1000).samples
    for step in drawn.partition_by("step"):
        assert (step["finish_reason"] == "length").mean() == pytest.approx(0.2, abs=0.02)
        assert step.filter(pl.col("finish_reason") == "stop")["response_tokens"].max() > 590  # type: ignore[operator]


def test_lengths_without_a_limit_end_at_what_a_trace_can_hold() -> None:
    heavy = ParetoTail(body=LENGTHS, threshold=900.0, share=0.5, exponent=0.1)
    for response in (single(heavy), msgspec.structs.replace(TALK, final=[Amount(distribution=heavy)])):
        drawn = draw(parameters(response, prompt_tokens=heavy), groups=50).samples
        most = drawn.select(pl.sum_horizontal(pl.col("prompt_tokens", "response_tokens").cast(pl.Int64)).max()).item()
        assert most == MOST_TOKENS
        assert "length" in drawn["finish_reason"]


def test_lengths_drift_over_steps() -> None:
    grown = draw(parameters(single(), drift=Trend(per_step=0.1, steps=3)), steps=5, groups=500).samples
    medians = grown.group_by("step").agg(pl.col("response_tokens").median()).sort("step")["response_tokens"].to_numpy()
    assert medians / medians[0] == pytest.approx(np.exp([0, 0.1, 0.2, 0.2, 0.2]), rel=0.1)
    changed = draw(parameters(single(), drift=Regime(step=1, change=0.5)), steps=2, groups=500).samples
    before, after = changed.group_by("step").agg(pl.col("response_tokens").median()).sort("step")["response_tokens"]
    assert after / before == pytest.approx(0.5, rel=0.1)


def test_filters_keep_whole_groups_and_rewards_have_their_share() -> None:
    workload = parameters(single(), kept_share=0.3, correct_share=0.7, reward_s=Gamma(shape=2.0, scale=3.0), task="t")
    drawn = draw(workload).samples
    assert drawn["kept"].mean() == pytest.approx(0.3, abs=0.03)
    assert drawn.group_by("group").agg(pl.col("kept").n_unique())["kept"].max() == 1
    assert drawn["reward"].mean() == pytest.approx(0.7, abs=0.03)
    assert drawn["reward_s"].mean() == pytest.approx(6.0, rel=0.05)
    assert drawn["task"].unique().to_list() == ["t"]


def test_a_conversation_reads_all_that_came_before() -> None:
    drawn = draw(parameters(TALK), groups=200)
    assert drawn.samples["turns"].list.len().value_counts(normalize=True).sort("turns")["proportion"].to_list() == (
        pytest.approx([0.2, 0.3, 0.5], abs=0.08)
    )
    for sample in drawn.samples.iter_rows(named=True):
        turns, calls = sample["turns"], sample["tool_calls"] or []
        assert [call["turn"] for call in calls] == list(range(len(turns) - 1))
        assert sample["response_tokens"] == sum(turn["generated_tokens"] for turn in turns)
        assert turns[0]["prompt_tokens"] == sample["prompt_tokens"]
        assert turns[0]["cached_tokens"] == int(0.9 * sample["prompt_tokens"])
        for before, call, after in zip(turns, calls, turns[1:], strict=False):
            context = before["prompt_tokens"] + before["generated_tokens"]
            assert after["prompt_tokens"] == context + call["returned_tokens"] + 17
            assert after["cached_tokens"] == context


def test_turns_have_the_distribution_of_their_number() -> None:
    turns = turns_of(draw(parameters(TALK)))
    calling = turns.filter(pl.col("turn") < pl.col("count") - 1)
    medians = calling.group_by("turn").agg(pl.col("generated_tokens").median()).sort("turn")["generated_tokens"]
    assert medians.to_list() == pytest.approx([np.exp(3.5), np.exp(6.0)], rel=0.1)
    final = turns.filter(pl.col("turn") == pl.col("count") - 1)
    assert final["generated_tokens"].median() == pytest.approx(np.exp(5.0), rel=0.1)
    assert intraclass_correlation(final["generated_tokens"], final["prompt"], final["step"]) == pytest.approx(
        0.4, abs=0.05
    )


def test_turns_of_a_sample_correlate_as_the_parameter_says() -> None:
    talk = msgspec.structs.replace(TALK, turn_correlation=0.6, final=[Amount(distribution=LENGTHS)])
    turns = turns_of(draw(parameters(talk), groups=12_000)).filter(pl.col("count") == 2)
    pairs = turns.pivot("turn", index="row", values="generated_tokens")
    assert pairs.select(pl.corr("0", "1", method="spearman")).item() == pytest.approx(0.6, abs=0.02)


def test_a_cache_answers_its_share_of_calls_in_its_own_time() -> None:
    calls = draw(parameters(TALK), groups=500).samples["tool_calls"].drop_nulls().explode().struct.unnest()
    assert calls["cached"].mean() == pytest.approx(0.25, abs=0.03)
    assert calls.filter(pl.col("cached"))["seconds"].max() <= 0.5  # type: ignore[operator]
    assert calls.filter(~pl.col("cached"))["seconds"].min() >= 1.0  # type: ignore[operator]
    assert calls["name"].unique().to_list() == ["search"]


@given(context=st.integers(200, 2500), limit=st.integers(20, 800), seed=st.integers(0, 9))
@settings(max_examples=10)
def test_conversations_end_at_their_limits(context: int, limit: int, seed: int) -> None:
    limits = Provenance(source="test", context=context, max_new_tokens=limit)
    drawn = draw(parameters(TALK, provenance=limits), groups=30, seed=seed)
    turns = turns_of(drawn)
    assert (turns["prompt_tokens"] + turns["generated_tokens"]).max() <= context  # type: ignore[operator]
    assert drawn.samples["response_tokens"].max() <= limit  # type: ignore[operator]
    full = turns.group_by("row").agg(
        (pl.col("generated_tokens").sum() == limit)
        | ((pl.col("prompt_tokens") + pl.col("generated_tokens")).max() == context)
    )
    is_full = full.sort("row")["generated_tokens"]
    whole = draw(parameters(TALK), groups=30, seed=seed).samples  # the same without limits
    assert whole["finish_reason"].unique().to_list() == ["stop"]
    is_short = drawn.samples["turns"].list.len() < whole["turns"].list.len()
    is_cut = drawn.samples["finish_reason"] == "length"
    assert (is_cut == (is_full | is_short)).all()  # a sample without room for what a tool returns has no further turn
    assert drawn.samples.filter(~is_cut)["turns"].equals(whole.filter(~is_cut)["turns"])


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("groups", 0), ("group_size", 0), ("seed", -1)])
def test_numbers_out_of_range_are_named(name: str, value: int) -> None:
    arguments = {"steps": 1, "groups": 1, "group_size": 1, "seed": 0} | {name: value}
    with pytest.raises(TraceError, match=f"{name} is {value}; expected"):
        Fitted(parameters(single())).sample(**arguments)


def test_more_samples_than_memory_holds_are_refused_before_they_are_drawn() -> None:
    with pytest.raises(TraceError, match=r"100,000,000,000 samples would be drawn at once; at most 50,000,000 are"):
        open_workload("math-32b").sample(steps=1, groups=1000, group_size=10**8, seed=0)

"""A workload that is fitted to samples gives the same samples again."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import TraceError
from tailrace.workloads.fits.goodness import goodness
from tailrace.workloads.fits.workload import fit_workload
from tailrace.workloads.marginals.gamma import Gamma
from tailrace.workloads.marginals.lognormal import Lognormal
from tailrace.workloads.marginals.quantiles import Quantiles
from tailrace.workloads.marginals.shares import Shares
from tailrace.workloads.parameters import Amount, Regime, Single, Trend, Turns
from tailrace.workloads.samplers.fitted import Fitted
from tailrace.workloads.trace import Provenance, Trace
from tests.workloads.samplers.test_fitted import LENGTHS, MIXTURE, TALK, draw, parameters, single


def of_lengths(lengths: list[int], **provenance: Any) -> Trace:
    """A trace with a group for each length."""
    numbers = {"step": 0, "group": range(len(lengths)), "sample": 0, "prompt_tokens": 9, "response_tokens": lengths}
    return Trace.of(pl.DataFrame(numbers), Provenance(source="here", **provenance))


def fitted_single(trace: Trace, **options: Any) -> Single:
    response = fit_workload(trace, "w", **options).response
    assert isinstance(response, Single)
    return response


@settings(max_examples=4)
@given(
    distribution=st.sampled_from([LENGTHS, MIXTURE, Gamma(shape=1.5, scale=400.0)]),
    share=st.floats(0.0, 0.6),
    correlation=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 20),
)
def test_samples_of_a_fit_have_the_quantiles_and_the_prompts_of_what_was_fitted(
    distribution: Any, share: float, correlation: float, seed: int
) -> None:
    true = draw(parameters(single(distribution, share, rank_correlation=correlation)), groups=400, seed=seed)
    found = fit_workload(true, "again")
    for each in goodness(true, Fitted(found)):
        assert each.errors == {50: pytest.approx(0, abs=8), 90: pytest.approx(0, abs=8), 99: pytest.approx(0, abs=16)}
        assert each.ks < 0.06, each.name
    assert isinstance(found.response, Single)
    assert found.response.tokens.prompt_share == pytest.approx(max(share, correlation**2), abs=0.1)
    assert found.response.rank_correlation == pytest.approx(correlation, abs=0.12)


@pytest.mark.parametrize("seed", [5, 6, 11])
def test_a_formula_stays_where_samples_of_a_prompt_are_alike(seed: int) -> None:
    true = draw(parameters(single(prompt_share=0.7)), groups=100, group_size=16, seed=seed)
    assert isinstance(fitted_single(true).tokens.distribution, Lognormal)


def test_conversations_are_fitted_with_all_their_parts() -> None:
    talk = msgspec.structs.replace(TALK, turn_correlation=0.3)
    true = draw(parameters(talk), groups=600, seed=1)
    found = fit_workload(true, "again")
    response = found.response
    assert isinstance(response, Turns)
    assert response.count.distribution.shares == pytest.approx([0.2, 0.3, 0.5], abs=0.03)  # type: ignore[union-attr]
    assert response.count.prompt_share == pytest.approx(0.3, abs=0.05)
    assert [amount.distribution.quantile(np.array([0.5]))[0] for amount in response.calling] == (
        pytest.approx([np.exp(3.5), np.exp(6.0)], rel=0.06)
    )
    assert response.final[0].distribution.quantile(np.array([0.5])) == pytest.approx([np.exp(5.0)], rel=0.06)
    assert response.final[0].prompt_share == pytest.approx(0.4, abs=0.06)
    assert response.turn_correlation == pytest.approx(0.3, abs=0.06)
    assert (response.template_tokens, response.tool.name) == (17, "search")
    assert response.tool.hit_share == pytest.approx(0.25, abs=0.03)
    assert response.tool.seconds is not None
    assert response.tool.seconds.quantile(np.array([0.5])) == pytest.approx([1.5], rel=0.05)
    assert response.first_cached_share == pytest.approx(0.9, abs=0.01)
    assert response.later_cached_share == pytest.approx(1.0)
    for each in goodness(true, Fitted(found)):
        assert each.ks < 0.06, each.name
        assert each.worst < 15 or each.name == "turns", each.name  # their median is between two and three


@pytest.mark.parametrize("single_turns", [0.0, 0.02])
def test_last_turns_keep_their_lengths_where_few_conversations_have_one_turn(single_turns: float) -> None:
    final = [Amount(distribution=Lognormal(log_mean=mean, log_deviation=0.3)) for mean in (2.0, 4.0, 6.0)]
    count = Amount(distribution=Shares(shares=[single_turns, 0.5 - single_turns, 0.5]))
    true = draw(parameters(msgspec.structs.replace(TALK, count=count, final=final)), groups=300)
    response = fit_workload(true, "again").response
    assert isinstance(response, Turns)
    medians = [amount.distribution.quantile(np.array([0.5]))[0] for amount in response.final]
    assert medians[1:] == pytest.approx([np.exp(4.0), np.exp(6.0)], rel=0.06)


def test_conversations_of_two_turns_at_most_are_compared() -> None:
    count = Amount(distribution=Shares(shares=[0.3, 0.7]))
    true = draw(parameters(msgspec.structs.replace(TALK, count=count)), groups=100)
    names = [each.name for each in goodness(true, Fitted(fit_workload(true, "again")))]
    assert "tokens of turn 2" in names
    assert "tokens of turn 3" not in names


def test_turns_that_are_alike_in_a_sample_are_no_effect_of_its_prompt() -> None:
    count = Amount(distribution=Shares(shares=[0.0, 0.0, 1.0]))
    alike = msgspec.structs.replace(TALK, count=count, turn_correlation=0.6, calling=[Amount(distribution=LENGTHS)])
    for size in (1, 4):
        response = fit_workload(draw(parameters(alike), groups=300, group_size=size), "again").response
        assert isinstance(response, Turns)
        assert response.calling[-1].prompt_share == pytest.approx(0.0, abs=0.06)


@pytest.mark.parametrize("name", ["prompt_tokens", "generated_tokens"])
def test_turns_of_unknown_length_are_not_fitted(name: str) -> None:
    true = draw(parameters(TALK), groups=30)
    unknown = pl.element().struct.with_fields(pl.lit(None, pl.Int32).alias(name))
    samples = true.samples.with_columns(pl.col("turns").list.eval(unknown))
    with pytest.raises(TraceError, match=rf"w has \d+ turns without {name}; a fit needs them"):
        fit_workload(Trace.of(samples, true.provenance), "again")


def test_samples_at_the_limit_are_counted_and_the_others_fitted() -> None:
    limited = Provenance(source="test", max_new_tokens=2000)
    true = draw(parameters(single(capped_share=0.2), provenance=limited), groups=800)
    response = fitted_single(true)
    assert response.capped_share == pytest.approx(0.2, abs=0.02)
    assert isinstance(response.tokens.distribution, Lognormal)
    assert response.tokens.distribution.log_mean == pytest.approx(6.0, abs=0.03)
    again = draw(fit_workload(true, "again"), groups=800, seed=3).samples
    assert (again["finish_reason"] == "length").mean() == pytest.approx(0.2, abs=0.03)


def test_drift_is_taken_from_the_lengths_and_given_back() -> None:
    true = draw(parameters(single(), drift=Trend(per_step=0.1, steps=10)), steps=10, groups=200)
    found = fit_workload(true, "again")
    assert isinstance(found.drift, Trend)
    assert isinstance(found.response, Single)
    assert isinstance(found.response.tokens.distribution, Lognormal)
    assert found.response.tokens.distribution.log_mean == pytest.approx(6.0, abs=0.05)
    again = draw(found, steps=10, groups=200, seed=2).samples
    by_step = [
        each.group_by("step").agg(pl.col("response_tokens").log().mean()).sort("step") for each in (true.samples, again)
    ]
    assert by_step[0]["response_tokens"].to_list() == pytest.approx(by_step[1]["response_tokens"].to_list(), abs=0.12)
    flat = draw(parameters(single(), drift=Regime(step=8, change=0.5)), steps=20, groups=100)
    assert isinstance(fit_workload(flat, "again").drift, Regime)


@pytest.mark.parametrize("drift", [Trend(per_step=0.1, steps=20), Regime(step=10, change=3.0)])
@pytest.mark.parametrize("spacing", [1, 5])
def test_lengths_that_drift_are_compared_step_by_step(drift: Trend | Regime, spacing: int) -> None:
    workload = parameters(single(), drift=drift)
    true = draw(workload, steps=40, groups=60, seed=1)
    seen = replace(true, samples=true.samples.filter(pl.col("step") % spacing == 0))
    for each in goodness(seen, Fitted(workload)):
        assert each.ks < 0.05, each.name


def test_shares_of_filters_and_rewards_are_those_of_the_trace() -> None:
    true = draw(parameters(single(), kept_share=0.3, correct_share=0.6, reward_s=LENGTHS, task="t"), groups=300)
    found = fit_workload(true, "again")
    assert found.kept_share == pytest.approx(true.samples["kept"].mean())
    assert found.correct_share == pytest.approx(true.samples["reward"].mean())
    assert found.reward_s is not None
    assert found.task == "t"
    assert found.response_figures.mean == pytest.approx(true.samples["response_tokens"].mean())
    assert found.response_figures.most == true.samples["response_tokens"].max()


def test_prompts_that_are_equally_long_stay_so() -> None:
    random = np.random.default_rng(0)
    found = fit_workload(of_lengths(random.integers(5, 900, 300).tolist()), "w")
    assert isinstance(found.prompt_tokens, Quantiles)
    assert draw(found, groups=9).samples["prompt_tokens"].unique().to_list() == [9]


def test_what_cannot_be_fitted_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="here has 99 samples; a fit needs 100 or more"):
        fit_workload(of_lengths(list(range(1, 100))), "w")
    with pytest.raises(TraceError, match="here has 7 tokens in every response; a fit needs different lengths"):
        fit_workload(of_lengths([7] * 200), "w")
    with pytest.raises(TraceError, match="family 'normal' is none of auto, lognormal, gamma, mixture, quantiles"):
        fit_workload(of_lengths(list(range(1, 200))), "w", family="normal")
    with pytest.raises(TraceError, match="here ends nearly all responses at max_new_tokens, 8"):
        fit_workload(of_lengths([7, *[8] * 150], max_new_tokens=8), "w")
    monkeypatch.setattr("tailrace.workloads.marginals.mixture._ROUNDS", 1)
    with pytest.raises(
        TraceError, match="here: the mixture of 2 components does not converge in 1 rounds; take another"
    ):
        fit_workload(of_lengths(list(range(1, 200))), "w", family="mixture")


def test_the_greatest_value_is_compared_with_the_median_of_that_of_as_many() -> None:
    class Even(Fitted):
        def sample(self, **_: int) -> Trace:
            return of_lengths(list(range(1, 10_001)))

    # All of 100 values are at most 9,931 of 10,000 in half of the cases: 0.9931 to the power of 100 is 0.5.
    found = {each.name: each for each in goodness(of_lengths(list(range(1, 101))), Even(parameters(single())))}
    assert found["response tokens"].most_error == pytest.approx(9931 - 100)


def test_goodness_is_zero_for_the_trace_itself_and_names_what_is_off() -> None:
    class Same(Fitted):
        def sample(self, **_: int) -> Trace:
            return true

    true = draw(parameters(TALK, reward_s=LENGTHS), groups=100)
    found = goodness(true, Same(parameters(TALK)))
    assert [each.name for each in found] == [
        "prompt tokens",
        "response tokens",
        "turns",
        "tokens of turn 1",
        "tokens of turn 2",
        "tokens of turn 3",
        "tokens that a turn reads",
        "tokens from tools",
        "seconds of tools",
        "seconds of rewards",
    ]
    assert {(each.ks, each.worst, each.most_error) for each in found} == {(0.0, 0.0, 0.0)}
    longer = Fitted(parameters(single(Lognormal(log_mean=6.0 + np.log(2), log_deviation=0.6))))
    response = {each.name: each for each in goodness(draw(parameters(single())), longer)}["response tokens"]
    assert response.errors == {
        50: pytest.approx(100, abs=8),
        90: pytest.approx(100, abs=8),
        99: pytest.approx(100, abs=15),
    }
    assert response.ks > 0.4

"""Figures of traces, against values worked out by hand."""

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.workloads.characterization.distribution import Distribution
from tailrace.workloads.characterization.prompts import (
    MAPPED_PROMPTS,
    PromptMap,
    design_effect,
    intraclass_correlation,
    longest_recall,
)
from tailrace.workloads.characterization.steps import tail_share


def test_a_distribution_has_its_figures() -> None:
    found = Distribution.of([2, 4, 4, 4, 5, 5, 7, 9])
    assert found is not None
    assert (found.count, found.mean, found.deviation, found.least, found.most) == (8, 5.0, 2.0, 2.0, 9.0)
    assert found.percentiles[50] == 4.5
    assert found.variation == 0.4
    assert found.tail == pytest.approx(9 / 7.6)
    assert Distribution.of([]) is None


def test_the_prompt_explains_the_share_of_variance_of_the_closed_form() -> None:
    # Two prompts of two: logs 1 and 3, 5 and 7. Between: 2 · ((2 - 4)² + (6 - 4)²) / 1 = 16; within: 4 / 2 = 2.
    lengths = np.exp([1, 3, 5, 7])
    assert intraclass_correlation(lengths, [0, 0, 1, 1], [0] * 4) == pytest.approx((16 - 2) / (16 + 2))
    # Groups of 2 and 1 with logs 1, 3 and 5: between 2 · (2 - 3)² + (5 - 3)² = 6, within 2, size 3 - 5 / 3 = 4 / 3.
    assert intraclass_correlation(np.exp([1, 3, 5]), [0, 0, 1], [0] * 3) == pytest.approx((6 - 2) / (6 + 2 / 3))


def test_the_share_is_found_that_samples_were_drawn_with() -> None:
    random = np.random.default_rng(0)
    prompts = np.repeat(random.normal(6, 0.8, 2000), 8)
    lengths = np.exp(prompts + random.normal(0, 0.6, 16000))
    share = intraclass_correlation(lengths, np.repeat(np.arange(2000), 8), np.repeat(np.arange(10), 1600))
    assert share == pytest.approx(0.8**2 / (0.8**2 + 0.6**2), abs=0.02)


def test_steps_of_different_groups_give_the_share_of_the_closed_form() -> None:
    # Step 0 as above: between 16, within 4 with logs 1, 3 and 5, 7. Step 1 with logs 11, 13 and 15, of groups of 2 and
    # 1: between 2 · (12 - 13)² + (15 - 13)² = 6, within 2. So the mean squares are 22 / (4 - 2) and 6 / (7 - 4), and
    # the size is (7 - (4 + 4) / 4 - (4 + 1) / 3) / (4 - 2) = 5 / 3.
    lengths = np.exp([1, 3, 5, 7, 11, 13, 15])
    found = intraclass_correlation(lengths, [0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1, 1])
    assert found == pytest.approx((11 - 2) / (11 + 2 / 3 * 2))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_drift_over_steps_is_no_effect_of_prompts(share: float) -> None:
    random = np.random.default_rng(1)
    steps = np.repeat(np.arange(20), 512)
    groups = np.tile(np.repeat(np.arange(64), 8), 20)
    prompts = np.repeat(random.normal(0, 0.6 * share**0.5, 1280), 8)
    logs = 6 + np.log(1.05) * steps + prompts + random.normal(0, 0.6 * (1 - share) ** 0.5, 10240)
    assert intraclass_correlation(np.exp(logs), groups, steps) == pytest.approx(share, abs=0.03)


@given(offsets=st.lists(st.floats(-5, 5), min_size=3, max_size=3), seed=st.integers(0, 99))
def test_the_share_is_the_same_wherever_the_steps_lie(offsets: list[float], seed: int) -> None:
    random = np.random.default_rng(seed)
    steps, groups, logs = np.repeat(np.arange(3), 10), random.integers(0, 4, 30), random.normal(0, 1, 30)
    shares = [
        intraclass_correlation(np.exp(logs + shift[steps]), groups, steps) for shift in (np.array(offsets), np.zeros(3))
    ]
    assert shares[0] == pytest.approx(shares[1])


def test_samples_that_are_alike_count_as_fewer() -> None:
    assert design_effect(80, 10, 0.0) == 1.0  # all are independent
    assert design_effect(80, 10, 1.0) == 8.0  # one of each prompt is
    assert design_effect(80, 10, 0.3) == pytest.approx(3.1)


def test_prompts_explain_nothing_where_there_is_nothing_to_compare() -> None:
    assert intraclass_correlation([5, 6, 7], [0, 1, 2], [0] * 3) is None  # one sample a prompt
    assert intraclass_correlation([5, 6], [0, 0], [0, 0]) is None  # one prompt
    assert intraclass_correlation([5, 6, 7, 8], [0, 0, 0, 0], [0, 0, 1, 1]) is None  # one prompt a step
    assert intraclass_correlation([7, 7, 7, 7, 7, 7], [0, 0, 0, 1, 1, 1], [0] * 6) is None  # equal lengths
    assert intraclass_correlation([5, 5, 5, 5, 9, 9], [0, 0, 1, 1, 0, 1], [0] * 4 + [1] * 2) is None  # equal in each
    assert intraclass_correlation([100, 101, 10, 1000], [0, 1, 0, 0], [0, 0, 1, 1]) is None  # no step has both
    assert intraclass_correlation([5, 5, 9, 9], [0, 0, 1, 1], [0] * 4) == pytest.approx(1.0)


def test_the_longest_are_found_by_the_other_samples_of_their_prompts() -> None:
    alike = np.repeat([10, 20, 30, 40, 50], 2)
    assert longest_recall(alike, np.repeat(np.arange(5), 2), 20) == 1.0
    # the longest two are 100 and 90; the others of their prompts are short, so 50 and 51 are foretold by 90 and 100
    lengths = [100, 1, 90, 2, 50, 51, 3, 4, 5, 6]
    assert longest_recall(lengths, np.repeat(np.arange(5), 2), 20) == 0.0
    assert longest_recall([5, 6], [0, 1], 20) is None
    assert longest_recall(alike, np.repeat(np.arange(5), 2), 5) is None  # half a sample
    # of three that are wanted, two are found and half of the next two; with two wanted, both
    assert longest_recall(alike, np.repeat(np.arange(5), 2), 25) == pytest.approx((1 + 2.5 / 3) / 2)
    assert longest_recall([5, 6, 50, 60, 900], [0, 0, 1, 1, 2], 50) == 1.0  # a sample alone is left out


@pytest.mark.parametrize("capped", [0.0, 0.5, 0.9, 1.0])
def test_chance_finds_its_share_however_many_samples_end_at_the_limit(capped: float) -> None:
    random = np.random.default_rng(0)
    lengths = np.where(random.random(8000) < capped, 1000, random.integers(1, 1000, 8000))
    assert longest_recall(lengths, np.repeat(np.arange(1000), 8), 20) == pytest.approx(0.2, abs=0.03)


def test_a_map_has_the_prompts_of_the_largest_step_from_short_to_long() -> None:
    samples = pl.DataFrame(
        {"step": [0, 1, 1, 1, 1], "group": [0, 0, 0, 1, 1], "response_tokens": [7, 90, 70, 5, 6]},
    )
    found = PromptMap.of(samples)
    assert found is not None
    assert (found.step, found.lengths) == (1, [[5, 6], [90, 70]])
    assert PromptMap.of(samples.filter(pl.col("step") == 0)) is None  # one sample a group


def test_a_map_of_many_prompts_keeps_some_from_the_shortest_to_the_longest() -> None:
    groups = np.repeat(np.arange(500), 2)
    found = PromptMap.of(pl.DataFrame({"step": 0 * groups, "group": groups, "response_tokens": groups + 1}))
    assert found is not None
    assert (len(found.lengths), found.lengths[0], found.lengths[-1]) == (MAPPED_PROMPTS, [1, 1], [500, 500])


def test_a_step_drains_alone_for_the_share_of_its_longest() -> None:
    assert tail_share([10] * 10) == 0.0
    assert tail_share([10] * 19 + [40]) == 0.75  # from 10 on one of twenty runs
    assert tail_share([10] * 9 + [40]) == 0.0  # one of ten is not fewer than a tenth
    assert tail_share([7]) == 0.0


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=200))
def test_the_tail_is_a_part_of_the_step_and_fewer_than_a_tenth_run_in_it(lengths: list[int]) -> None:
    share = tail_share(lengths)
    assert 0.0 <= share < 1.0
    begins = (1 - share) * max(lengths)
    assert sum(length > begins + 1e-6 for length in lengths) < 0.1 * len(lengths)
    assert math.isclose(share, 0.0) or sum(length >= begins - 1e-6 for length in lengths) >= 0.1 * len(lengths)

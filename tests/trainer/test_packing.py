from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.conformance.samples import make_samples, with_log_probs
from tailrace.trainer.base import TrainSample
from tailrace.trainer.packing import GroupPart, pack, plan_micro_batches

groups = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(0, 12), min_size=1, max_size=5)), max_size=6)
budgets = st.integers(1, 60)


def flat(batches: list[list[GroupPart]]) -> list[GroupPart]:
    return [part for batch in batches for part in batch]


def cost(batch: list[GroupPart]) -> int:
    return sum(part.tokens for part in batch)


def whole_group_tokens(samples: list[TrainSample]) -> dict[int, int]:
    scored = [sample for sample in samples if len(sample.response_ids)]
    return {
        group_id: len(members[0].prompt_ids) + sum(len(sample.response_ids) for sample in members)
        for group_id, group in groupby(scored, key=lambda sample: sample.group_id)
        if (members := list(group))
    }


def draw(shape: list[tuple[int, list[int]]]) -> list[TrainSample]:
    return make_samples(groups=shape) if shape else []


@settings(max_examples=80)
@given(groups, budgets)
def test_every_scored_sample_is_packed_once_and_in_order(shape: list[tuple[int, list[int]]], budget: int) -> None:
    samples = draw(shape)
    parts = flat(plan_micro_batches(samples, budget))
    found = [index for part in parts for index in part.indices]
    assert found == [index for index, sample in enumerate(samples) if len(sample.response_ids)]
    assert all(part.samples == tuple(samples[index] for index in part.indices) for part in parts)


@settings(max_examples=80)
@given(groups, budgets)
def test_only_a_lone_sample_exceeds_the_budget(shape: list[tuple[int, list[int]]], budget: int) -> None:
    for batch in plan_micro_batches(draw(shape), budget):
        assert cost(batch) <= budget or (len(batch) == 1 and len(batch[0].samples) == 1)


@settings(max_examples=80)
@given(groups, budgets)
def test_a_group_that_fits_alone_stays_whole(shape: list[tuple[int, list[int]]], budget: int) -> None:
    samples = draw(shape)
    parts = flat(plan_micro_batches(samples, budget))
    for group_id, tokens in whole_group_tokens(samples).items():
        if tokens <= budget:
            assert [part.tokens for part in parts if part.samples[0].group_id == group_id] == [tokens]


@settings(max_examples=80)
@given(groups, budgets)
def test_a_micro_batch_closes_only_when_the_next_part_does_not_fit(
    shape: list[tuple[int, list[int]]], budget: int
) -> None:
    for closed, following in pairwise(plan_micro_batches(draw(shape), budget)):
        assert cost(closed) + following[0].tokens > budget


@settings(max_examples=80)
@given(groups, budgets, st.integers(0, 20))
def test_planning_in_two_calls_that_meet_between_micro_batches_changes_nothing(
    shape: list[tuple[int, list[int]]], budget: int, cut: int
) -> None:
    samples = draw(shape)
    whole = [[part.indices for part in batch] for batch in plan_micro_batches(samples, budget)]
    cut = min(cut, len(whole))
    start = max((i + 1 for batch in whole[:cut] for indices in batch for i in indices), default=0)
    rest = plan_micro_batches(samples[start:], budget)
    assert [[tuple(i + start for i in part.indices) for part in batch] for batch in rest] == whole[cut:]


def test_a_packed_row_repeats_no_prompt_and_every_response_continues_it() -> None:
    samples = make_samples(groups=((3, (2, 1)), (2, (2,))))
    (parts,) = plan_micro_batches(samples, 100)
    batch = pack(parts)
    first, second, third = samples
    expected = [first.prompt_ids, first.response_ids, second.response_ids, third.prompt_ids, third.response_ids]
    np.testing.assert_array_equal(batch.input_ids_T, np.concatenate(expected))
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3]
    assert batch.predictor_U.tolist() == [2, 3, 2, 7, 8]
    assert batch.scored_N.tolist() == [0, 1, 2, 3, 4]
    assert batch.sample_N.tolist() == [0, 0, 1, 2, 2]
    np.testing.assert_array_equal(batch.target_U, np.concatenate([sample.response_ids for sample in samples]))
    advantages = np.concatenate([sample.columns["advantages"] for sample in samples])
    np.testing.assert_array_equal(batch.columns_N["advantages"], advantages)
    assert [span.start for span in batch.spans] == [0, 6]
    assert batch.old_log_probs_N is None


def test_a_response_that_several_samples_of_a_group_have_is_packed_once() -> None:
    first, second, third, other = make_samples(groups=((3, (2, 2, 2)), (2, (2,))))
    samples = [first, second, replace(third, response_ids=first.response_ids)]
    samples.append(replace(other, response_ids=first.response_ids))
    (parts,) = plan_micro_batches(samples, 100)
    batch = pack(parts)
    expected = [first.prompt_ids, first.response_ids, second.response_ids, other.prompt_ids, first.response_ids]
    np.testing.assert_array_equal(batch.input_ids_T, np.concatenate(expected))
    assert batch.scored_N.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]
    assert batch.sample_N.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [span.response_tokens for span in batch.spans] == [(2, 2), (2,)]


def test_log_probs_given_for_some_samples_only_are_refused() -> None:
    bare, filled = make_samples(groups=((2, (2,)),)), with_log_probs(make_samples(groups=((2, (2,)),)))
    (parts,) = plan_micro_batches([*bare, *filled], 100)
    with pytest.raises(ValueError, match="1 of the 2 samples of a micro-batch carry ref_log_probs"):
        pack(parts)

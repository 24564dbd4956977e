"""Claims on which samples are computed together, and by which rank."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.packing import Lengths, plan_micro_batches, shared

GROUPS = st.lists(
    st.tuples(st.integers(1, 50), st.lists(st.integers(1, 400), min_size=1, max_size=8)), min_size=1, max_size=20
)


def samples_of(groups: list[tuple[int, list[int]]]) -> list[Lengths]:
    return [
        Lengths(number, prompt, tokens) for number, (prompt, responses) in enumerate(groups) for tokens in responses
    ]


@given(GROUPS, st.integers(1, 9))
def test_each_sample_goes_to_one_rank_and_shares_differ_by_less_than_a_piece(
    groups: list[tuple[int, list[int]]], ranks: int
) -> None:
    samples = samples_of(groups)
    shares = shared(samples, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(samples)))
    tokens = [sum(samples[index].response_tokens for index in share) for share in shares]
    longest = max(sample.prompt_tokens + sample.response_tokens for sample in samples)
    assert max(tokens) <= sum(tokens) / ranks * 1.5 + longest * 4 / 3


@given(GROUPS, st.integers(1, 500))
def test_a_micro_batch_is_within_its_budget_unless_one_sample_is_longer(
    groups: list[tuple[int, list[int]]], budget: int
) -> None:
    samples = samples_of(groups)
    batches = plan_micro_batches(samples, budget)
    assert [i for batch in batches for part in batch for i in part.samples] == list(range(len(samples)))
    for batch in batches:
        alone = len(batch) == 1 and len(batch[0].samples) == 1
        assert alone or sum(part.tokens for part in batch) <= budget

"""The order of prompts and the seeds of samples."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.prompts.order import PromptOrder, sample_seed

COUNTS = st.integers(1, 60)
SEEDS = st.integers(-(2**70), 2**70)


@given(COUNTS, SEEDS, st.integers(0, 5), st.booleans())
def test_each_epoch_visits_every_prompt_once(count: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = PromptOrder(count=count, seed=seed, shuffle=shuffle)
    assert sorted(order[epoch * count + k] for k in range(count)) == list(range(count))


@given(COUNTS, SEEDS, st.integers(0, 300))
def test_resumed_run_reads_on_where_the_interrupted_one_stopped(count: int, seed: int, position: int) -> None:
    uninterrupted = PromptOrder(count=count, seed=seed, shuffle=True)
    whole = [uninterrupted[k] for k in range(position + 80)]
    resumed = PromptOrder(count=count, seed=seed, shuffle=True)
    assert [resumed[k] for k in range(position, position + 80)] == whole[position:]


@given(SEEDS)
def test_epochs_and_seeds_have_orders_of_their_own(seed: int) -> None:
    order, other = (PromptOrder(count=50, seed=s, shuffle=True) for s in (seed, seed + 1))
    first, second = ([order[epoch * 50 + k] for k in range(50)] for epoch in (0, 1))
    assert first != second
    assert first != [other[k] for k in range(50)]


def test_without_shuffling_the_order_is_the_source_s() -> None:
    order = PromptOrder(count=3, seed=1, shuffle=False)
    assert [order[k] for k in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_order_is_the_same_on_every_machine_and_release() -> None:
    order = PromptOrder(count=8, seed=0, shuffle=True)
    assert [order[k] for k in range(8)] == [4, 5, 2, 3, 0, 6, 1, 7]
    assert sample_seed(0, 0, 0) == 8831464122974515740


@given(SEEDS, st.integers(0, 2**40), st.integers(0, 2**20))
def test_sample_seeds_are_63_bits_and_differ_in_each_argument(run_seed: int, position: int, index: int) -> None:
    seed = sample_seed(run_seed, position, index)
    assert 0 <= seed < 2**63
    assert seed == sample_seed(run_seed, position, index)
    neighbours = {sample_seed(run_seed + 1, position, index), sample_seed(run_seed, position + 1, index)}
    assert seed not in neighbours | {sample_seed(run_seed, position, index + 1)}


def test_sample_seeds_of_a_run_are_distinct_and_their_bits_are_even() -> None:
    seeds = [sample_seed(7, position, index) for position in range(200) for index in range(8)]
    assert len(set(seeds)) == len(seeds)
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert 640 < ones < 960  # 800 ± 8 standard deviations

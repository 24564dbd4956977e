"""Claims on the programs that compare papers with simulations."""

import math
import os
import statistics
from pathlib import Path

import numpy as np
import papers_pat
import pytest
import reproduce_papers
from papers_pat import BATCH, NODE, Lengths, Setting, Switches, adaptive, profile_of
from papers_setup import (
    GRPO,
    PPO,
    SERVER,
    Published,
    System,
    Task,
    best_split,
    colocated,
    expectation_error,
    pool_of,
    replay_of,
    simulated,
    step_times,
)
from papers_table import Row, Section

from tailrace.planning.model_shape.catalogue import find_shape

SWITCHES = Switches(reshard_s=1.0, capture_s=0.7, rest_s=1.4, state_s=2.4)
SHARES = Published(
    [
        {"quantity": "responses longer than 8K", "value": "10.85", "model": "LLaMA3.1-8B"},
        {"quantity": "responses longer than 16K", "value": "2.18", "model": "LLaMA3.1-8B"},
    ]
)


def task(lengths: list[int], *, model: str = "Qwen2.5-1.5B", ppo: bool = False) -> Task:
    replay = replay_of(np.array(lengths), prompt=100, group_size=1)
    return Task(shape=find_shape(model), algorithm=PPO if ppo else GRPO, replay=replay, groups=len(lengths) // 3)


def test_a_row_tells_its_reason_only_where_it_differs() -> None:
    near = Row(where="table 1", what="gain", published=2.0, simulated=1.82, why="it differs")
    assert near.cells() == ("table 1", "gain", "2.00", "1.82", "-9%", "")
    far = Row(where="table 1", what="gain", published=2.0, simulated=1.79, why="it differs")
    assert not far.agrees
    assert far.cells()[-1] == "it differs"


def test_a_page_counts_headlines_alone() -> None:
    rows = [
        Row(where="", what="a", published=1.0, simulated=1.0),
        Row(where="", what="b", published=1.0, simulated=2.0),
        Row(where="", what="c", published=1.0, simulated=2.0, headline=False),
    ]
    text = reproduce_papers.page([Section(title="Paper", assumptions=["one"], rows=rows, findings=["two"])])
    assert "1 of 2 published ratios are within 10%." in text
    assert "| c | 1.00 | 2.00 |" in text


def test_a_figure_that_is_missing_or_ambiguous_is_named() -> None:
    assert SHARES.value("responses longer than 8K") == 10.85
    with pytest.raises(LookupError, match="0 rows of 'throughput' with"):
        SHARES.value("throughput", model="LLaMA3.1-8B")


def test_lengths_have_the_published_shares() -> None:
    lengths = Lengths.of(SHARES)
    normal = statistics.NormalDist(lengths.log_median, lengths.deviation)
    assert 1 - normal.cdf(math.log(8192)) == pytest.approx(0.1085)
    assert 1 - normal.cdf(math.log(16384)) == pytest.approx(0.0218)
    assert max(next(lengths.batches(4096))) == 4096


def test_the_error_of_expectations_has_the_recall() -> None:
    assert expectation_error(0.87, 0.2) < expectation_error(0.7, 0.2)
    assert expectation_error(1.0, 0.2) == pytest.approx(0.0, abs=1e-3)


def test_generation_with_one_degree_takes_the_time_of_that_degree() -> None:
    one, pool = task([100] * 3), pool_of("H100", NODE)
    times = step_times(one.shape, pool, SERVER)
    profile = profile_of(one, pool, (2,), times, SWITCHES)
    lengths = [100 + 10 * number for number in range(BATCH)]
    seconds, switches = adaptive(profile, times, (2,), lengths, one, 2, 4096)
    assert switches == 0
    assert seconds == pytest.approx(papers_pat._static(times, 2, lengths), rel=0.02)  # a step is begun anew


def test_changing_the_degree_is_quicker_than_staying_with_the_first() -> None:
    setting = Setting(model="Llama-3.1-8B", kind="H100", most=16_384)
    found = papers_pat.measure(setting, Lengths.of(SHARES), SWITCHES, SERVER)
    assert found.switches > 0
    assert found.adaptive < found.static[papers_pat.START]


def test_two_models_take_longer_to_train_than_one() -> None:
    lengths = [200 + number for number in range(96)]
    pool, system = pool_of("H100", 8), System(placement="colocated")
    one, two = (task(lengths, ppo=ppo) for ppo in (False, True))
    assert (
        simulated(colocated(one, pool, system), one.replay).step_s
        < simulated(colocated(two, pool, system), two.replay).step_s
    )


def test_an_asynchronous_split_is_no_slower_than_a_sequential_one() -> None:
    some = task([200 + 7 * (number % 50) for number in range(96)])
    pool = pool_of("H100", 16)
    _, sequential = best_split(some, System(), pool)
    _, ahead = best_split(some, System(streaming=True, max_staleness=1, weights="delayed"), pool)
    assert ahead.step_s < sequential.step_s


@pytest.mark.skipif("TAILRACE_DATA" not in os.environ, reason="needs the figures of the papers")
def test_the_page_is_what_the_program_writes() -> None:
    published = Published.read(Path(os.environ["TAILRACE_DATA"]) / "papers.csv", "PAT")
    text = papers_pat.report(published, Lengths.of(published)).text()
    assert text in reproduce_papers.PAGE.read_text(encoding="utf-8")

"""The parts of an engine's time and its memory: the sums of its steps, and the sizes of a small model."""

from collections.abc import Mapping

import pytest

from tailrace.conformance.requests import make_request
from tailrace.engine.profile import StepTimes
from tailrace.engine.scheduling.step import Chunk, StepInput
from tailrace.host.stopwatch import Stopwatch
from tailrace.models.architecture import read_architecture
from tests.engine.helpers import TinyModel, make_core, run_core

RANKS = {"embed": 1.0, "attention": 4.0, "all_reduce": 2.0, "sample": 3.0, "other": 1.0}


def step_of(*lengths: int) -> StepInput:
    return StepInput([], [Chunk(0, [1] * length, [0], None) for length in lengths])


def parts(
    step: StepInput, ranks: Mapping[str, float] = RANKS, *, tp: int = 1, has_queue: bool = False
) -> dict[str, float]:
    watch = Stopwatch()
    StepTimes(stopwatch=watch, tp=tp, has_queue=has_queue).add(step, ranks, schedule_s=0.5)
    return watch.take()


def test_sampling_and_the_ranks_exchange_are_no_part_of_decoding() -> None:
    expected = {"decode": 6.0, "communication": 2.0, "sampling": 3.0, "scheduling": 0.5}
    assert parts(step_of(1, 1), tp=2) == expected


def test_a_lone_rank_does_not_communicate() -> None:
    assert parts(step_of(1)) == {"decode": 8.0, "sampling": 3.0, "scheduling": 0.5}


def test_a_step_that_does_both_is_shared_by_its_tokens() -> None:
    assert parts(step_of(6, 1, 1)) == {"prefill": 6.0, "decode": 2.0, "sampling": 3.0, "scheduling": 0.5}
    assert "decode" not in parts(step_of(6))


def test_on_a_device_with_a_queue_all_that_the_ranks_do_is_computing() -> None:
    assert parts(step_of(1), tp=2, has_queue=True) == {"decode": 11.0, "scheduling": 0.5}


def test_a_step_whose_ranks_say_nothing_has_its_scheduling_alone() -> None:
    assert parts(step_of(1), {}) == {"scheduling": 0.5}


def test_an_engine_tells_the_time_of_its_steps_by_part_and_once(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"))
    run_core(core, [make_request(0, max_new_tokens=6, ignore_eos=True)])
    assert core.take_seconds().keys() == {"prefill", "decode", "sampling", "scheduling"}
    assert core.take_seconds() == {}


def test_the_memory_of_an_engine_is_what_its_weights_and_its_cache_take(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"), kernels="torch", block_size=4, kv_cache_gib=0.01)
    a = read_architecture(tiny_model("llama"))
    layer = a.hidden_size * (sum(a.qkv_sizes) + a.query_heads * a.head_dim + 3 * a.intermediate_size + 2)
    vocabulary = 512 * a.hidden_size  # it is tied, and padded to a multiple of 512
    assert a.tied
    block = a.layers * 2 * a.kv_heads * 4 * a.head_dim * 4
    for number in range(2):
        core.add(make_request(number, group_id=number, prompt=6, max_new_tokens=2, ignore_eos=True))
    run_core(core, [])
    told = core.memory()
    assert told["weights"] == 4 * (a.layers * layer + vocabulary + a.hidden_size)
    assert told["kv_cache_used"] == 2 * 2 * block, "7 tokens of each sequence, in blocks of 4"
    assert told["kv_cache_used"] + told["kv_cache_free"] == pytest.approx(0.01 * 2**30, abs=a.layers)
    assert core.memory()["kv_cache_used"] == 0, "nothing has run since"

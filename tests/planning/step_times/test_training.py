"""Claims on the seconds of a trainer's work."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.hardware import DeviceConfig
from tailrace.errors import PlanError
from tailrace.planning.hardware.base import Link, Pool
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.packing import GroupPart, Lengths
from tailrace.planning.step_times.collectives import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from tailrace.planning.step_times.rates import Rates
from tailrace.planning.step_times.training import OPTIMIZER_BYTES, AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Adapters, Layout, MicroBatch, TrainingSetup, matrices
from tailrace.simulator.passes import passes_s
from tailrace.simulator.scenario import TrainerTimes

SHAPE = ModelShape(
    name="small", layers=8, hidden=256, heads=4, kv_heads=4, head_dim=64, intermediate=512, vocab=1000, tied=False
)
PEAK = Rates(
    product=1, product_memory=1, attention=1, attention_memory=1, memory=1, exchange=1, launch_s=0
)  # devices reach their peaks
FLOPS = 1e12
BATCH = MicroBatch.of([300, 500])
MATRICES = sum(one.inputs * one.outputs * one.copies for one in matrices(SHAPE)) * SHAPE.layers
HEAD = SHAPE.head_parameters
TOKENS, SQUARES = 800, 300**2 + 500**2
PAIRS_FLOPS = 4 * SQUARES / 2 * SHAPE.hidden * SHAPE.layers


def pool(devices: int = 8, **rates: float) -> Pool:
    """Devices whose memory and links take no time unless said otherwise."""
    values: dict[str, Any] = {"memory_gb_s": 1e9, "link_gb_s": 1e9, "network_gb_s": 1e9, "host_gb_s": 1e9, **rates}
    kind = DeviceConfig(
        tflops={"bfloat16": FLOPS / 1e12},
        memory_gib=80,
        link_us=0,
        devices_per_node=8,
        watts=1,
        usd_per_hour=1,
        **values,
    )
    network = Link(bytes_per_s=kind.network_gb_s * 1e9)
    nodes = max(1, devices // 8)
    return Pool(name="p", kind="p", device=kind, nodes=nodes, per_node=8, network=network, usd_per_hour=1)


def times(pool: Pool, layout: Layout | None = None, **changes: Any) -> AnalyticTrainingTimes:
    setup = TrainingSetup(**{"shape": SHAPE, "head": "whole", "layout": layout or Layout(), **changes})
    return AnalyticTrainingTimes(setup, pool, rates=PEAK, inefficiency=1)


def part(prompt: int, *responses: int) -> GroupPart:
    return GroupPart(samples=tuple(range(len(responses))), prompt_tokens=prompt, response_tokens=responses)


def test_a_simulated_trainer_works_as_long() -> None:
    trainer: TrainerTimes = times(pool())
    parts = [part(100, 200), part(200, 300)]
    assert trainer.update_s(parts) + trainer.optimizer_s() == pytest.approx(times(pool()).step_s([BATCH]))
    assert trainer.score_s(parts) == pytest.approx(times(pool()).log_probs_s([BATCH]))


def test_operations_are_six_a_parameter_and_token_and_those_of_attention() -> None:
    flops = 6 * (MATRICES + HEAD) * TOKENS + 3.5 * PAIRS_FLOPS
    assert times(pool()).step_s([BATCH]) == pytest.approx(flops / FLOPS, rel=1e-3)


def test_checkpointing_computes_the_layers_once_more() -> None:
    flops = (8 * MATRICES + 6 * HEAD) * TOKENS + 4.5 * PAIRS_FLOPS
    assert times(pool(), Layout(checkpointing="full")).step_s([BATCH]) == pytest.approx(flops / FLOPS, rel=1e-3)


def test_logits_in_chunks_are_computed_once_more() -> None:
    flops = (6 * MATRICES + 8 * HEAD) * TOKENS + 3.5 * PAIRS_FLOPS
    assert times(pool(), head="chunks").step_s([BATCH]) == pytest.approx(flops / FLOPS, rel=1e-3)


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    flops = 4 * (MATRICES + HEAD) * TOKENS + 3.5 * PAIRS_FLOPS
    assert times(pool(), adapters=Adapters(rank=8)).step_s([BATCH]) == pytest.approx(flops / FLOPS, rel=1e-3)


def test_log_probabilities_are_a_forward_pass_with_the_logits_of_all_tokens() -> None:
    flops = 2 * (MATRICES + HEAD) * TOKENS + PAIRS_FLOPS
    assert times(pool()).log_probs_s([BATCH, BATCH]) == pytest.approx(2 * flops / FLOPS, rel=1e-3)


def test_a_prompt_that_a_group_shares_counts_once() -> None:
    group = MicroBatch.of_parts([part(100, 50, 20)])
    assert group.tokens == 170
    pairs = 100**2 / 2 + (50**2 / 2 + 50 * 100) + (20**2 / 2 + 20 * 100)
    assert group.squares / 2 == pairs
    assert MicroBatch.of_parts([part(100, 50), part(1, 9)]) == MicroBatch.of([150, 10])


def test_the_optimizer_reads_and_writes_what_its_device_keeps() -> None:
    slow = pool(memory_gb_s=10)
    alone = (SHAPE.parameters - SHAPE.hidden) * OPTIMIZER_BYTES / 10e9  # the last norm is left out
    assert times(slow).optimizer_s() == pytest.approx(alone)
    for sharding in ("optimizer", "full"):
        assert times(slow, Layout(dp=4, sharding=sharding)).optimizer_s() == pytest.approx(alone / 4)


def test_gathered_weights_and_gradients_count_where_they_take_longer_than_the_layers() -> None:
    slow, setup = pool(link_gb_s=0.1), TrainingSetup(shape=SHAPE)
    group = Group.of(slow, 4)
    gather = all_gather_s(2 * setup.parameters, group)
    scatter = reduce_scatter_s(4 * setup.parameters, group)
    head = 6 * HEAD * TOKENS / FLOPS
    sharded = times(slow, Layout(dp=4, sharding="full"))
    assert sharded.step_s([BATCH]) == pytest.approx(2 * gather + scatter + head, rel=1e-3)
    assert times(pool(), Layout(dp=4, sharding="full")).step_s([BATCH]) == pytest.approx(times(pool()).step_s([BATCH]))


def test_gradients_are_exchanged_once_a_step_where_weights_are_not_sharded() -> None:
    slow, setup = pool(link_gb_s=0.1), TrainingSetup(shape=SHAPE)
    group, alone = Group.of(slow, 4), times(pool()).step_s([BATCH] * 2)
    late = all_reduce_s(4 * setup.parameters, group)
    assert times(slow, Layout(dp=4)).step_s([BATCH] * 2) == pytest.approx(alone + late, rel=1e-3)
    late = reduce_scatter_s(4 * setup.parameters, group) + all_gather_s(2 * setup.parameters, group)
    sharded = times(slow, Layout(dp=4, sharding="optimizer"))
    assert sharded.step_s([BATCH] * 2) == pytest.approx(alone + late, rel=1e-3)


def test_tensor_parallel_ranks_sum_up_twice_a_layer_in_each_pass() -> None:
    slow = pool(link_gb_s=0.1)
    exchanged = 4 * SHAPE.layers * all_reduce_s(2 * TOKENS * SHAPE.hidden, Group.of(slow, 2))
    added = times(slow, Layout(tp=2)).step_s([BATCH]) - times(pool(), Layout(tp=2)).step_s([BATCH])
    assert added == pytest.approx(exchanged, rel=1e-3)


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 1), (4, 8), (8, 3)])
def test_a_pipeline_idles_for_one_micro_batch_less_than_it_has_stages(pp: int, micro_batches: int) -> None:
    batches = [BATCH] * micro_batches
    one = times(pool(), head="value").step_s([BATCH])
    piped = times(pool(), Layout(pp=pp), head="value").step_s(batches)
    assert piped == pytest.approx(one / pp * (micro_batches + pp - 1), rel=1e-2)


def test_the_largest_stage_of_a_pipeline_sets_its_pace() -> None:
    three, four = (times(pool(), Layout(pp=pp), head="value").step_s([BATCH] * 8) for pp in (3, 4))
    a_layer = times(pool(), head="value").step_s([BATCH]) / SHAPE.layers
    assert three == pytest.approx(3 * a_layer * (8 + 2), rel=1e-2)  # stages of three, three and two layers
    assert four == pytest.approx(2 * a_layer * (8 + 3), rel=1e-2)


def test_a_simulated_trainer_of_stages_scores_as_long() -> None:
    staged = times(pool(), Layout(pp=4))
    samples = [Lengths(group, 100, 200 + 100 * group) for group in range(4)]
    each = [MicroBatch.of([100 + one.response_tokens]) for one in samples]
    found = passes_s(staged.score_s, samples, 1, ranks=1, stages=4)
    assert found == pytest.approx(staged.log_probs_s(each))


def test_layers_that_wait_on_the_host_take_the_time_of_the_way_there_and_back() -> None:
    slow = pool(host_gb_s=0.01)
    way = SHAPE.layers * TOKENS * SHAPE.hidden * 2 / 0.01e9
    step = times(slow, Layout(checkpointing="full", offload=True), head="value").step_s([BATCH])
    assert step == pytest.approx(2 * way, rel=1e-2)


LAYOUTS = st.builds(
    Layout,
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 4]),
    sharding=st.sampled_from(["none", "optimizer", "full"]),
)
MODELS = st.sampled_from(["Qwen3-4B", "Qwen3-30B-A3B"]).map(find_shape)
BATCHES = st.lists(st.lists(st.integers(1, 8192), min_size=1, max_size=4).map(MicroBatch.of), min_size=1, max_size=4)


@given(MODELS, LAYOUTS, BATCHES, st.sampled_from(["memory_gb_s", "link_gb_s", "host_gb_s"]))
def test_a_device_with_more_bandwidth_is_never_slower(
    shape: ModelShape, layout: Layout, batches: list[MicroBatch], bandwidth: str
) -> None:
    slower = open_cluster("16xH100").pools[0]
    device = slower.device.model_copy(update={bandwidth: 2 * getattr(slower.device, bandwidth)})
    setup = TrainingSetup(shape=shape, layout=layout)
    faster = AnalyticTrainingTimes(setup, replace(slower, device=device)).step_s(batches)
    assert faster <= AnalyticTrainingTimes(setup, slower).step_s(batches)


@given(MODELS, LAYOUTS, BATCHES)
def test_neither_checkpointing_nor_more_tokens_take_less_time(
    shape: ModelShape, layout: Layout, batches: list[MicroBatch]
) -> None:
    cluster = open_cluster("16xH100").pools[0]

    def step_s(layout: Layout, batches: list[MicroBatch]) -> float:
        return AnalyticTrainingTimes(TrainingSetup(shape=shape, layout=layout), cluster).step_s(batches)

    step = step_s(layout, batches)
    assert step_s(replace(layout, checkpointing="full"), batches) >= step
    assert step_s(layout, [*batches, MicroBatch.of([64])]) >= step


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"dp": 0}, "dp=0; expected 1 or more"),
        ({"offload": True}, "set checkpointing=full"),
        ({"pp": 9}, "pp=9, but small has 8 layers"),
        ({"tp": 3}, "tp=3, which does not divide the 4 heads"),
        ({"dp": 16}, "takes 16 devices.*has 8"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        times(pool(), Layout(**layout))


def test_adapters_of_no_rank_are_refused() -> None:
    with pytest.raises(PlanError, match="rank=0; expected 1 or more"):
        Adapters(rank=0)

"""Claims on a recipe as it is: where its pools stand, and which engines and trainer it has."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.errors import PlanError
from tailrace.planner.candidates import Candidates
from tailrace.planner.given import given, with_allocation
from tailrace.planner.modes import USUAL, Mode
from tailrace.planner.problem import Problem
from tailrace.planner.trial import bases_of, config_of, engine_memories, planned, scenario_for
from tailrace.planning.allocation import Allocation
from tailrace.planning.hardware.base import Cluster, Link
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.memory import CONTEXT_BYTES
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.planning.step_times.sources import check_profile
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.setup import arrivals_s
from tailrace.simulator.summary import Summing
from tests.planner.problems import PPO, problem_of
from tests.planning.tp_profiles import KEY, made_profile

SEPARATED = ("pipeline.placement=separated", "queue.type=service", "sampling.max_new_tokens=65536")
TWO = ("cluster.rollout.pools.wide.workers=1",)

FILE = """
pools:
  near: {device: H20, nodes: 1, datacentre: east}
  far: {device: H200, nodes: 1, datacentre: west}
  last: {device: H800, nodes: 2, datacentre: east}
links:
  - {between: [east, west], gb_s: 1, ms: 2}
"""


@pytest.fixture
def three(tmp_path: Path) -> Callable[..., Cluster]:
    """A cluster of three pools, some of them renamed."""

    def make(**names: str) -> Cluster:
        text = FILE
        for old, new in names.items():
            text = text.replace(f"  {old}:", f"  {new}:")
        (tmp_path / "three.yaml").write_text(text)
        return open_cluster(str(tmp_path / "three.yaml"))

    return make


def allocated(cluster: str | Cluster, *recipe: str, model: str = "Qwen2.5-1.5B") -> Allocation:
    return given(problem_of(cluster, *SEPARATED, *recipe, model=model)).allocation


@pytest.mark.parametrize(
    ("engine", "policy", "simulated", "tells"),
    [
        ("native", "skewness_aware", "skewness_aware", True),
        ("vllm", "skewness_aware", "pull", False),
        ("vllm", "round_robin", "round_robin", False),
    ],
)
def test_where_engines_tell_no_costs_nothing_moves_and_nothing_scales(
    engine: str, policy: str, simulated: str, tells: bool
) -> None:
    dispatch = (f"engine.type={engine}", f"rollout.dispatch.policy={policy}", "rollout.lengths.type=siblings")
    ahead = ("pipeline.max_staleness=1", "cluster.rollout.workers=2", "cluster.rollout.max_workers=3")
    problem = problem_of("4xH100", *SEPARATED, *dispatch, *ahead)
    scenario = scenario_for(problem, given(problem), 1)
    assert (scenario.dispatch.policy, scenario.moves, scenario.elastic is not None) == (simulated, tells, tells)


def test_each_pool_has_engines_of_its_own(three: Callable[..., Cluster]) -> None:
    recipe = (
        "engine={type: native, max_batch_size: 64}",
        "cluster.rollout.workers=3",
        "cluster.rollout.datacentre=east",
        "cluster.rollout.pools.wide.datacentre=west",
        "cluster.rollout.pools.wide.workers=2",
        "cluster.rollout.pools.wide.engine={tp: 2, dp: 2, max_batch_size: 32, kv_cache_gib: 4}",
        "cluster.rollout.pools.none={workers: 0, datacentre: nowhere}",
    )
    problem = problem_of(three(), *SEPARATED, *recipe)
    candidate = given(problem)
    first, wide = candidate.allocation.rollout
    assert (first.name, first.pool.kind, first.engines, first.tp, first.dp, first.slots) == (
        "rollout",
        "H20",
        3,
        1,
        1,
        64,
    )
    assert (wide.name, wide.pool.kind, wide.engines, wide.tp, wide.dp, wide.slots) == (
        "rollout.wide",
        "H200",
        2,
        2,
        2,
        32,
    )
    assert wide.cache_tokens == 4 * 2**30 / problem.shape.cache_bytes(tp=2)
    assert first.cache_tokens > wide.cache_tokens
    assert (candidate.allocation.trainer.kind, candidate.allocation.layout.devices) == ("H800", 16)
    assert candidate.allocation.rollout_devices == 3 + 2 * 4
    kinds = scenario_for(problem, candidate, 1).engines
    assert [(kind.name, kind.tp, kind.dp, kind.slots) for kind in kinds] == [
        *[("rollout", 1, 1, 64)] * 3,
        *[("rollout.wide", 2, 2, 32)] * 2,
    ]
    assert {kind.cache_tokens for kind in kinds} == {first.cache_tokens, wide.cache_tokens}
    steps_s = {kind.name: kind.times.step_s(1, 8, 8000, 1) for kind in kinds}
    assert steps_s["rollout"] != steps_s["rollout.wide"], "devices differ"


def test_weights_cross_to_another_datacentre_and_are_installed_by_each_engine_at_its_own_pace(
    three: Callable[..., Cluster],
) -> None:
    recipe = ("cluster.rollout.datacentre=east", "cluster.rollout.pools.wide={datacentre: west, engine: {tp: 2}}")
    problem = problem_of(three(), *SEPARATED, *recipe)
    near, far = scenario_for(problem, given(problem), 1).engines
    crossing_s = 2 * problem.shape.parameters / 1e9
    assert near.arrive_s < crossing_s < far.arrive_s < 1.1 * crossing_s
    assert far.install_s < near.install_s, "two ranks take half each"


@pytest.mark.parametrize(
    ("names", "recipe", "places"),
    [
        ({"near": "rollout", "far": "wide"}, (), ["H20", "H200", "H800"]),
        ({"near": "trainer", "far": "rollout", "last": "wide"}, (), ["H200", "H800", "H20"]),
        ({"far": "rollout", "last": "wide"}, (), ["H200", "H800", "H20"]),
        ({"far": "wide"}, (), ["H20", "H200", "H800"]),
        (
            {},
            ("cluster.rollout.datacentre=west", "cluster.rollout.pools.wide.resources={h20: 1}"),
            ["H200", "H20", "H800"],
        ),
        (
            {},
            (
                "cluster.rollout.resources={'accelerator_type:H200': 1}",
                "cluster.rollout.pools.wide.resources={H800: 1}",
            ),
            ["H200", "H800", "H800"],
        ),
        (
            {"near": "wide"},
            ("cluster.rollout.resources={h20: 1, disk: 1}", "cluster.trainer.datacentre=west"),
            ["H20", "H20", "H200"],
        ),
    ],
)
def test_a_pool_stands_where_its_name_its_datacentre_or_its_resources_say(
    three: Callable[..., Cluster], names: dict[str, str], recipe: tuple[str, ...], places: list[str]
) -> None:
    found = allocated(three(**names), *TWO, *recipe)
    assert [*(one.pool.kind for one in found.rollout), found.trainer.kind] == places


@pytest.mark.parametrize(
    ("cluster", "places"), [("4xH100", ["H100", "H100", "H100"]), ("4xH20+4xH800", ["H20", "H20", "H800"])]
)
def test_engines_that_say_nothing_stand_where_the_trainer_does_not(cluster: str, places: list[str]) -> None:
    found = allocated(cluster, *TWO)
    assert [*(one.pool.kind for one in found.rollout), found.trainer.kind] == places


def test_pools_of_a_cluster_without_a_file_are_called_after_their_devices() -> None:
    found = allocated(
        "4xH100+4xRTX-4090+4xH800", "cluster.rollout.resources={h100: 1}", "cluster.rollout.pools.rtx_4090={}"
    )
    assert [*(one.pool.kind for one in found.rollout), found.trainer.kind] == ["H100", "RTX-4090", "H800"]


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            ("cluster.rollout.datacentre=east",),
            "cluster.rollout.pools.wide may stand on near of H20 in 'east' or far of H200 in 'west' of the",
        ),
        (
            ("cluster.rollout.datacentre=south",),
            "cluster.rollout asks for the datacentre 'south', and the cluster has near of H20 in 'east', far of H200",
        ),
        (
            ("cluster.rollout.datacentre=west", "cluster.rollout.resources={h100: 1}"),
            "cluster.rollout asks for the datacentre 'west' and the device H100, and the cluster has",
        ),
        (("cluster.trainer.datacentre=south",), "cluster.trainer asks for the datacentre 'south'"),
    ],
)
def test_a_pool_whose_place_is_not_clear_is_refused(
    three: Callable[..., Cluster], recipe: tuple[str, ...], said: str
) -> None:
    with pytest.raises(PlanError) as refused:
        allocated(three(), *TWO, *recipe)
    assert said in str(refused.value)


def test_a_pool_of_the_name_has_to_have_what_the_recipe_asks_for(three: Callable[..., Cluster]) -> None:
    with pytest.raises(
        PlanError, match="rollout asks for the datacentre 'west', and the cluster has rollout of H20 in"
    ):
        allocated(three(near="rollout"), "cluster.rollout.datacentre=west")


@pytest.mark.parametrize(
    ("cluster", "recipe", "said"),
    [
        (
            "8xH100",
            ("cluster.rollout.workers=4", "cluster.rollout.pools.wide.engine.tp=4"),
            "4 engines of 1 device and 1 engine of 4 devices take 8 of 8 H100, which leaves 0 for the trainer; "
            "change cluster.rollout.workers, cluster.rollout.pools.wide.workers, engine.tp or engine.dp",
        ),
        ("2xH20+2xH800", ("cluster.rollout.workers=3",), "3 engines of 1 device take 3 of 2 H20; change"),
        ("8xH100", ("engine={type: native, kv_cache_gib: 99}",), "engine.kv_cache_gib is 99, and H100 has room for 6"),
        (
            "8xH100",
            ("cluster.rollout.pools.wide.engine.kv_cache_gib=0.01",),
            "raise cluster.rollout.pools.wide.engine.kv_cache_gib",
        ),
        (
            "8xH100",
            (PPO, "cluster.rollout.workers=7"),
            "trainer and critic take 2 devices at least, and engines leave 1 H100",
        ),
        (
            "8xH100",
            (PPO, "cluster.pools.critic.gpus=7"),
            "trainer and critic take 8 devices at least, and engines leave 7 H100",
        ),
        (
            "2xH100",
            ("algorithm.kl.coefficient=0.1", "cluster.reference.workers=1"),
            "1 worker of the reference, of 1 H100 each, would leave none for the trainer",
        ),
        (
            "2xH20+2xH800",
            ("pipeline.placement=colocated",),
            "the cluster has pools of H20 and H800; give a cluster of one",
        ),
    ],
)
def test_too_few_devices_and_too_little_memory_are_refused(cluster: str, recipe: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError) as refused:
        allocated(cluster, *recipe)
    assert said in str(refused.value)


def test_an_engine_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"an engine of Qwen2\.5-72B with TP 1 does not fit on H100; raise its TP degree"
    ):
        allocated("8xH100", model="Qwen2.5-72B")


def test_a_trainer_that_fits_no_other_way_has_the_inputs_of_its_layers_on_the_host() -> None:
    recipe = ("sampling.max_new_tokens=16384", "trainer.micro_batch_tokens=32768")
    assert allocated("3xH100", *recipe, model="Qwen2.5-7B").layout.offload
    assert not allocated("16xH100", *recipe, model="Qwen2.5-7B").layout.offload


def test_the_reference_has_devices_that_the_trainer_does_not_have() -> None:
    found = allocated("8xH100", "algorithm.kl.coefficient=0.1", "cluster.reference.workers=2")
    assert found.reference is not None
    assert found.reference.dp == 2
    assert found.layout.devices == 5
    assert found.devices == 8


def test_a_critic_shares_the_devices_that_are_left_with_the_trainer() -> None:
    found = allocated("8xH100", PPO, "cluster.rollout.workers=2")
    assert found.critic is not None
    assert found.critic.devices + found.layout.devices == 6
    assert abs(found.critic.devices - found.layout.devices) <= 2
    assert found.devices == 8


def test_a_critic_has_the_devices_that_the_recipe_gives_it() -> None:
    found = allocated("8xH100", PPO, "cluster.rollout.workers=2", "cluster.pools.critic.gpus=1")
    assert found.critic is not None
    assert (found.critic.devices, found.layout.devices) == (1, 5)


def test_a_critic_of_another_model_has_the_sizes_of_its_directory() -> None:
    """A larger critic takes more devices, and more memory."""
    own, larger = (
        given(problem_of("8xH100", *SEPARATED, PPO, *path)) for path in ((), ("algorithm.critic.path=Qwen2.5-7B",))
    )
    assert own.allocation.critic is not None
    assert larger.allocation.critic is not None
    assert larger.allocation.critic.devices > own.allocation.critic.devices
    assert larger.parts.critic_s > own.parts.critic_s
    with pytest.raises(PlanError, match=r"the model 'nowhere' is neither a directory with a config\.json"):
        problem_of("8xH100", PPO, "algorithm.critic.path=nowhere")


def test_an_engine_that_joins_a_pool_is_like_the_others_there_and_has_devices_from_the_beginning() -> None:
    wide = "cluster.rollout.pools.wide={workers: 1, max_workers: 3, engine: {tp: 2, max_batch_size: 32}}"
    problem = problem_of("16xH100", *SEPARATED, wide)
    candidate = given(problem)
    assert candidate.allocation.layout.devices == 16 - 1 - 3 * 2
    scenario = scenario_for(problem, candidate, 1)
    assert [kind.name for kind in scenario.engines] == ["rollout", "rollout.wide"]
    assert scenario.elastic is not None
    joining = scenario.elastic.joining
    assert joining == replace(scenario.engines[1], starts_s=joining.install_s, arrive_s=joining.arrive_s)
    assert (scenario.elastic.limits.least, scenario.elastic.limits.most) == (1, 3)


def sequential(*recipe: str) -> Problem:
    return problem_of("8xH100", *SEPARATED, "trainer.micro_batch_tokens=16384", *recipe)


@pytest.mark.parametrize(
    "algorithm", [("algorithm.kl.coefficient=0",), ("algorithm.kl.coefficient=0.1",), (PPO,)], ids=str
)
@pytest.mark.parametrize("mode", USUAL[1:], ids=str)
def test_a_recipe_has_the_parts_of_the_same_plan_and_so_its_interval(mode: Mode, algorithm: tuple[str, ...]) -> None:
    keys = (f"pipeline.{key}={value}" for key, value in mode.values.items())
    problem = problem_of("4xH100", *SEPARATED, *keys, *algorithm)
    for one in Candidates(problem).of(mode):
        recipe = config_of(problem.config, one)
        assert with_allocation(replace(problem, config=recipe), one.allocation).parts == one.parts


def test_the_interval_covers_engines_trainer_and_weights() -> None:
    problem = sequential("cluster.rollout.workers=4")
    candidate = given(problem)
    bases = bases_of(problem, candidate)
    engines, trainer = bases.engines.error, bases.trainer.error
    assert trainer < engines < bases.weights.error
    summing = Summing(0)
    SimulatedRun(scenario_for(problem, candidate, 1), problem.drawn, sinks=(summing,)).run()
    shorter, longer = planned(problem, candidate, summing.summary(preemptions=0)).errors
    assert 1 + trainer < longer
    assert shorter < 1 / (1 + trainer)


def test_engines_that_differ_share_the_work_in_the_parts_of_the_bound() -> None:
    """A pool as fast as another takes half of the work; one that is slower takes less."""
    four, two_pools, few = (
        given(sequential(*recipe))
        for recipe in (
            ("cluster.rollout.workers=4",),
            ("cluster.rollout.workers=2", "cluster.rollout.pools.same.workers=2"),
            ("cluster.rollout.workers=2", "cluster.rollout.pools.slow={workers: 2, engine: {max_batch_size: 8}}"),
        )
    )
    assert two_pools.bound.generation_s == pytest.approx(four.bound.generation_s)
    two = with_allocation(sequential(), replace(four.allocation, rollout=(replace(four.engines, engines=2),)))
    assert four.bound.generation_s < few.bound.generation_s < two.bound.generation_s


@pytest.mark.parametrize(
    ("heads", "arrangement"),
    [(9, "{type: native}"), (12, "{type: native, dp: 3, adaptive_tp: {}}")],
    ids=["nine heads", "an adaptive TP degree of 3"],
)
def test_engines_that_the_kernel_tables_lack_are_simulated_by_arithmetic(heads: int, arrangement: str) -> None:
    pytest.importorskip("aiconfigurator_core", reason="the package aiconfigurator-core is not installed")
    problem = sequential("cluster.rollout.workers=1", f"engine={arrangement}")
    shape = replace(problem.shape, heads=heads, kv_heads=3, head_dim=64)
    problem = replace(problem, shape=shape, times=None, _sources={})
    candidate = given(problem)
    SimulatedRun(scenario_for(problem, candidate, 1), problem.drawn).run()
    assert bases_of(problem, candidate).engines.kind == "analytic"


@pytest.mark.parametrize("kl", ["algorithm.kl.coefficient=0", "algorithm.kl.coefficient=0.1"])
def test_colocated_the_engine_has_what_trainer_and_reference_leave(kl: str) -> None:
    problem = problem_of("8xH100", "pipeline.placement=colocated", kl, model="Qwen2.5-7B")
    candidate = given(problem)
    reference = candidate.allocation.reference
    weights = 0.0 if reference is None else 2 * problem.setup(reference).parameters
    (engine,) = engine_memories(problem, candidate).values()
    taken = engine.peak + candidate.trainer.peak + weights
    assert 0.8 * 80e9 < taken <= candidate.allocation.trainer.device.memory_bytes - CONTEXT_BYTES


def test_colocated_the_engine_has_what_trainer_and_critic_leave() -> None:
    problem = problem_of("8xH100", "pipeline.placement=colocated", PPO, model="Qwen2.5-7B")
    candidate = given(problem)
    assert candidate.critic is not None
    (engine,) = engine_memories(problem, candidate).values()
    taken = engine.peak + candidate.trainer.peak + sum(candidate.critic.held.values())
    assert 0.8 * 80e9 < taken <= candidate.allocation.trainer.device.memory_bytes - CONTEXT_BYTES


def test_a_colocated_cache_that_has_no_room_beside_the_trainer_is_refused() -> None:
    colocated = "pipeline.placement=colocated"
    with pytest.raises(PlanError, match=r"H100 has room for [\d.]+ beside Qwen2\.5-7B and its trainer with TP 1"):
        given(problem_of("8xH100", colocated, "engine={type: native, kv_cache_gib: 50}", model="Qwen2.5-7B"))


def test_keys_of_the_engine_count_in_memory_and_time() -> None:
    default, small, single = (
        sequential("cluster.rollout.workers=2", f"engine={{type: native{keys}}}")
        for keys in ("", ", prefill_tokens: 1000, block_size: 32", ", dtype: float32")
    )
    ((usual, *_), (other, *_), (fp32, *_)) = (
        scenario_for(one, given(one), 1).engines for one in (default, small, single)
    )
    assert (other.prefill_tokens, other.block) == (1000, 32)
    assert other.cache_tokens > usual.cache_tokens, "a smaller step has fewer activations"
    assert fp32.cache_tokens < usual.cache_tokens / 1.9
    assert fp32.install_s == 2 * usual.install_s, "weights have twice the bytes"


def test_keys_of_the_trainer_count_in_memory_and_time() -> None:
    default, fp32, again = (
        given(sequential("cluster.rollout.workers=2", *keys))
        for keys in ((), ("trainer.precision=fp32",), ("trainer.gradient_checkpointing=true",))
    )
    assert fp32.parts.training_s > default.parts.training_s
    assert default.allocation.layout.checkpointing == "none"
    assert again.allocation.layout.checkpointing == "full"
    assert again.trainer.peak < default.trainer.peak


def test_a_sample_that_an_engine_does_not_take_is_refused() -> None:
    with pytest.raises(PlanError, match=r"tokens, and engine\.max_model_len is 2000; raise it"):
        sequential("engine={type: native, max_model_len: 2000}")


def test_weights_leave_the_trainer_as_fast_as_its_devices_send_them(three: Callable[..., Cluster]) -> None:
    """Eight devices of an engine take what one device of the trainer sends."""
    cluster = open_cluster("16xH100")
    problem = problem_of(cluster, *SEPARATED, "engine={type: native, dp: 4}")
    allocation = given(problem).allocation
    few = replace(allocation, layout=replace(allocation.layout, tp=1, pp=1, dp=1))
    slow = replace(allocation, trainer=replace(allocation.trainer, network=Link(bytes_per_s=1e9)))
    (usual,), (of_one,), (of_slow,) = (arrivals_s(cluster, one, 16e9) for one in (allocation, few, slow))
    assert of_one > 3.5 * usual
    assert of_slow > 2 * usual


def test_a_profile_of_the_model_on_such_devices_scales_the_steps(tmp_path: Path) -> None:
    problem = sequential("cluster.rollout.workers=2")
    shape, (pool,) = problem.shape, problem.cluster.pools
    analytic = AnalyticStepTimes(shape, pool)
    own = {"layers": shape.layers, "hidden_size": shape.hidden, "kv_heads": shape.kv_heads}
    key = msgspec.structs.replace(KEY, architecture=own, hardware="NVIDIA H100 80GB HBM3")
    slow = made_profile(lambda tp, size, tokens, _: 3 * analytic.step_s(tp, size, tokens, 1), key=key)
    measured = replace(problem, times=None, profile=slow, _sources={})
    plan = given(measured)
    assert bases_of(measured, plan).engines.kind == "calibrated"
    source = measured.source(plan.engines)
    assert source.step_s(1, 8, 8000, 1) == pytest.approx(3 * analytic.step_s(1, 8, 8000, 1), rel=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hardware": "NVIDIA A100-SXM4-80GB"}, "the profile is of NVIDIA A100-SXM4-80GB, and the cluster has H100"),
        ({"model": "other", "architecture": {"layers": 2}}, "the profile is of other, which has"),
        ({"dtype": "float32"}, "the profile was measured in float32, and engines compute in bfloat16"),
    ],
)
def test_a_profile_of_other_devices_another_model_or_another_dtype_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    problem = sequential("cluster.rollout.workers=2")
    shape = problem.shape
    own = {"layers": shape.layers, "hidden_size": shape.hidden, "kv_heads": shape.kv_heads}
    key = msgspec.structs.replace(KEY, **{"architecture": own, "hardware": "H100", **changes})
    with pytest.raises(PlanError, match=said):
        check_profile(made_profile(lambda *_: 0.01, key=key), shape, problem.cluster.pools, {"bfloat16"})


def test_keys_and_values_go_to_other_engines_by_the_network(three: Callable[..., Cluster]) -> None:
    recipe = ("cluster.rollout.datacentre=east", "cluster.rollout.pools.wide={datacentre: west, engine: {tp: 2}}")
    problem = problem_of(three(), *SEPARATED, *recipe)
    near, far = (kind.link for kind in scenario_for(problem, given(problem), 1).engines)
    assert near.form == far.form
    assert near.form is not None
    assert near.form.token_bytes == problem.shape.cache_bytes()
    assert far.byte_s == 1e-9, "the link between the datacentres"
    assert near.byte_s is not None
    assert near.byte_s < far.byte_s


def test_an_engine_may_have_a_part_of_the_only_node() -> None:
    problem = problem_of("7xH100", *SEPARATED, "engine={type: native, tp: 4}")
    assert given(problem).allocation.layout.devices == 3
    assert {1, 2, 4} <= {one.engines.tp for one in Candidates(problem).of(USUAL[1])}


def test_no_trainer_has_a_replica_in_two_nodes_of_six() -> None:
    (pool,) = open_cluster("8xH100").pools
    pool = replace(pool, nodes=2, per_node=6)
    found = {one.tp for one in Candidates(problem_of(Cluster(pools=(pool,)))).trainer.layouts(pool, 12)}
    assert found == {1, 2, 3, 6}


def test_one_more_pool_on_which_the_reference_does_not_fit_ends_no_plan() -> None:
    problem = problem_of("1xRTX-4090+16xH100", "algorithm.kl.coefficient=0.1", model="Qwen2.5-14B")
    assert Candidates(problem).of(USUAL[1])


@pytest.mark.parametrize("streaming", [False, True])
def test_more_memory_makes_no_trainer_slower(streaming: bool) -> None:
    (pool,) = open_cluster("16xH100").pools
    seconds = []
    for gib in (40, 48, 56, 64, 80):
        device = pool.device.model_copy(update={"memory_gib": gib})
        cluster = Cluster(pools=(replace(pool, device=device),))
        streams = f"pipeline.streaming={str(streaming).lower()}"
        workers = "cluster.rollout.workers=4"
        problem = problem_of(
            cluster, *SEPARATED, streams, workers, "engine={type: native, tp: 2}", model="Qwen2.5-7B", steps=2
        )
        space, allocation = Candidates(problem).trainer, given(problem).allocation
        training = space.training(pool, allocation.layout, problem.config.trainer.micro_batch_tokens)
        seconds.append(space.played_s(training, streaming=streaming))
    assert seconds == sorted(seconds, reverse=True)

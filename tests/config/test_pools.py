"""Several pools of rollout workers in one recipe."""

from typing import Any

import pytest

from tailrace.config.cluster import PoolConfig, kind_of_pool, pool_key
from tailrace.config.load import load_as, parse_as
from tailrace.config.run import RunConfig
from tailrace.config.written import written
from tailrace.errors import ConfigError
from tailrace.run.workers.pools import check_whole_steps, run_pools

POOLS = "cluster.rollout.pools"


def recipe(*overrides: str) -> RunConfig:
    whole = {
        "output_dir": "run",
        "prompts": {"source": {"type": "jsonl", "path": "prompts.jsonl"}},
        "rewards": {"grader": {"type": "exact"}},
        "pipeline": {"placement": "separated"},
    }
    return load_as(RunConfig, whole, overrides)


def engine(config: RunConfig, pool: str) -> Any:
    return config.engines[pool]


def test_one_pool_is_as_short_to_write_as_ever() -> None:
    config = recipe("cluster.rollout.workers=3")
    assert config.engines == {"rollout": config.engine}
    assert list(run_pools(config)) == ["rollout", "reward", "trainer"]
    assert config.cluster.rollout.total == 3


def test_a_further_pool_has_the_keys_of_the_engine_that_it_leaves_out() -> None:
    config = recipe("engine.max_batch_size=7", "engine.dtype=float32", f"{POOLS}.large.engine.tp=2")
    assert (engine(config, "rollout").tp, engine(config, "rollout.large").tp) == (1, 2)
    assert engine(config, "rollout.large").max_batch_size == 7
    assert engine(config, "rollout.large").dtype == "float32"


def test_a_pool_without_engine_has_that_of_the_run() -> None:
    config = recipe("engine.max_batch_size=7", f"{POOLS}.spare.workers=0")
    assert config.engines["rollout.spare"] == config.engine


def test_another_type_of_engine_takes_no_keys_of_the_first() -> None:
    config = recipe("engine.max_batch_size=7", f"{POOLS}.other.engine.type=hf")
    assert config.engines["rollout.other"].type == "hf"


@pytest.mark.parametrize(
    ("given", "engines"),
    [
        ("cluster.rollout.workers=2", 3),
        ("cluster.address=auto", None),
        ("pipeline.placement=colocated", None),
        ("engine.adaptive_tp.engines=1", 1),
    ],
)
def test_adaptive_tp_knows_how_many_engines_share_the_machine_of_a_run(given: str, engines: int | None) -> None:
    pools = [] if "colocated" in given else [f"{POOLS}.spare.workers=1"]
    config = recipe("engine.dp=2", "engine.adaptive_tp={}", *pools, given)
    assert {engine(config, pool).adaptive_tp.engines for pool in config.engines} == {engines}


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ([], 1),
        (["cluster.rollout.cpus=4"], 2),
        (["cluster.rollout.threads=6", "cluster.address=auto"], 3),
        (["cluster.rollout.cpus=4", "engine.threads_per_rank=1"], 1),
        (["cluster.rollout.cpus=4", "engine.dp=1"], None),
        (["cluster.rollout.cpus=4", "device=cuda", "cluster.rollout.gpus=2", "cluster.trainer.gpus=1"], None),
        (["pipeline.placement=colocated", "threads=8"], 4),
        (["pipeline.placement=colocated"], None),
    ],
)
def test_ranks_share_the_threads_of_their_engine(given: list[str], threads: int | None) -> None:
    assert engine(recipe("engine.dp=2", *given), "rollout").threads_per_rank == threads


@pytest.mark.parametrize(("algorithm", "workers"), [("ppo", 1), ("grpo", 2)])
def test_whole_steps_are_claimed_from_several_controllers_by_one_worker(algorithm: str, workers: int) -> None:
    config = recipe(f"algorithm.type={algorithm}", f"cluster.reward.workers={workers}")
    check_whole_steps(config, 2)


def test_several_workers_that_claim_whole_steps_from_several_controllers_are_refused() -> None:
    config = recipe("algorithm.type=ppo", "cluster.reward.workers=2")
    check_whole_steps(config, 1)
    with pytest.raises(ConfigError, match=r"cluster\.reward has 2 workers, whose task advantage claims whole steps"):
        check_whole_steps(config, 2)


def test_a_recipe_that_is_written_and_read_again_is_the_same() -> None:
    config = recipe("engine.max_batch_size=7", f"{POOLS}.a.engine.tp=2", f"{POOLS}.b.workers=2")
    assert parse_as(RunConfig, written(config), source="test") == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_pools_are_named_by_their_keys_and_stand_with_their_kind() -> None:
    config = recipe(f"{POOLS}.large.gpus=2.0", "cluster.rollout.workers=2")
    pools = run_pools(config)
    assert list(pools) == ["rollout", "rollout.large", "reward", "trainer"]
    assert pools["rollout.large"].gpus == config.cluster.pool("rollout.large").gpus == 2
    assert pool_key("rollout.large") == f"{POOLS}.large"
    assert [kind_of_pool(name) for name in pools] == ["rollout", "rollout", "reward", "trainer"]
    assert config.cluster.rollout.total == 3


def test_weights_travel_in_the_widest_dtype_of_all_engines() -> None:
    assert recipe("engine.dtype=bfloat16", f"{POOLS}.a.engine.tp=2").wire_dtype == "bfloat16"
    assert recipe("engine.dtype=bfloat16", f"{POOLS}.a.engine.dtype=float32").wire_dtype == "float32"


def test_without_separate_workers_there_is_one_engine() -> None:
    assert list(recipe("pipeline.placement=colocated", f"{POOLS}.a.engine.tp=2").engines) == ["rollout"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["a.engine.max_batch_siz=2"],
            "unknown key {}.a.engine.max_batch_siz; did you mean {}.a.engine.max_batch_size",
        ),
        (["a.engine.vocab_size=2"], "unknown key {}.a.engine.vocab_size; it belongs to {}.a.engine.type fake"),
        (["a.engine.tp=many"], "{}.a.engine.tp is 'many': input should be a valid integer"),
        (["a.engine.link.latency_us=2.0"], "{}.a.engine with link needs tp of 2 or more"),
        (["a.engine=2"], "{}.a.engine is 2; expected keys, {}.a.engine.type first"),
        (["a.worker=2"], "unknown key {}.a.worker; did you mean {}.a.workers?"),
        (["A.workers=2"], "{}.A is 'A': string should match"),
        (
            ["a.max_workers=2", "b.max_workers=3"],
            "in 2 pools, {}.a and {}.b, and the run chooses the number of workers",
        ),
        (["a.min_workers=3", "a.max_workers=2"], "{}.a has min_workers 3, which is more than max_workers 2; lower"),
        (["a.workers=0", "a.max_workers=3"], "{}.a has 0 workers, which is not from min_workers 1 to max_workers 3"),
    ],
)
def test_a_pool_that_cannot_be_is_named(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(*(f"{POOLS}.{override}" for override in overrides))
    assert said.replace("{}", POOLS) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pool_with_a_key_of_its_own_is_not_given_by_name() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.pools has trainer, .* use cluster\.trainer$"):
        recipe("cluster.pools.trainer.workers=1")


def test_some_pool_has_workers() -> None:
    assert recipe("cluster.rollout.workers=0", f"{POOLS}.a.workers=1").cluster.rollout.total == 1
    with pytest.raises(
        ConfigError, match=r"cluster\.rollout has 0 workers in all of its pools; give one pool 1 or more"
    ):
        recipe("cluster.rollout.workers=0", f"{POOLS}.a.workers=0")


def test_a_name_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="the key 'a' is there twice; remove one"):
        load_as(RunConfig, {}, ["cluster.rollout.pools={a: {workers: 1}, a: {workers: 2}}"])


def test_one_elastic_pool_may_be_any_of_them() -> None:
    rollout = recipe(f"{POOLS}.a.max_workers=4").cluster.rollout
    assert rollout.elastic == "rollout.a"
    assert (rollout.each["rollout.a"].least, rollout.each["rollout.a"].most) == (1, 4)
    assert recipe().cluster.rollout.elastic is None
    assert isinstance(recipe().cluster.rollout, PoolConfig)

"""Claims on what a recipe takes without a search: what `--dry-run` prints."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.hardware import DeviceConfig
from tailrace.config.run import RunConfig
from tailrace.engine.factory import make_backend
from tailrace.planner.candidates import Candidates
from tailrace.planner.modes import Mode
from tailrace.planner.outlook import Machine, Outlook, outlook
from tailrace.planner.problem import Problem
from tailrace.planner.run_memory import RunMemory, memory_of
from tailrace.planner.sized_run import Prompts, SizedRun
from tailrace.planning.allocation import Allocation, Engines
from tailrace.planning.engine_size import PROCESS_BYTES
from tailrace.planning.hardware.catalogue import find_device
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.training_setup import Layout
from tailrace.run.workers.pools import run_pools
from tailrace.workloads.replay import Replay, Script, Turn
from tests.helpers.runs import small_run

SHAPE = ModelShape(
    name="small", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=256, vocab=1000, tied=True
)


def machine(tflops: float = 1e-3, gb_s: float = 1.0, threads: int | None = 2) -> Machine:
    rates: dict[str, Any] = dict.fromkeys(("link_gb_s", "network_gb_s", "host_gb_s"), gb_s)
    device = DeviceConfig(
        tflops={"bfloat16": tflops, "float32": tflops},
        memory_gib=16,
        memory_gb_s=gb_s,
        devices_per_node=1,
        watts=1,
        usd_per_hour=1,
        **rates,
    )
    return Machine(kind="a CPU", device=device, threads=threads, is_measured=True)


SLOW = machine()


def config(**changes: Any) -> RunConfig:
    return small_run(Path("run"), Path("model"), Path("prompts.jsonl"), **changes)


def sized(config: RunConfig, shape: ModelShape, prompt: float, longest: int) -> SizedRun:
    engines = {pool: make_backend(engine).size for pool, engine in config.engines.items()}
    prompts = Prompts(mean=prompt, longest=longest)
    return SizedRun(config=config, shape=shape, engines=engines, prompts=prompts, pools=run_pools(config))


def look(
    config: RunConfig, shape: ModelShape = SHAPE, prompt: float = 10, machine: Machine = SLOW, longest: int = 20
) -> Outlook:
    return outlook(sized(config, shape, prompt, longest), machine)


def memory(config: RunConfig) -> RunMemory:
    return memory_of(sized(config, SHAPE, 10, 20))


def separated(address: str | None = None, cluster: Any = (), algorithm: Any = None, **pipeline: Any) -> RunConfig:
    changes = {} if algorithm is None else {"algorithm": algorithm}
    return config(
        pipeline={"placement": "separated", **pipeline},
        cluster={"address": address, **dict(cluster)},
        **SERVICE,
        **changes,
    )


SERVICE: dict[str, Any] = {"queue": {"type": "service"}}


def peak(found: RunMemory, name: str) -> float:
    (size,) = (worker.memory.peak for worker in found.workers if worker.name == name)
    return size


def count(found: RunMemory, name: str) -> int:
    return sum(worker.count for worker in found.workers if worker.name == name)


def test_in_one_process_engine_and_trainer_hold_their_own_while_the_other_works() -> None:
    (worker,) = memory(config()).workers
    assert worker.name == "trainer and engine"
    assert worker.memory.worst == "loss of the trainer"
    held = worker.memory.instants[worker.memory.worst]
    assert held["KV cache of the engine"] == pytest.approx(0.01 * 2**30)
    assert held["weights of the engine"] == pytest.approx(4 * SHAPE.parameters, rel=0.01)
    training = sum(held[f"{name} of the trainer"] for name in ("weights", "gradients", "moments"))
    assert training == pytest.approx(16 * SHAPE.parameters, rel=0.01)


def test_a_kl_penalty_adds_the_reference() -> None:
    runs = config(algorithm__kl={"coefficient": 0.1}), config()
    added = memory(runs[0]).total_bytes - memory(runs[1]).total_bytes
    assert added == pytest.approx(4 * SHAPE.parameters, rel=0.01)
    with_kl, without = map(look, runs)
    assert with_kl.bound is not None
    assert without.bound is not None
    assert with_kl.bound.reference_s > 0 == without.bound.reference_s


PPO: dict[str, Any] = {"algorithm": {"type": "ppo", "group_size": 4}}


def test_a_critic_in_the_same_process_holds_as_much_as_the_trainer_and_has_its_turns() -> None:
    ppo, without = config(**PPO), config(algorithm={"type": "grpo", "group_size": 4})
    (worker,) = memory(ppo).workers
    assert worker.name == "trainer and engine and critic"
    held = worker.memory.instants[worker.memory.worst]
    training = sum(held[f"{name} of the critic"] for name in ("weights", "gradients", "moments"))
    assert training == pytest.approx(16 * SHAPE.parameters, rel=0.01)  # its head is the embedding, too
    trained, alone = look(ppo).bound, look(without).bound
    assert trained is not None
    assert alone is not None
    assert trained.critic_s > 0
    assert trained.seconds == pytest.approx(alone.seconds + trained.critic_s)


def test_a_separate_critic_has_a_process_of_its_own_and_trains_beside_the_trainer() -> None:
    both = separated(cluster={"pools": {"critic": {"cpus": 2}}}, **PPO)
    found = memory(both)
    assert count(found, "critic") == 1
    assert peak(found, "critic") > 16 * SHAPE.parameters
    bound = look(both, machine=machine(threads=8)).bound
    alone = look(separated(), machine=machine(threads=8)).bound
    assert bound is not None
    assert alone is not None
    assert alone.seconds < bound.seconds < alone.seconds + bound.critic_s


def test_a_critic_of_another_model_has_its_sizes() -> None:
    other = config(algorithm={"type": "ppo", "group_size": 4, "critic": {"path": "Qwen2.5-0.5B"}})
    assert memory(other).total_bytes - memory(config(**PPO)).total_bytes > 16 * 0.3e9


def test_each_reference_worker_has_the_frozen_weights_and_a_process() -> None:
    cluster = {"reference": {"workers": 3}}
    without, with_kl = (
        memory(config(pipeline={"placement": "separated"}, cluster=cluster, **SERVICE, **changes))
        for changes in ({}, {"algorithm__kl": {"coefficient": 0.1}})
    )
    assert (count(without, "reference"), count(with_kl, "reference")) == (0, 3)
    assert with_kl.others["processes"] - without.others["processes"] == 3 * PROCESS_BYTES


def test_the_engines_of_every_pool_count_as_often_as_they_have_workers() -> None:
    def rollout(**values: Any) -> RunConfig:
        return separated(cluster={"rollout": values})

    small = {"engine": {"kv_cache_gib": 0.005}}
    three = rollout(workers=2, pools={"small": {"workers": 3, **small}, "none": {"workers": 0, **small}})
    pools = memory(three)
    assert count(pools, "engine") == 2
    assert count(pools, "engine of rollout.small") == 3
    assert peak(pools, "engine") - peak(pools, "engine of rollout.small") == pytest.approx(0.005 * 2**30)
    assert look(three).generation_s == pytest.approx(look(rollout(workers=5)).generation_s)
    one = look(rollout(workers=1, pools={"one": {"engine": {"max_batch_size": 1}}})).generation_s
    assert one is not None
    assert one > (look(rollout(workers=2)).generation_s or 0.0), "the slowest is the last"


def test_gradient_checkpointing_keeps_less_and_takes_longer() -> None:
    micro: dict[str, Any] = {"trainer__micro_batch_tokens": 4096, "sampling__max_new_tokens": 2000}
    kept, again = (config(trainer__gradient_checkpointing=on, **micro) for on in (False, True))
    assert memory(again).total_bytes < memory(kept).total_bytes
    assert (look(again).training_s or 0.0) > (look(kept).training_s or 0.0)


def test_time_grows_with_response_length_and_shrinks_with_speed() -> None:
    short, long = (look(config(sampling__max_new_tokens=tokens)).bound for tokens in (10, 20))
    fast = look(config(sampling__max_new_tokens=10), machine=machine(2e-3, 2.0)).bound
    assert short is not None
    assert long is not None
    assert fast is not None
    assert short.seconds < long.seconds < 2.1 * short.seconds
    assert fast.seconds == pytest.approx(short.seconds / 2, rel=0.05)


def test_a_shared_prompt_is_trained_on_once_a_group() -> None:
    large, larger = (look(config(), prompt=prompt, longest=900).training_s or 0.0 for prompt in (400, 800))
    alone = look(config(algorithm__group_size=2), prompt=400, longest=900).training_s or 0.0
    assert large < larger < 2.5 * large
    assert alone > 1.8 * large, "twice as many groups have twice as many prompts"


def test_processes_of_ranks_add_themselves_and_weights_on_their_way() -> None:
    one, two = (memory(config(engine={"type": "native", "tp": tp})) for tp in (1, 2))
    assert two.others == {"processes": 2.0 * PROCESS_BYTES, "staged weights": 8 * SHAPE.parameters}
    assert not one.others
    engine = next(worker for worker in two.workers if worker.name == "engine")
    assert engine.count == 2
    assert not any("staged weights" in held for held in engine.memory.instants.values()), (
        "they are in the machine's memory, whatever the ranks are on"
    )


def test_ranks_that_the_heads_cannot_be_split_among_have_one_more() -> None:
    assert look(config(engine={"type": "native", "tp": 3})).generation_s


def test_copies_of_the_model_on_a_cpu_share_its_memory_bandwidth() -> None:
    fast = machine(tflops=1e6)
    one, two = (
        look(config(engine={"type": "native", "dp": dp, "max_batch_size": 2}), prompt=1, machine=fast).generation_s
        for dp in (1, 2)
    )
    assert two == pytest.approx(one, rel=0.1)


def test_what_adapters_take_is_not_guessed() -> None:
    backend = {"backend": {"type": "adapter", "path": "a.b"}, "steps": 4, "train_batch_size": 8}
    own = config(engine={"type": "adapter", "path": "a.b"}), config(trainer=backend)
    plain, mine, theirs = map(look, (config(), *own))
    assert (mine.generation_s, mine.bound, mine.training_s) == (None, None, plain.training_s)
    assert (theirs.training_s, theirs.bound, theirs.generation_s) == (None, None, plain.generation_s)
    assert [worker.name for run in own for worker in memory(run).workers] == ["trainer", "engine"]


def test_an_engine_without_a_model_takes_nothing() -> None:
    for pipeline in ({}, {"placement": "separated", "max_staleness": 1}):
        found = look(config(engine={"type": "fake"}, pipeline=pipeline))
        assert found.generation_s == 0
        assert found.bound is not None
        assert found.bound.seconds >= (found.training_s or 0.0)


def test_separate_pools_have_their_part_of_the_threads_and_work_side_by_side_with_a_staleness() -> None:
    together, apart = look(config()), look(separated())
    assert (apart.training_s or 0.0) > (together.training_s or 0.0), "the trainer has one of the two threads"
    ahead = look(separated(max_staleness=1))
    assert ahead.bound is not None
    assert apart.bound is not None
    assert ahead.bound.seconds < apart.bound.seconds
    assert ahead.training_s == apart.training_s


def test_pools_that_want_all_threads_of_one_machine_at_a_time_have_half_each() -> None:
    cluster = {"rollout": {"threads": 2}, "trainer": {"threads": 2}}
    ahead, in_turns = (look(separated(cluster=cluster, max_staleness=staleness)) for staleness in (1, 0))
    half = look(separated(max_staleness=1))
    assert (ahead.generation_s, ahead.training_s) == (half.generation_s, half.training_s)
    assert (in_turns.training_s or 0.0) < (half.training_s or 0.0)


def test_two_versions_of_the_weights_are_held_wherever_engines_cannot_use_the_trainers() -> None:
    def published(address: str | None, **weights: str) -> float:
        cluster = {"rollout": {"workers": 3}, "address": address}
        made = config(pipeline={"placement": "separated"}, cluster=cluster, weights=weights, **SERVICE)
        return memory(made).others["published weights"]

    assert published(None) == 2 * 4 * SHAPE.parameters
    assert published(None, medium="tcp") == published("10.0.0.1:6379") == 4 * published(None)


def test_rollout_workers_of_a_cluster_share_the_work_and_each_has_an_engine() -> None:
    runs = [separated("10.0.0.1:6379", cluster={"rollout": {"workers": n}}) for n in (1, 4)]
    fast, slow = (look(run).generation_s or 0.0 for run in reversed(runs))
    assert fast < slow
    one, four = map(memory, runs)
    assert count(four, "engine") == 4
    assert four.others["processes"] - one.others["processes"] == 3 * PROCESS_BYTES


def test_it_is_what_the_planner_says_of_the_same_devices_and_lengths() -> None:
    shape, cluster = find_shape("Qwen2.5-0.5B"), open_cluster("2xH100")
    engine = {"type": "native", "dtype": "bfloat16", "kv_cache_gib": 40.0, "max_batch_size": 64}
    run = separated(streaming=True).model_copy(update={"engine": config(engine=engine).engine})
    run = run.model_copy(update={"trainer": run.trainer.model_copy(update={"precision": "bf16"})})
    script = Script(prompt_tokens=10, turns=(Turn(generated_tokens=run.sampling.max_new_tokens),))
    drawn = Replay([[script] * run.algorithm.group_size] * run.groups_per_step)
    problem = Problem(config=run, shape=shape, cluster=cluster, workload="longest", drawn=drawn)
    pool = cluster.pools[0]
    engines = Engines(pool=pool, engines=1, slots=64, cache_tokens=0)
    allocation = Allocation(rollout=(engines,), trainer=pool, layout=Layout())
    mode = Mode(placement="separated", streaming=True)
    candidate = Candidates(problem).placed(mode, allocation, run.trainer.micro_batch_tokens)
    kind, device = find_device("H100")
    found = look(run, shape, 10, Machine(kind=kind, device=device), longest=10)
    assert candidate is not None
    assert found.generation_s == pytest.approx(candidate.bound.generation_s)
    assert found.training_s == pytest.approx(candidate.bound.training_s)


def test_a_step_of_the_recipe_grpo_is_within_what_was_expected() -> None:
    """Measured in its second step on 2 cores of an AMD EPYC, with 407e9 operations a second in bf16 and 18e9 bytes.

    The 890 tokens of 32 responses were generated in 1.06 s and trained on in 3.96 s.
    """
    sizes: dict[str, Any] = {"algorithm__group_size": 8, "trainer__train_batch_size": 32, "trainer__precision": "bf16"}
    engine = {"type": "native", "dtype": "bfloat16"}
    run = config(engine=engine, sampling__max_new_tokens=28, trainer__micro_batch_tokens=4096, **sizes)
    found = look(run, find_shape("SmolLM2-135M"), 47, machine(0.407, 18.0), longest=60)
    assert found.generation_s is not None
    assert found.training_s is not None
    for measured_s, foretold_s in ((1.06, found.generation_s), (3.96, found.training_s)):
        low, high = found.basis.interval(foretold_s)
        assert low < measured_s < high


def test_weights_take_a_while_to_separate_engines_and_longer_to_other_machines() -> None:
    own, here, there = (look(run).bound for run in (config(), separated(), separated("auto")))
    assert own is not None
    assert here is not None
    assert there is not None
    assert own.weights_s < here.weights_s < there.weights_s

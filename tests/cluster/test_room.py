"""Requests that no cluster could hold are refused before anything is started."""

import pytest

from tailrace.cluster.room import check_room, check_this_machine
from tailrace.config.cluster import EnginePoolConfig, PoolConfig
from tailrace.errors import ConfigError

TWO_CORES = {"CPU": 2.0, "memory": 1e9}


def test_pools_that_fit_are_accepted() -> None:
    check_room({"rollout": PoolConfig(), "trainer": PoolConfig(), "reward": PoolConfig(cpus=0.0)}, [TWO_CORES])


def test_workers_that_reserve_nothing_fit_any_cluster() -> None:
    check_room({"reward": PoolConfig(workers=100, cpus=0.0)}, [{}])


def test_pools_that_ask_for_too_much_together_are_named() -> None:
    pools = {"rollout": PoolConfig(workers=2), "trainer": PoolConfig(), "reward": PoolConfig(cpus=0.0)}
    with pytest.raises(
        ConfigError, match=r"ask for 3 CPU together \(rollout 2, trainer 1\), and the cluster has 2; use fewer workers"
    ):
        check_room(pools, [TWO_CORES])


def test_a_worker_that_fits_no_single_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.trainer asks for 3 CPU for each worker, .* they have 2 CPU;"):
        check_room({"trainer": PoolConfig(cpus=3.0)}, [TWO_CORES, TWO_CORES])


def test_workers_that_no_spread_over_the_machines_can_hold_are_named() -> None:
    machines = [{"CPU": 3.0}, {"CPU": 3.0}]
    with pytest.raises(
        ConfigError,
        match=r"^cluster\.rollout asks for 3 workers of 2 CPU each, and the 2 machines .* hold 2: they have 3 CPU; use",
    ):
        check_room({"rollout": PoolConfig(workers=3, cpus=2.0)}, machines)
    check_room({"rollout": PoolConfig(workers=2, cpus=2.0), "trainer": PoolConfig(workers=2)}, machines)


def test_tenths_of_a_core_add_up() -> None:
    check_room({"rollout": PoolConfig(workers=3, cpus=0.1)}, [{"CPU": 0.3}])
    with pytest.raises(ConfigError, match=r"ask for 1\.1 CPU together"):
        check_room({"rollout": PoolConfig(workers=11, cpus=0.1)}, [{"CPU": 1.0}])


def test_machines_count_together() -> None:
    check_room({"rollout": PoolConfig(workers=4)}, [TWO_CORES, TWO_CORES])


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (PoolConfig(gpus=1.0), "asks for 1 CPU, 1 GPU for each worker, .* they have 2 CPU, 0 GPU"),
        (PoolConfig(resources={"a100": 1.0}), "asks for 1 CPU, 1 a100 for each worker"),
        (PoolConfig(resources={"memry": 1.0}), "did you mean 'memory'"),
    ],
)
def test_what_no_machine_has_is_named(pool: PoolConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_room({"rollout": pool}, [TWO_CORES])


def test_worker_processes_are_refused_where_there_is_no_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match=r"need Linux; this machine has darwin: use pipeline\.placement=colocated"):
        check_this_machine({"reward": PoolConfig(cpus=0.0)}, gpus=0)


@pytest.mark.parametrize("pool", [PoolConfig(cpus=1e6), PoolConfig(gpus=1000), PoolConfig(cores=(99999,))])
def test_what_this_machine_could_never_have_is_named(pool: PoolConfig) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.rollout"):
        check_this_machine({"rollout": pool}, gpus=8)
    check_this_machine({"reward": PoolConfig(cpus=0.0)}, gpus=0)


def test_each_pool_of_rollout_workers_is_named() -> None:
    pools = {"rollout": PoolConfig(), "rollout.large": PoolConfig(cpus=3.0)}
    with pytest.raises(ConfigError, match=r"^cluster\.rollout\.pools\.large asks for 3 CPU for each worker"):
        check_room(pools, [TWO_CORES])
    with pytest.raises(ConfigError, match=r"ask for 4 CPU together \(rollout 1, rollout\.large 3\)"):
        check_room({"rollout": PoolConfig(), "rollout.large": PoolConfig(workers=3)}, [TWO_CORES])


def test_a_pool_that_begins_without_workers_may_wait_for_machines() -> None:
    check_room({"rollout": PoolConfig(), "rollout.large": EnginePoolConfig(workers=0, gpus=1.0)}, [TWO_CORES])


def test_a_pool_has_room_in_its_datacentre_alone() -> None:
    machines, near = [TWO_CORES, TWO_CORES], ["west", ""]
    check_room({"rollout": PoolConfig(workers=2, datacentre="west"), "trainer": PoolConfig()}, machines, near)
    with pytest.raises(ConfigError, match=r"^in the datacentre west, .* ask for 3 CPU together \(rollout 3\)"):
        check_room({"rollout": PoolConfig(workers=3, datacentre="west")}, machines, near)
    with pytest.raises(ConfigError, match=r"datacentre is 'wset', .* they have west; .*; did you mean 'west'\?"):
        check_room({"rollout.far": PoolConfig(datacentre="wset")}, machines, near)
    with pytest.raises(ConfigError, match=r"no machine of the cluster has that label `datacentre`: they have none"):
        check_room({"rollout": PoolConfig(datacentre="west")}, machines)

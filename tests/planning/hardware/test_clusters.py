"""Claims on clusters that a text or a file describes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.errors import ConfigError, PlanError
from tailrace.planning.hardware.catalogue import catalogue, find_device
from tailrace.planning.hardware.clusters import open_cluster

Write = Callable[[str], str]

FILE = """
pools:
  generation: {device: H20, nodes: 4, datacentre: east}
  training: {device: H800, nodes: 16, datacentre: west, network_gb_s: 25, usd_per_hour: 3}
"""
LINK = "links: [{between: [east, west], gb_s: 10, ms: 2}]\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> str:
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return str(path)

    return write_file


def test_a_text_becomes_whole_nodes() -> None:
    (pool,) = open_cluster("64xH100").pools
    assert (pool.nodes, pool.per_node, pool.devices) == (8, 8, 64)
    (few,) = open_cluster("2 x l40s").pools
    assert (few.kind, few.nodes, few.per_node) == ("L40S", 1, 2)


def test_two_kinds_of_one_datacentre_reach_each_other_at_the_slower_rate() -> None:
    slow, fast = (cluster := open_cluster("8xH20+64xH100")).pools
    assert cluster.devices == 72
    assert cluster.between(slow, fast).bytes_per_s == 8 * slow.network.bytes_per_s


def test_a_file_joins_datacentres_by_its_links(write: Write) -> None:
    cluster = open_cluster(write(FILE + LINK))
    generation, training = cluster.pool("generation"), cluster.pool("training")
    link = cluster.between(generation, training)
    assert (link.bytes_per_s, link.latency_s) == (10e9, 0.002)
    assert training.usd_per_hour == 3
    assert link.seconds(145e9) == pytest.approx(14.502)  # StreamRL section 7.3: 72B in bfloat16 over 80 Gbit/s


def test_a_missing_link_is_named_with_both_ends(write: Write) -> None:
    cluster = open_cluster(write(FILE))
    with pytest.raises(PlanError, match=r"no link between .*'east' \(pool generation\) and 'west' \(pool training\)"):
        cluster.between(*cluster.pools)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("64xH10O", "did you mean 'H100'"),
        ("12xH100", "12 H100 do not fill nodes of 8; give 8 or 16"),
        ("H100", "give it as 64xH100"),
        ("local", "local, this machine, is for tailrace plan alone"),
        ("8xH100+8xh100", "has H100 twice"),
        ("nowhere.yaml", r"nowhere\.yaml cannot be read: No such file"),
    ],
)
def test_a_text_that_is_no_cluster_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as refused:
        open_cluster(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("pools: {a: {device: H100, nods: 2, nodes: 2}}", ConfigError, "nods"),
        ("pools: {}", ConfigError, "pools"),
        ("[1, 2]", PlanError, "must be a mapping with pools"),
        (FILE + "links: [{between: [east, north], gb_s: 1}]", PlanError, "the datacentre 'north', where no pool is"),
        (FILE + "links: [{between: [east, east], gb_s: 1}]", PlanError, "from a datacentre to itself"),
        ("pools: {a: {device: MyGPU, nodes: 2}}", PlanError, "'MyGPU' is not known"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused_in_one_line(
    write: Write, text: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as refused:
        open_cluster(write(text))
    assert "\n" not in str(refused.value)


def test_a_file_may_bring_devices_of_its_own(write: Write) -> None:
    own = "{tflops: {bfloat16: 500}, memory_gib: 64, memory_gb_s: 3000, link_gb_s: 100, network_gb_s: 20, "
    own += "host_gb_s: 30, devices_per_node: 4, watts: 500, usd_per_hour: 1}"
    cluster = open_cluster(write(f"pools: {{a: {{device: mygpu, nodes: 2}}}}\ndevices: {{MyGPU: {own}}}"))
    assert (cluster.devices, cluster.pools[0].device.flops()) == (8, 500e12)


def test_a_device_of_a_file_comes_before_one_of_the_catalogue_that_is_written_otherwise(write: Write) -> None:
    own = "{tflops: {bfloat16: 500}, memory_gib: 47.5, memory_gb_s: 3000, link_gb_s: 100, network_gb_s: 20, "
    own += "host_gb_s: 30, devices_per_node: 4, watts: 500, usd_per_hour: 1}"
    cluster = open_cluster(write(f"pools: {{a: {{device: RTX4090, nodes: 1}}}}\ndevices: {{RTX4090: {own}}}"))
    assert cluster.pools[0].device.memory_gib == 47.5


def test_names_of_devices_are_found_however_they_are_written() -> None:
    assert find_device("rtx4090") == ("RTX-4090", catalogue()["RTX-4090"])
    assert find_device("ascend 910b")[0] == "Ascend-910B"

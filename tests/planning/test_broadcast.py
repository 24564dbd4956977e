import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.broadcast import ROOT, Site, broadcast_tree

HOSTS = st.integers(0, 5)
"""The numbers of hosts. The datacentre of a host is its number modulo 3."""


def site(name: str, host: int, relays: bool = True) -> Site:
    return Site(name=name, host=f"h{host}", datacentre=f"d{host % 3}", relays=relays)


@st.composite
def topologies(draw: st.DrawFn, *, all_relay: bool = False) -> tuple[Site, list[Site]]:
    relays = st.just(True) if all_relay else st.booleans()
    placed = draw(st.lists(st.tuples(HOSTS, relays), max_size=25))
    return site(ROOT, draw(HOSTS)), [site(f"r{n}", host, relay) for n, (host, relay) in enumerate(placed)]


def depth(parents: dict[str, str], name: str) -> int:
    steps = 0
    while name != ROOT:
        name = parents[name]
        steps += 1
        assert steps <= len(parents), "a cycle"
    return steps


@given(topologies(), st.integers(1, 4))
def test_everybody_hangs_below_the_sender(topology: tuple[Site, list[Site]], fan_out: int) -> None:
    root, receivers = topology
    parents = broadcast_tree(root, receivers, fan_out=fan_out)
    assert parents.keys() == {each.name for each in receivers}
    for each in receivers:
        depth(parents, each.name)


@given(topologies(), st.integers(1, 4))
def test_each_remote_datacentre_is_crossed_to_once_from_the_sender(
    topology: tuple[Site, list[Site]], fan_out: int
) -> None:
    root, receivers = topology
    where = {each.name: each for each in (root, *receivers)}
    relaying = {each.datacentre for each in receivers if each.relays}
    crossings = Counter[str]()
    for child, parent in broadcast_tree(root, receivers, fan_out=fan_out).items():
        if where[child].datacentre != where[parent].datacentre:
            assert parent == ROOT
            crossings[where[child].datacentre] += 1
    remote = {each.datacentre for each in receivers} - {root.datacentre}
    assert crossings.keys() == remote
    assert all(crossings[name] == 1 for name in remote & relaying)


@given(topologies(), st.integers(1, 4))
def test_those_on_one_host_have_one_link_to_elsewhere(topology: tuple[Site, list[Site]], fan_out: int) -> None:
    root, receivers = topology
    where = {each.name: each for each in (root, *receivers)}
    fetching = Counter[str]()
    for child, parent in broadcast_tree(root, receivers, fan_out=fan_out).items():
        fetching[where[child].host] += where[child].host != where[parent].host
    assert all(count == (host != root.host) for host, count in fetching.items())


@given(topologies(all_relay=True), st.integers(1, 4))
def test_the_tree_of_a_datacentre_is_balanced(topology: tuple[Site, list[Site]], fan_out: int) -> None:
    root, receivers = topology
    where = {each.name: each for each in (root, *receivers)}
    parents = broadcast_tree(root, receivers, fan_out=fan_out)
    network = [
        (child, parent)
        for child, parent in parents.items()
        if where[child].host != where[parent].host and where[child].datacentre == where[parent].datacentre
    ]
    assert all(count <= fan_out for count in Counter(parent for _, parent in network).values())
    heads = len({each.host for each in receivers} | {root.host})
    levels = heads if fan_out == 1 else math.ceil(math.log(heads * (fan_out - 1) + 1, fan_out))
    assert all(depth(parents, name) <= levels + 2 for name in parents)


@given(topologies(), st.integers(1, 4))
def test_nobody_gets_weights_over_the_network_from_one_that_does_not_relay(
    topology: tuple[Site, list[Site]], fan_out: int
) -> None:
    root, receivers = topology
    where = {each.name: each for each in (root, *receivers)}
    for child, parent in broadcast_tree(root, receivers, fan_out=fan_out).items():
        assert where[parent].relays or where[parent].host == where[child].host


def test_four_behind_a_link_form_a_chain_of_pairs() -> None:
    receivers = [Site(name=f"r{n}", host=f"h{n}", datacentre="far") for n in range(4)]
    root = Site(name=ROOT, host="h", datacentre="near")
    assert broadcast_tree(root, receivers, fan_out=2) == {"r0": ROOT, "r1": "r0", "r2": "r0", "r3": "r1"}


def test_a_fan_out_of_none_and_a_name_given_twice_are_refused() -> None:
    here = site(ROOT, 0)
    with pytest.raises(ValueError, match="fan_out is 0"):
        broadcast_tree(here, [], fan_out=0)
    with pytest.raises(ValueError, match="unique"):
        broadcast_tree(here, [site("a", 1), site("a", 2)], fan_out=2)

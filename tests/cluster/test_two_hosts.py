"""A cluster of two hosts, which are two network namespaces of this machine."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.cluster.namespaces import HEAD, NODE, TwoHosts, needs_two_hosts, two_hosts
from tests.cluster.test_process import gone

pytestmark = needs_two_hosts

_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoHosts]:
    """A Ray cluster across both hosts."""
    with two_hosts() as hosts:
        head = ("--head", "--port", "6379", "--include-dashboard", "false", "--temp-dir", hosts.environment["TMPDIR"])
        hosts.start_ray(hosts.head, *head, "--node-ip-address", HEAD, "--labels", "datacentre=south")
        there = ("--address", f"{HEAD}:6379", "--labels", "datacentre=north")
        hosts.start_ray(hosts.node, *there, "--node-ip-address", NODE)
        yield hosts


@asynccontextmanager
async def driver(hosts: TwoHosts, end: str) -> AsyncIterator[tuple[Process, list[dict[str, Any]], list[int]]]:
    """Start a driver that joins. Return it, the facts about its workers, and all pids of its workers' processes."""
    command = hosts.command(hosts.head, sys.executable, "-m", "tests.cluster.joining_driver", f"{HEAD}:6379", end)
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | hosts.environment, stdout=PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_LIMIT_S):
            assert await process.stdout.readline() == b"south\n"
            facts = json.loads(await process.stdout.readline())
            children = json.loads(await process.stdout.readline())
            yield process, facts, [*children, *(worker["pid"] for worker in facts)]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_run_joins_a_cluster_of_two_hosts_and_hears_of_a_death_on_the_other(cluster: TwoHosts) -> None:
    async with driver(cluster, "death") as (process, facts, pids):
        death, _ = await process.communicate()
    assert process.returncode == 0
    assert {(worker["address"], worker["datacentre"]) for worker in facts} == {(HEAD, "south"), (NODE, "north")}
    assert death.decode().endswith("died: exit code 9; its last output: last words\n")
    await gone(*pids)


async def test_a_killed_driver_leaves_no_worker_on_either_host(cluster: TwoHosts) -> None:
    async with driver(cluster, "wait") as (process, facts, pids):
        assert {worker["address"] for worker in facts} == {HEAD, NODE}
        process.kill()
        await gone(*pids)

"""A cluster of two hosts, which are two network namespaces of this machine."""

import json
import os
import subprocess
import sys

import pytest

from tests.cluster.namespaces import HEAD, NODE, available, two_hosts


@pytest.mark.skipif(not available(), reason="network namespaces need root and `ip`")
def test_a_run_joins_a_cluster_of_two_hosts_and_hears_of_a_death_on_the_other() -> None:
    with two_hosts() as hosts:
        head = ("--head", "--port", "6379", "--include-dashboard", "false", "--temp-dir", hosts.environment["TMPDIR"])
        hosts.start_ray(hosts.head, *head, "--node-ip-address", HEAD)
        there = ("--address", f"{HEAD}:6379", "--labels", "datacentre=north")
        hosts.start_ray(hosts.node, *there, "--node-ip-address", NODE)
        driver = (sys.executable, "-m", "tests.cluster.joining_driver", f"{HEAD}:6379")
        ended = subprocess.run(
            hosts.command(hosts.head, *driver),
            env=os.environ | hosts.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 0, ended.stderr
    facts, replies, death = ended.stdout.splitlines()
    where = {(worker["address"], worker["datacentre"]) for worker in json.loads(facts)}
    assert where == {(HEAD, ""), (NODE, "north")}
    assert json.loads(replies) == [3, 3]
    assert death.endswith("died: exit code 9; its last output: last words")

"""A whole run on two hosts, which are two network namespaces of this machine with a /dev/shm each."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tailrace.events import read_events
from tests.cluster.namespaces import HEAD, NODE, needs_two_hosts, two_hosts
from tests.conftest import TinyModel
from tests.helpers.runs import small_run, steps_of, write_prompts


@needs_two_hosts
def test_a_run_generates_on_another_host(tmp_path: Path, tiny_model: TinyModel) -> None:
    run = tmp_path / "run"
    kinds = ("trainer", "reward", "reference")
    config = small_run(
        run,
        tiny_model("llama"),
        write_prompts(tmp_path / "prompts.jsonl"),
        pipeline={"placement": "separated", "max_staleness": 1, "streaming": True},
        cluster={
            "address": f"{HEAD}:6379",
            "rollout": {"cpus": 0, "resources": {"north": 1}},
            **{kind: {"cpus": 0, "resources": {"south": 0.1}} for kind in kinds},
        },
        queue={"type": "service", "units": 2, "listen": HEAD},
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with two_hosts() as hosts:
        head = ("--head", "--port", "6379", "--include-dashboard", "false", "--temp-dir", hosts.environment["TMPDIR"])
        hosts.start_ray(hosts.head, *head, "--node-ip-address", HEAD, "--resources", '{"south": 1}')
        there = ("--address", f"{HEAD}:6379", "--resources", '{"north": 1}')
        hosts.start_ray(hosts.node, *there, "--node-ip-address", NODE, own_memory=True)
        ended = subprocess.run(
            hosts.command(hosts.head, sys.executable, "-m", "tailrace", "train", str(recipe)),
            env=os.environ | hosts.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 0, ended.stderr
    events = read_events(run / "events.jsonl")
    where = {event.actor: event.info["address"] for event in events if event.task == "worker_started"}
    assert where == {"rollout-0": NODE, "trainer": HEAD, "reward-0": HEAD}
    assert [event.step for event in steps_of(run)] == list(range(4))
    assert sum(event.metrics["network_bytes"] for event in events if event.task == "weights_transfer") > 0

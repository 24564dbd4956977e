"""Runs with several pools of rollout workers, whose engines differ: they train on the same samples as with one."""

import asyncio
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.cluster.base import WorkerSpec
from tailrace.cluster.local import LocalCluster
from tailrace.config.run import RunConfig
from tailrace.errors import ClusterError, ConfigError
from tailrace.events import Event
from tailrace.report.sample_text import load_samples
from tailrace.run.control import Reply, Scale, ask
from tailrace.run.own_loop import _pools
from tailrace.run.train import train
from tailrace.run.workers.settings import RunSettings
from tests.conftest import TinyModel
from tests.helpers.runs import assert_same_run, small_run
from tests.helpers.separated_runs import SYNCHRONOUS, at_events, of

LIMIT_S = 60.0
TWO_POOLS: dict[str, Any] = {"pools": {"small": {"cpus": 0, "engine": {"max_batch_size": 2, "kv_cache_gib": 0.002}}}}


def run_of(
    run: Path, model: Path, prompts: Path, *, rollout: dict[str, Any] | None = None, **changes: Any
) -> RunConfig:
    """A run with these rollout pools. It keeps the text of every sample.

    Each engine has room for one group, and not for two, so that all pools have work.
    """
    cluster = {kind: {"cpus": 0} for kind in ("trainer", "reward")} | {"rollout": {"cpus": 0, **(rollout or {})}}
    whole: dict[str, Any] = {
        "pipeline": SYNCHRONOUS,
        "sampling": {"max_new_tokens": 30},
        "engine": {"type": "native", "dtype": "float32", "kv_cache_gib": 0.01, "max_batch_size": 3},
        "observe": {"tensorboard": False, "sample_groups": 100},
        "cluster": cluster,
    }
    return small_run(run, model, prompts, **(whole | changes))


def responses(run: Path) -> dict[tuple[str, int, str, str, int, int], tuple[str, int]]:
    """The text and the number of tokens of each sample, of training and of evaluations."""
    return {
        (sample.kind, sample.step, sample.set, sample.way, sample.group, sample.sample): (
            sample.response,
            sample.tokens,
        )
        for sample in load_samples(run)
    }


def assert_same_samples(one: Path, other: Path) -> None:
    """Assert that two runs have generated and learned the same."""
    assert_same_run(one, other)
    assert responses(one) == responses(other)
    assert len(responses(one)) > len(of(one, "sample")) == len(of(other, "sample")) > 0, "evaluations count, too"


def scaling(run: Path, replies: list[Reply], *wanted: Scale) -> Any:
    """A reaction to an event: ask the run for changes, one after the other."""

    async def ask_run() -> None:
        loop = asyncio.get_running_loop()
        for change in wanted:
            replies.append(await loop.run_in_executor(None, partial(ask, run, change, timeout_s=LIMIT_S)))

    def react(_: dict[str, int]) -> None:
        asked.append(asyncio.get_running_loop().create_task(ask_run()))

    asked: list[asyncio.Task[None]] = []
    return react


def workers_of(run: Path) -> set[str]:
    """The workers that have generated a sample for training."""
    return {event.worker for event in of(run, "sample")}


def of_pool(events: list[Event], pool: str) -> list[str]:
    return [event.actor for event in events if event.actor.startswith(f"{pool}-")]


def test_two_pools_with_different_engines_make_the_samples_of_one(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(run_of(one, tiny_model("llama"), prompts), resume=False) == 0
    assert train(run_of(two, tiny_model("llama"), prompts, rollout=TWO_POOLS), resume=False) == 0
    assert_same_samples(one, two)
    assert workers_of(two) == {"rollout-0", "rollout.small-0"}


def test_a_pool_is_scaled_by_its_name_and_changes_nothing(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    static, scaled = tmp_path / "static", tmp_path / "scaled"
    replies: list[Reply] = []
    for run in (static, scaled):
        config = run_of(run, tiny_model("llama"), prompts, rollout=TWO_POOLS, trainer__steps=6)
        if run is scaled:
            changes = {
                "sample 1": [Scale(2, "rollout.small"), Scale(0)],
                "sample 3": [Scale(0, "rollout.small"), Scale(1, "rollout.smal")],
                "sample 4": [Scale(1), Scale(0, "rollout.small"), Scale(0)],
            }
            deeds = {when: scaling(scaled, replies, *wanted) for when, wanted in changes.items()}
            at_events(monkeypatch, deeds)
        assert train(config, resume=False) == 0
    assert [(reply.ok, reply.text) for reply in replies] == [
        (True, "rollout.small: 1 → 2 engines, by hand"),
        (True, "rollout: 1 → 0 engines, by hand"),
        (False, "rollout.small=0 is no number of workers; give 1 or more"),
        (
            False,
            "rollout.smal is no pool of rollout workers; there are rollout, rollout.small; did you mean "
            "'rollout.small'?",
        ),
        (True, "rollout: 0 → 1 engines, by hand"),
        (True, "rollout.small: 2 → 0 engines, by hand"),
        (False, "rollout=0 is no number of workers; give 1 or more"),
    ]
    assert_same_samples(static, scaled)
    assert [
        (event.info["pool"], event.metrics["engines"], event.metrics["wanted"]) for event in of(scaled, "scale")
    ] == [
        ("rollout.small", 2, 3),
        ("rollout", 3, 2),
        ("rollout", 2, 3),
        ("rollout.small", 3, 1),
    ]
    assert of_pool(of(scaled, "worker_started"), "rollout") == ["rollout-0", "rollout-1"]
    assert of_pool(of(scaled, "worker_started"), "rollout.small") == ["rollout.small-0", "rollout.small-1"]


def test_a_worker_whose_machine_gives_notice_leaves_its_pool_where_another_has_engines(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    static, moved = tmp_path / "static", tmp_path / "moved"

    def notice(_: dict[str, int]) -> None:
        (handle,) = (handle for handle in local[-1].handles if handle.name == "rollout.small-0")
        assert handle._worker is not None
        assert handle._worker.notice is not None
        handle._worker.notice()

    for run in (static, moved):
        if run is moved:
            at_events(monkeypatch, {"sample 1": notice})
        assert train(run_of(run, tiny_model("llama"), prompts, rollout=TWO_POOLS), resume=False) == 0
    assert_same_samples(static, moved)
    (change,) = of(moved, "scale")
    assert change.info["text"] == "rollout.small: 1 → 0 engines, by notice"
    assert change.info["engines"] == ["rollout-0"]


def other_model(monkeypatch: pytest.MonkeyPatch, worker: str, model: Path) -> None:
    """Have a worker find another model under the name of the run's, as on a machine of its own."""

    def spec(**values: Any) -> WorkerSpec:
        if values["name"] == worker:
            settings = msgspec.structs.replace(RunSettings.decode(values["settings"]), model_dir=str(model))
            values["settings"] = settings.encode()
        return WorkerSpec(**values)

    monkeypatch.setattr("tailrace.run.separated.WorkerSpec", spec)


MISFIT = "is not used, since its model is not the run's: it has a qwen3 with"


def test_an_engine_with_another_model_is_refused_and_the_run_goes_on(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(run_of(one, tiny_model("llama"), prompts), resume=False) == 0
    other_model(monkeypatch, "rollout.small-0", tiny_model("qwen3"))
    assert train(run_of(two, tiny_model("llama"), prompts, rollout=TWO_POOLS), resume=False) == 0
    assert_same_samples(one, two)
    assert workers_of(two) == {"rollout-0"}
    (refused,) = of(two, "scale")
    assert refused.info["text"].startswith(f"rollout.small-0 {MISFIT}")
    assert (refused.info["pool"], refused.info["engines"]) == ("rollout.small", ["rollout-0"])
    assert "\n" not in refused.info["text"]


def test_an_engine_with_another_model_that_is_asked_for_is_refused_in_the_answer(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, replies = tmp_path / "run", list[Reply]()
    other_model(monkeypatch, "rollout-1", tiny_model("qwen3"))
    at_events(monkeypatch, {"sample 1": scaling(run, replies, Scale(2))})
    assert train(run_of(run, tiny_model("llama"), prompts), resume=False) == 0
    (reply,) = replies
    assert not reply.ok
    assert reply.text.startswith(f"1 engines instead of 2: rollout-1 {MISFIT}")
    assert workers_of(run) == {"rollout-0"}


def test_a_run_whose_only_engine_has_another_model_ends_with_that(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    other_model(monkeypatch, "rollout-0", tiny_model("qwen3"))
    with pytest.raises(ClusterError, match=f"rollout-0 {MISFIT}"):
        train(run_of(tmp_path / "run", tiny_model("llama"), prompts), resume=False)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"max_model_len": 20}, "cluster.rollout.pools.small: sampling.max_new_tokens 30 leaves no room"),
        ({"kv_cache_gib": 1e-6}, "cluster.rollout.pools.small: "),
        ({"type": "fake", "vocab_size": 10**6}, "cluster.rollout.pools.small: engine.vocab_size 1000000 is more than"),
    ],
)
def test_an_engine_that_cannot_serve_the_run_is_named_with_its_pool(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object, engine: dict[str, Any], said: str
) -> None:
    rollout = {"pools": {"small": {"engine": engine}}}
    with pytest.raises(ConfigError, match=said):
        train(run_of(tmp_path / "run", tiny_model("llama"), prompts, rollout=rollout), resume=False)


def test_a_loop_of_ones_own_has_the_rollout_workers_of_all_pools(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run", tmp_path, tmp_path, rollout=TWO_POOLS)
    assert list(_pools(config, None)) == ["rollout", "rollout.small", "reward"]
    assert list(_pools(config, ["rollout"])) == ["rollout", "rollout.small"]
    with pytest.raises(ConfigError, match=r"'rollout\.small' is not one of rollout, reward; did you mean 'rollout'\?"):
        _pools(config, ["rollout", "rollout.small"])


def test_pools_of_processes_with_other_ranks_make_the_same_samples_and_keep_their_workers_when_these_die(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, connected_to_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    four_groups: dict[str, Any] = {"trainer__train_batch_size": 16}  # when a step begins, each engine has room for one
    assert train(run_of(one, tiny_model("llama"), prompts, **four_groups), resume=False) == 0
    wide = {"cpus": 0, "engine": {"tp": 2, "threads_per_rank": 1, "max_batch_size": 2}}
    at_events(monkeypatch, {"sample 3": lambda pids: os.kill(pids["rollout.wide-0"], signal.SIGKILL)})
    config = run_of(two, tiny_model("llama"), prompts, rollout={"pools": {"wide": wide}}, **four_groups)
    assert train(config, resume=False) == 0
    assert_same_samples(one, two)
    assert workers_of(two) == {"rollout-0", "rollout.wide-0"}
    assert [event.actor for event in of(two, "worker_died")] == ["rollout.wide-0"]
    started = of(two, "worker_started")
    count = Counter(event.actor for event in started)
    assert (count["rollout-0"], count["rollout.wide-0"]) == (1, 2)
    first = {event.actor: event for event in reversed(started)}
    assert first["rollout-0"].start < first["trainer"].end, "they load at the same time"

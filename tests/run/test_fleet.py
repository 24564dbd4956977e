"""The number of rollout workers changes while a run goes on, and what it trains on does not."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.cluster.local import LocalCluster
from tailrace.errors import UserError
from tailrace.run.control import Reply, Scale, ask, control
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.runs import assert_same_run, small_run
from tests.helpers.separated_runs import SYNCHRONOUS, at_events, of

LIMIT_S = 60.0


def asking(run: Path, wanted: int, replies: list[Reply], turn: asyncio.Lock) -> Any:
    """A reaction to an event: ask the run for so many workers. `turn`: one asks when the one before has its answer."""

    async def ask_run() -> None:
        loop = asyncio.get_running_loop()
        async with turn:
            replies.append(await loop.run_in_executor(None, lambda: ask(run, Scale(wanted), timeout_s=LIMIT_S)))

    def react(_: dict[str, int]) -> None:
        asked.append(asyncio.get_running_loop().create_task(ask_run()))

    asked: list[asyncio.Task[None]] = []
    return react


def lengths(run: Path) -> dict[tuple[int, int], int]:
    """The tokens of each sample, by group and number."""
    return {(event.info["group"], event.info["sample"]): event.tokens or 0 for event in of(run, "sample")}


def test_a_run_that_is_scaled_trains_on_the_same_samples_as_a_static_one(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    static, scaled = tmp_path / "static", tmp_path / "scaled"
    replies: list[Reply] = []
    for run in (static, scaled):
        config = small_run(
            run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS, trainer__steps=6, sampling__max_new_tokens=30
        )
        if run is scaled:
            wanted = {"sample 1": 3, "sample 3": 2, "sample 4": 1}
            turn = asyncio.Lock()
            at_events(monkeypatch, {when: asking(scaled, number, replies, turn) for when, number in wanted.items()})
        assert train(config, resume=False) == 0
    assert [(reply.ok, reply.text) for reply in replies] == [
        (True, "1 → 3 engines, by hand"),
        (True, "3 → 2 engines, by hand"),
        (True, "2 → 1 engines, by hand"),
    ]
    assert_same_run(static, scaled)
    assert lengths(static) == lengths(scaled)
    assert len(of(scaled, "sample")) == len(of(static, "sample")) == 48
    changes = of(scaled, "scale")
    assert [(event.metrics["engines"], event.metrics["wanted"]) for event in changes] == [(1, 3), (3, 2), (2, 1)]
    assert not (scaled / "control.sock").exists()


def test_a_worker_whose_machine_gives_notice_is_replaced_before_it_leaves(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    static, moved = tmp_path / "static", tmp_path / "moved"

    def notice(_: dict[str, int]) -> None:
        (handle,) = (handle for handle in local[-1].handles if handle.name == "rollout-0")
        assert handle._worker is not None
        assert handle._worker.notice is not None
        handle._worker.notice()

    for run in (static, moved):
        config = small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS, sampling__max_new_tokens=30)
        if run is moved:
            at_events(monkeypatch, {"sample 1": notice})
        assert train(config, resume=False) == 0
    assert_same_run(static, moved)
    assert lengths(static) == lengths(moved)
    assert {event.worker for event in of(moved, "sample")} == {"rollout-0", "rollout-1"}
    assert not of(moved, "worker_died")


def test_a_number_that_is_none_is_refused_and_the_run_goes_on(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, replies = tmp_path / "run", list[Reply]()
    at_events(monkeypatch, {"sample 1": asking(run, 0, replies, asyncio.Lock())})
    assert train(small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS), resume=False) == 0
    (reply,) = replies
    assert not reply.ok
    assert reply.text == "rollout=0 is no number of workers; give 1 or more"


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no run with workers that goes on"):
        ask(tmp_path, Scale(2), timeout_s=1.0)
    with pytest.raises(UserError, match="is no directory of a run"):
        ask(tmp_path / "none", Scale(2), timeout_s=1.0)


async def test_who_waits_when_the_run_ends_is_told(tmp_path: Path) -> None:
    asked = asyncio.Event()

    said: list[str] = []

    async def never(workers: int, pool: str, on_wait: Callable[[str], None]) -> str:
        on_wait("it waits for a place")
        asked.set()
        await asyncio.Event().wait()
        return ""

    async with asyncio.timeout(LIMIT_S):
        async with control(tmp_path, never):
            asking = asyncio.create_task(
                asyncio.to_thread(ask, tmp_path, Scale(2), timeout_s=LIMIT_S, on_wait=said.append)
            )
            await asked.wait()
        assert await asking == Reply("the run has ended meanwhile", ok=False)
    assert said == ["it waits for a place"]

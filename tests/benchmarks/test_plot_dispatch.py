"""The picture of a step on virtual engines."""

import asyncio
import re
from pathlib import Path

import plot_dispatch
import pytest
from plot_dispatch import LEFT, ROW, SLOTS, THIN, outline, play

from tailrace.host.virtual_loop import VirtualLoop
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_tells_the_seconds_of_the_picture() -> None:
    page = (DOCS / "generation.md").read_text()
    picture = (DOCS / "images" / "dispatch.svg").read_text()
    seconds = re.findall(r">(\d+ s)</text>", picture)
    assert len(seconds) == len(plot_dispatch.SHOWN)
    assert all(f" {each}" in page for each in seconds)


def test_an_area_is_as_high_as_the_responses_and_a_lone_one_is_seen() -> None:
    assert outline([SLOTS, SLOTS, 0], 10.0, ROW).startswith(f"M{LEFT} {ROW}H{float(LEFT)}V0.0H")
    assert f"V{ROW - THIN}" in outline([1], 10.0, ROW)


def test_a_step_is_watched_from_its_start_to_its_end_and_comes_out_the_same_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plot_dispatch, "ENGINES", 2)
    monkeypatch.setattr(plot_dispatch, "GROUPS", 4)
    replay = Replay.of(open_workload("code-14b").sample(steps=1, groups=4, group_size=8, seed=0))
    turns = []
    for _ in range(2):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            turns.append(runner.run(play("oracle", replay)))
    turn = turns[0]
    assert turns[1] == turn
    assert [len(running) for running in turn.running] == [1 + int(turn.seconds / plot_dispatch.EVERY_S)] * 2
    assert max(map(max, turn.running)) <= 32
    assert any(running[-1] for running in turn.running)

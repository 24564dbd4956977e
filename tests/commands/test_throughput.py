"""Progress is counted in samples and tokens, and shown on a terminal or in a log."""

import asyncio
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from tailrace.commands.throughput import Throughput
from tailrace.engine.base import EngineStats
from tailrace.types import FinishReason, Sample

STATS = EngineStats(
    running=2,
    waiting=1,
    generated_tokens=9,
    prefilled_tokens=1000,
    shared_tokens=3000,
    steps=4,
    preemptions=1,
    used_blocks=0,
    total_blocks=0,
    version=0,
)


def sample(tokens: int) -> Sample:
    return Sample(
        request_id=0,
        group_id=0,
        response_ids=np.zeros(tokens, np.int64),
        rollout_log_probs=np.zeros(tokens, np.float32),
        weight_versions=np.zeros(tokens, np.int64),
        finish_reason=FinishReason.STOP,
    )


def test_the_summary_says_how_often_tp_changed_where_it_did() -> None:
    assert "TP" not in Throughput(3, lambda: STATS).summary()
    assert Throughput(3, lambda: replace(STATS, switches=2)).summary().endswith("1 preemption · TP changed 2 times")


def test_the_summary_counts_samples_tokens_prefill_and_preemptions() -> None:
    throughput = Throughput(3, lambda: STATS)
    throughput.count(sample(4))
    throughput.count(sample(3))
    summary = throughput.summary()
    assert summary.startswith("2 samples · 7 tokens in ")
    assert " · first sample after " in summary
    assert summary.endswith(" · prefill 1,000 tokens computed, 3,000 shared · 1 preemption")


def test_a_summary_of_nothing_has_no_first_sample() -> None:
    assert "first" not in Throughput(3, lambda: STATS).summary()


async def test_a_terminal_shows_a_bar_with_what_runs() -> None:
    shown = StringIO()
    throughput = Throughput(3, lambda: STATS)
    throughput.count(sample(4))
    async with throughput.shown(Console(file=shown, force_terminal=True, width=120)):
        await asyncio.sleep(0)  # lets it draw
    assert "1/3" in shown.getvalue()
    assert "2 running, 1 waiting" in shown.getvalue()


async def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.commands.throughput.LOG_PERIOD_S", 0.0)
    shown = StringIO()
    async with Throughput(3, lambda: STATS).shown(Console(file=shown, force_interactive=False, width=20)):
        while not shown.getvalue():
            await asyncio.sleep(0)
    assert shown.getvalue().startswith("0/3 samples · ")
    assert "2 running, 1 waiting\n" in shown.getvalue()


async def test_what_cannot_be_shown_is_told_at_the_end() -> None:
    def broken() -> EngineStats:
        raise ValueError("no stats")

    with pytest.raises(ValueError, match="no stats"):
        async with Throughput(3, broken).shown(Console(file=StringIO(), force_terminal=True)):
            await asyncio.sleep(0)

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from tailrace.errors import CheckpointError
from tailrace.planning.lengths.history import History
from tailrace.run.pipeline import Pipeline


async def write_model(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "model.json").write_text("{}")


async def test_a_model_that_an_interrupt_left_behind_catches_up_before_prompts_are_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.run.pipeline.put_lost_groups", AsyncMock())
    calls: list[tuple[str, int]] = []

    def noted(name: str) -> Callable[[int], Awaitable[None]]:
        async def note(step: int) -> None:
            await asyncio.sleep(0)
            calls.append((name, step))
            learner.trained_steps = max(learner.trained_steps, calls.count(("policy", 1)) + 1)

        return note

    learner = MagicMock(trained_steps=1, train=noted("policy"))
    pipeline = Pipeline(
        steps=2,
        evaluate_every=9,
        save_every=9,
        queue=MagicMock(advance=noted("advance"), close=AsyncMock()),
        services=[],
        feeder=MagicMock(run=AsyncMock()),
        learner=learner,
        evaluator=None,
        models={"critic": MagicMock(train=noted("critic"))},
        staging=Path("never"),
    )
    await pipeline.run(saves=False)
    assert calls[:2] == [("critic", 0), ("advance", 1)]
    assert sorted(calls[2:]) == [("critic", 1), ("policy", 1)]


async def test_a_save_that_fails_leaves_nothing_staged(tmp_path: Path) -> None:
    staging = tmp_path / "staged"
    seen: list[bool] = []

    async def full_disk(next_step: int, staged: Path) -> None:
        seen.append((staged / "models" / "critic" / "model.json").exists())
        seen.append((staged / "lengths.msgpack").exists())
        raise CheckpointError("no space left")

    pipeline = Pipeline(
        steps=1,
        evaluate_every=1,
        save_every=1,
        queue=MagicMock(),
        services=[],
        feeder=MagicMock(next_step=1),
        learner=MagicMock(save=full_disk),
        evaluator=None,
        models={"critic": AsyncMock(save=write_model)},
        lengths=History(),
        staging=staging,
    )
    with pytest.raises(CheckpointError, match="no space left"):
        await pipeline.save()
    assert seen == [True, True]
    assert not staging.exists()

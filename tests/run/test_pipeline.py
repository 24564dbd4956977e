from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from tailrace.errors import CheckpointError
from tailrace.planning.lengths.history import History
from tailrace.run.pipeline import Pipeline


async def write_model(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "model.json").write_text("{}")


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

from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from tailrace.activity import Activity
from tailrace.events import EventLog
from tailrace.tasks.context import TaskContext
from tests.helpers.runs import small_run


async def test_tasks_of_a_pool_that_score_share_one_copy_of_the_frozen_weights(
    executor: ThreadPoolExecutor, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = MagicMock()
    scorer.log_probs.return_value = [np.zeros(1, np.float32)]
    load = MagicMock(return_value=scorer)
    monkeypatch.setattr("tailrace.trainer.factory.make_run_scorer", load)
    async with AsyncExitStack() as stack:
        context = TaskContext(
            config=small_run(Path("run"), Path("model"), Path("prompts.jsonl")),
            model_dir=Path("model"),
            queue=MagicMock(),
            log=log,
            activity=Activity(log, "reference"),
            executor=executor,
            stack=stack,
        )
        for score in (await context.scorer(None), await context.scorer(None)):
            assert await score([]) == [np.zeros(1, np.float32)]
    load.assert_called_once()

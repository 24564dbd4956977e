from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest

from tailrace.activity import Activity, TimedExecutor
from tailrace.events import Event, EventLog
from tailrace.registers.phases import Work
from tests.helpers.contexts import make_context


async def test_tasks_of_a_pool_that_score_share_one_copy_of_the_frozen_weights(
    executor: ThreadPoolExecutor, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = MagicMock()
    scorer.log_probs.return_value = [np.zeros(1, np.float32)]
    load = MagicMock(return_value=scorer)
    monkeypatch.setattr("tailrace.trainer.factory.make_run_scorer", load)
    context = replace(make_context(MagicMock(), log, actor="reference"), executor=TimedExecutor(executor))
    for score in (await context.scorer(None), await context.scorer(None)):
        assert await score([]) == [np.zeros(1, np.float32)]
    load.assert_called_once()


@pytest.mark.parametrize(("of", "phase"), [(None, "reference"), ("critic", "update")])
async def test_scores_of_a_model_that_is_trained_here_count_as_its_update_which_tells_their_parts(
    executor: ThreadPoolExecutor, of: str | None, phase: Work
) -> None:
    events: list[Event] = []
    log = EventLog(sinks=(events.append,))
    activity = Activity(log, "critic", breakdown=True)
    context = replace(make_context(MagicMock(), log), executor=TimedExecutor(executor, activity))
    context.frozen = context.trainers["critic"] = MagicMock()
    await (await context.scorer(of))([])
    activity.emit()
    assert events[0].metrics.keys() - {"idle"} == {phase}

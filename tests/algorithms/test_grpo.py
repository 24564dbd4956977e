import numpy as np
import pytest

from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import Compute
from tailrace.config.algorithm import GrpoConfig, KlConfig
from tailrace.config.columns import COLUMNS

WITH_REFERENCE = GrpoConfig(kl=KlConfig(coefficient=0.1))


@pytest.mark.parametrize("config", [GrpoConfig(), WITH_REFERENCE])
def test_every_column_that_a_task_reads_is_written_before_it(config: GrpoConfig) -> None:
    written = {"prompt_ids", "prompt", "question", "answer", "metadata", "task", "seed"}
    for task in make_algorithm(config).tasks:
        assert set(task.reads) <= written, task.name
        assert not set(task.writes) & written, task.name
        written |= set(task.writes)
    assert written <= COLUMNS.keys()


def test_only_a_penalty_brings_the_reference_in() -> None:
    plain, penalized = make_algorithm(GrpoConfig()), make_algorithm(WITH_REFERENCE)
    assert [task.name for task in plain.tasks] == ["rollout", "reward", "advantage", "actor"]
    assert [task.name for task in penalized.tasks] == ["rollout", "reward", "reference", "advantage", "actor"]
    assert plain.pools() == ("rollout", "reward", "trainer")
    assert penalized.pools() == ("rollout", "reward", "reference", "trainer")
    assert "ref_log_probs" in penalized.tasks[-1].reads


def advantages(config: GrpoConfig, rewards: list[float], lengths: list[int]) -> list[list[float]]:
    """The advantages that the table's `advantage` task computes for one group."""
    rows = [{"reward": reward, "response_mask": np.ones(n)} for reward, n in zip(rewards, lengths, strict=True)]
    (task,) = (task for task in make_algorithm(config).tasks if task.name == "advantage")
    assert isinstance(task.work, Compute)
    return [np.asarray(cells["advantages"]).tolist() for cells in task.work.function(rows)]


def test_the_configuration_reaches_the_advantages() -> None:
    centred = GrpoConfig(group_size=2, normalize_std=False)
    assert make_algorithm(centred).group_size == 2
    assert advantages(centred, [1.0, 0.0], [2, 1]) == [[0.5, 0.5], [-0.5]]
    assert advantages(GrpoConfig(), [1.0, 0.0], [1, 1]) == [[pytest.approx(0.7071058)], [pytest.approx(-0.7071058)]]

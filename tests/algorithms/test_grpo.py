import pytest

from tailrace.algorithms.factory import make_algorithm
from tailrace.config.algorithm import GrpoConfig, KlConfig
from tailrace.config.columns import COLUMNS

WITH_REFERENCE = GrpoConfig(kl=KlConfig(coefficient=0.1))


@pytest.mark.parametrize("config", [GrpoConfig(), WITH_REFERENCE])
def test_every_column_that_a_task_reads_is_written_before_it(config: GrpoConfig) -> None:
    written = {"prompt_ids", "prompt", "question", "answer", "metadata", "seed"}
    for task in make_algorithm(config).tasks:
        assert set(task.reads) <= written, task.name
        assert not set(task.writes) & written, task.name
        written |= set(task.writes)
    assert written <= COLUMNS.keys()


def test_only_a_penalty_brings_the_reference_in() -> None:
    plain, penalized = make_algorithm(GrpoConfig()), make_algorithm(WITH_REFERENCE)
    assert [task.name for task in plain.tasks] == ["rollout", "reward", "advantage", "actor"]
    assert [task.name for task in penalized.tasks] == ["rollout", "reward", "reference", "advantage", "actor"]
    assert not plain.needs_reference
    assert penalized.needs_reference
    assert "ref_log_probs" in penalized.tasks[-1].reads


def test_the_configuration_reaches_the_advantages() -> None:
    centred = make_algorithm(GrpoConfig(group_size=2, normalize_std=False))
    assert centred.group_size == 2
    assert centred.advantages([1.0, 0.0]) == [0.5, -0.5]
    assert make_algorithm(GrpoConfig()).advantages([1.0, 0.0]) == pytest.approx([0.7071058, -0.7071058])

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from tailrace.config.queue_policies import WholeGroupsConfig
from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.errors import ColumnError, GroupExists, PeerLost, QueueError, QueueTimeout
from tailrace.transfer.queue.adapters.experience import Experience
from tailrace.transfer.queue.adapters.tensors import Column, PackedTensor, Pad, PaddedTensor
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tests.transfer.client.servers import LIMIT_S, serving_several
from tests.transfer.processes.served import serving
from tests.transfer.tables import group, one_task, outputs

TABLE = TableConfig(
    tasks=(
        TaskConfig(name="rollout", reads=("prompt_ids", "seed"), writes=("response_ids",), policy=WholeGroupsConfig()),
        TaskConfig(name="actor", reads=("response_ids",), policy=WholeGroupsConfig(max_groups=8)),
    )
)
PROMPTS: dict[str, Column] = {"prompt_ids": [torch.tensor([5, 6]), torch.tensor([7])]}
SEEDS: dict[str, Column] = {"seed": torch.arange(4)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncQueue]:
    with serving(tmp_path_factory.mktemp("queue"), TABLE) as served:
        yield served.queue


def test_prompts_become_experience_and_experience_is_trained_on(tmp_path: Path) -> None:
    with serving(tmp_path, TABLE) as served:
        experience = Experience(served.queue)
        assert experience.put_prompts_data(PROMPTS, group_size=2, samples=SEEDS) == [0, 1]
        for group in range(2):
            batch = experience.get_experience_data("rollout", layouts={"prompt_ids": Pad(0)})
            assert [(row.group_id, row.order) for row in batch.claim.rows] == [
                (group, 2 * group),
                (group, 2 * group + 1),
            ]
            prompts, seeds = batch.columns["prompt_ids"], batch.columns["seed"]
            assert isinstance(prompts, PaddedTensor)
            assert isinstance(seeds, torch.Tensor)
            assert seeds.tolist() == [2 * group, 2 * group + 1]
            with served.queue.held(batch.claim):
                experience.put_experience_data(batch, {"response_ids": prompts.values + seeds[:, None]})
        trained = experience.get_experience_data("actor", count=4)
        responses = trained.columns["response_ids"]
        assert isinstance(responses, PackedTensor)
        assert [response.tolist() for response in responses.split()] == [[5, 6], [6, 7], [9], [10]]
        experience.put_experience_data(trained, {})
        assert served.queue.stats().rows == 0


def test_groups_count_on_from_where_they_begin(shared: SyncQueue) -> None:
    experience = Experience(shared, first_group=100)
    assert experience.put_prompts_data(PROMPTS, group_size=2, samples=SEEDS) == [100, 101]
    assert experience.put_prompts_data(PROMPTS, group_size=2, samples=SEEDS) == [102, 103]
    with pytest.raises(GroupExists):
        Experience(shared, first_group=103).put_prompts_data(PROMPTS, group_size=2, samples=SEEDS)


@pytest.mark.parametrize(("first", "went_in"), [(500, True), (510, False)])
def test_a_put_that_was_not_answered_is_done_once_by_a_second_one(
    shared: SyncQueue, monkeypatch: pytest.MonkeyPatch, first: int, went_in: bool
) -> None:
    experience = Experience(shared, first_group=first)
    before = shared.stats().rows
    lose_one_answer(experience, monkeypatch, went_in)
    assert experience.put_prompts_data(PROMPTS, group_size=2, samples=SEEDS) == [first, first + 1]
    assert shared.stats().rows == before + 4
    assert experience.put_prompts_data(PROMPTS, group_size=2, samples=SEEDS) == [first + 2, first + 3]


@pytest.mark.parametrize(("first", "went_in"), [(520, True), (530, False)])
def test_other_prompts_come_after_those_whose_put_was_not_answered(
    shared: SyncQueue, monkeypatch: pytest.MonkeyPatch, first: int, went_in: bool
) -> None:
    experience = Experience(shared, first_group=first)
    before = shared.stats().rows
    lose_one_answer(experience, monkeypatch, went_in)
    other: dict[str, Column] = {"prompt_ids": [np.array([8])]}
    assert experience.put_prompts_data(other, group_size=1, samples={"seed": [0]}) == [first + 2]
    assert shared.stats().rows == before + 5


def test_prompts_that_one_of_several_controllers_had_no_room_for_are_put_once(tmp_path: Path) -> None:
    prompts: dict[str, Column] = {"prompt_ids": [np.array([number]) for number in range(4)]}
    other: dict[str, Column] = {"prompt_ids": [np.array([9])]}
    with (
        serving_several(tmp_path, lambda: one_task(FirstIn(1)), max_rows=2) as (address, _),
        SyncQueue(address, name="trainer") as queue,
    ):
        queue.put(group(1))
        experience = Experience(queue, first_group=10)
        with pytest.raises(QueueTimeout, match="rows"):
            experience.put_prompts_data(prompts, group_size=1, timeout=0.05)
        assert queue.stats().rows == 3
        claimed: list[int] = []
        while len(claimed) < 6:
            claim = queue.claim("only", timeout=LIMIT_S)
            claimed += [row.group_id for row in claim.rows]
            queue.ack(claim, outputs(claim))
            if len(claimed) == 3:
                assert experience.put_prompts_data(other, group_size=1, timeout=LIMIT_S) == [14]
        assert sorted(claimed) == [1, 10, 11, 12, 13, 14]
        assert queue.stats().rows == 0


def lose_one_answer(experience: Experience, monkeypatch: pytest.MonkeyPatch, went_in: bool) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(SyncQueue, "put", unanswered(SyncQueue.put if went_in else None))
        with pytest.raises(PeerLost):
            experience.put_prompts_data(PROMPTS, group_size=2, samples=SEEDS)


def unanswered(put: Callable[..., Any] | None) -> Callable[..., None]:
    """A put whose answer is lost. If `put` is None, the put itself is lost."""

    def lose(*args: Any, **options: Any) -> None:
        if put is not None:
            put(*args, **options)
        raise PeerLost("no answer")

    return lose


def test_prompts_for_weights_to_come_wait_until_the_queue_hears_of_them(shared: SyncQueue) -> None:
    experience = Experience(shared, first_group=200)
    with pytest.raises(QueueTimeout, match="weight version"):
        experience.put_prompts_data(PROMPTS, group_size=2, samples=SEEDS, not_before=3, timeout=0.1)
    shared.advance(3)
    assert experience.put_prompts_data(PROMPTS, group_size=2, samples=SEEDS, not_before=3) == [200, 201]


def test_what_cannot_be_put_or_had_is_refused(shared: SyncQueue) -> None:
    experience = Experience(shared, first_group=300)
    with pytest.raises(ColumnError, match="'seed': got 3 cells, expected one for each of 4 rows"):
        experience.put_prompts_data(PROMPTS, group_size=2, samples={"seed": [1, 2, 3]})
    with pytest.raises(ColumnError, match="lacks column 'seed'"):
        experience.put_prompts_data(PROMPTS, group_size=2)
    with pytest.raises(QueueError, match="at least 1 row, got group_size=0"):
        experience.put_prompts_data(PROMPTS, group_size=0)


@pytest.mark.parametrize("layouts", [{"prompt_ids": "padded"}, {"prompt_ids": Pad(0.5)}, {"seed": Pad(0)}])
def test_layouts_are_refused_before_rows_are_claimed(
    shared: SyncQueue, monkeypatch: pytest.MonkeyPatch, layouts: Any
) -> None:
    monkeypatch.setattr(shared, "claim", lambda *_, **__: pytest.fail("it claims"))
    with pytest.raises(ColumnError, match=r"layout|pad"):
        Experience(shared).get_experience_data("rollout", layouts=layouts)


def test_rows_go_back_where_they_cannot_be_laid_out(shared: SyncQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise MemoryError

    experience = Experience(shared, first_group=400)
    experience.put_prompts_data({"prompt_ids": [np.array([1])]}, group_size=1, samples={"seed": [0]})
    monkeypatch.setattr("tailrace.transfer.queue.adapters.experience.make_batch", fail)
    with pytest.raises(MemoryError):
        experience.get_experience_data("rollout")
    assert shared.stats().tasks["rollout"].leased == 0

"""The communication groups of a rank."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Collective
from tailrace.engine.collectives.rendezvous import Rendezvous, rendezvous
from tailrace.engine.ranks.groups import Groups
from tailrace.errors import EngineError

CONFIG = NativeEngineConfig(collectives="gloo", dp=4)
LIMIT_S = 30.0


def make_groups(rank: int) -> Groups:
    return Groups(CONFIG, rank, device=torch.device("cpu"), timeout_s=LIMIT_S)


def on_all(groups: list[Groups], work: Callable[[Groups], Collective]) -> list[Collective]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


def add(groups: list[Groups], degree: int) -> list[Collective]:
    with rendezvous() as place:
        return on_all(groups, lambda rank: rank.add(degree, Rendezvous(place.directory)))


def test_neighbouring_ranks_are_a_group_in_their_order() -> None:
    groups = [make_groups(rank) for rank in (2, 3)]
    made = add(groups, 2)
    assert [(end.rank, end.size) for end in made] == [(0, 2), (1, 2)]
    assert [rank.get(2) for rank in groups] == made
    with ThreadPoolExecutor(2) as pool:
        gathered = list(pool.map(lambda end: end.all_gather(torch.tensor([end.rank])).flatten().tolist(), made))
    assert gathered == [[0, 1], [0, 1]]
    for rank in groups:
        rank.close()
        rank.close()


def test_a_rank_is_always_a_group_of_its_own() -> None:
    alone = make_groups(3).get(1)
    assert (alone.rank, alone.size) == (0, 1)


def test_a_group_that_has_not_been_made_is_said() -> None:
    with pytest.raises(EngineError, match=r"rank 3 has no communication group of degree 2; add it first"):
        make_groups(3).get(2)


def test_a_group_that_is_made_again_takes_the_place_of_the_former() -> None:
    groups = [make_groups(rank) for rank in (0, 1)]
    former = add(groups, 2)
    survivor, replaced = groups[0], make_groups(1)
    latter = add([survivor, replaced], 2)
    assert survivor.get(2) is latter[0]
    assert survivor.get(2) is not former[0]
    for rank in (*groups, replaced):
        rank.close()

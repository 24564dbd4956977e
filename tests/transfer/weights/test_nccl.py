"""Versions by the broadcasts of a process group, here of gloo."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]  # not in its __all__

from tailrace.errors import WeightsError
from tailrace.transfer.weights.media.nccl import GroupBroadcast
from tests.transfer.weights.helpers import LIMIT_S, tensors

RANKS = 3


@pytest.fixture
def ranks() -> list[GroupBroadcast]:
    store = HashStore()

    def make(rank: int) -> Any:
        return ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=LIMIT_S))

    with ThreadPoolExecutor(RANKS) as threads:
        groups = list(threads.map(make, range(RANKS)))
    return [GroupBroadcast(group, device=torch.device("cpu"), chunk_mib=1 / 64) for group in groups]


def test_every_rank_gets_each_version_bit_for_bit(ranks: list[GroupBroadcast]) -> None:
    sender, *receivers = ranks
    with ThreadPoolExecutor(RANKS) as threads:
        for number in range(3):
            coming = [threads.submit(receiver.receive) for receiver in receivers]
            sender.send(number, tensors(number).items())
            for future in coming:
                version, got = future.result(LIMIT_S)
                assert version == number
                assert list(got) == list(tensors(number))
                assert all(torch.equal(got[name], tensor) for name, tensor in tensors(number).items())


def test_a_version_that_is_corrupt_is_not_given_out(
    ranks: list[GroupBroadcast], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, *receivers = ranks
    exchange = sender._exchange
    sent = 0

    def spoil(data: torch.Tensor) -> torch.Tensor:
        nonlocal sent
        sent += 1
        return exchange(data ^ 1 if sent == 4 else data)  # the length and sum, the manifest, and then chunks

    monkeypatch.setattr(sender, "_exchange", spoil)
    with ThreadPoolExecutor(RANKS) as threads:
        coming = [threads.submit(receiver.receive) for receiver in receivers]
        sender.send(0, tensors(0).items())
        for future in coming:
            with pytest.raises(WeightsError, match="chunk 1 of version 0 arrived corrupt"):
                future.result(LIMIT_S)

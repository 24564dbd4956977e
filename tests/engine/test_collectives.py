"""The ranks of a replica exchange tensors, and no rank waits for another without a limit."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config.engine import LinkConfig, NativeEngineConfig
from tailrace.engine import memory
from tailrace.engine.collectives import factory
from tailrace.engine.collectives.base import Alone, Collective
from tailrace.engine.collectives.emulated import EmulatedLink
from tailrace.engine.collectives.factory import make_collective, meeting_bytes, resolve_collectives
from tailrace.engine.collectives.rendezvous import Rendezvous, rendezvous
from tailrace.engine.collectives.shared_memory import SLOT_BYTES, SharedMemoryCollective
from tailrace.engine.kernels.build import KernelUnavailable
from tailrace.engine.model.shard import WHOLE, Shard
from tailrace.errors import ConfigError, EngineError
from tests.engine.rank_processes import CPU, Exchange, RankProcess, as_bytes, join, leave, rank_processes, run

KINDS = ("shared_memory", "gloo")
SLOT_FP32 = SLOT_BYTES // 4

SUMS = [
    Exchange("sum", dtype, shape)
    for dtype in ("float32", "bfloat16")
    for shape in [(0,), (1,), (7,), (3, 5), (64, 9), (SLOT_FP32,), (3 * SLOT_FP32 + 1025,)]
]
GATHERS = [
    Exchange("gather", dtype, shape)
    for dtype in ("float32", "bfloat16", "int64", "float64", "bool")
    for shape in [(0,), (1,), (3, 5), (SLOT_FP32 + 1,)]
]


@pytest.fixture(scope="module")
def trio() -> Iterator[list[RankProcess]]:
    with rank_processes(3) as ranks:
        yield ranks


def summed_in_order(exchange: Exchange, size: int) -> torch.Tensor:
    total = exchange.part(0).float()
    for rank in range(1, size):
        total += exchange.part(rank).float()
    return total.to(getattr(torch, exchange.dtype))


def gathered(exchange: Exchange, size: int) -> torch.Tensor:
    return torch.stack([exchange.part(rank) for rank in range(size)])


def expected(exchanges: Sequence[Exchange], size: int) -> list[bytes]:
    return [as_bytes((gathered if e.verb == "gather" else summed_in_order)(e, size)) for e in exchanges]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gathers_the_tensors_of_all(trio: list[RankProcess], kind: str, size: int) -> None:
    for result in run(trio[:size], kind, GATHERS):
        assert result == expected(GATHERS, size)


@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_sums_in_fp32_in_the_order_of_the_ranks(trio: list[RankProcess], size: int) -> None:
    for result in run(trio[:size], "shared_memory", SUMS):
        assert result == expected(SUMS, size)


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_sums_to_the_same_bits_on_every_rank(trio: list[RankProcess], size: int) -> None:
    first, *others = run(trio[:size], "gloo", SUMS)
    assert all(other == first for other in others)
    for exchange, result in zip(SUMS, first, strict=True):
        if result:
            summed = torch.frombuffer(bytearray(result), dtype=getattr(torch, exchange.dtype)).view(exchange.shape)
            largest = torch.stack([exchange.part(rank).float().abs() for rank in range(size)]).amax(0)
            error = (summed.float() - summed_in_order(exchange, size).float()).abs()
            assert (error <= 3 * torch.finfo(summed.dtype).eps * largest).all(), exchange


@settings(max_examples=25)
@given(
    exchanges=st.lists(
        st.builds(
            Exchange,
            verb=st.sampled_from(["sum", "gather"]),
            dtype=st.sampled_from(["float32", "bfloat16"]),
            shape=st.one_of(
                st.tuples(st.integers(0, 3000)),
                st.tuples(st.integers(0, 9), st.integers(0, 99)),
                st.tuples(st.integers(SLOT_FP32 - 2, 2 * SLOT_FP32 + 2)),
            ),
            seed=st.integers(0, 9),
        ),
        min_size=5,
        max_size=40,
    )
)
def test_any_exchanges_follow_each_other_through_shared_memory(
    trio: list[RankProcess], exchanges: list[Exchange]
) -> None:
    for result in run(trio, "shared_memory", exchanges):
        assert result == expected(exchanges, 3)


def fails_to_exchange(rank: RankProcess) -> str:
    rank.exchange([SUMS[2]])
    with pytest.raises(EngineError) as raised:
        rank.answer()
    return str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_rank_fails_the_others_within_the_limit_and_for_good(trio: list[RankProcess], kind: str) -> None:
    first, second, _ = trio
    join([first, second], kind, timeout_s=3.0)
    second.signal(signal.SIGSTOP)
    try:
        message = fails_to_exchange(first)
        fails_to_exchange(first)
    finally:
        second.signal(signal.SIGCONT)
    leave([first, second])
    assert "3 s" in message
    assert "\n" not in message


def test_a_killed_rank_fails_the_others() -> None:
    with rank_processes(3) as (survivor, *victims):
        for kind, victim in zip(KINDS, victims, strict=True):
            join([survivor, victim], kind, timeout_s=3.0)  # this asserts that no file is left
            victim.signal(signal.SIGKILL)
            fails_to_exchange(survivor)
            leave([survivor])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_never_comes_fails_the_others(kind: Any) -> None:
    with rendezvous() as place, pytest.raises(EngineError, match=r"0\.2 s"):
        make_collective(NativeEngineConfig(collectives=kind), Shard(0, 2), CPU, place, 0.2)


def test_other_threads_run_while_a_rank_waits() -> None:
    with rendezvous() as place, ThreadPoolExecutor(2) as threads:  # ranks in one process wait for each other
        opening = [threads.submit(SharedMemoryCollective, rank, 2, place.memory, 20.0) for rank in (0, 1)]
        ranks = [future.result() for future in opening]
        tensors = [torch.ones(3), torch.full((3,), 2.0)]
        list(threads.map(lambda rank: rank.all_reduce(tensors[rank.rank]), ranks))
        for rank in ranks:
            rank.close()
            rank.close()
    assert all(tensor.tolist() == [3.0, 3.0, 3.0] for tensor in tensors)


def test_memory_that_cannot_be_shared_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"No such file.*engine\.collectives=gloo"):
        SharedMemoryCollective(0, 2, tmp_path / "missing" / "memory", 1.0)


def test_ranks_meet_where_there_is_room_for_what_they_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MEMORY_BACKED", tmp_path)
    room = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    for size, inside in ((0, True), (2 * room, False)):
        with rendezvous(size) as place:
            assert (Path(place.directory).parent == tmp_path) == inside
    config = NativeEngineConfig(tp=2, collectives="shared_memory")
    assert meeting_bytes(config, 2) > 2 * SLOT_BYTES
    assert meeting_bytes(config.model_copy(update={"collectives": "gloo"}), 2) == 0


class Recorder(Alone):
    """A collective of two ranks that exchanges nothing."""

    size = 2


def test_an_emulated_link_adds_latency_and_bytes_over_bandwidth() -> None:
    link = EmulatedLink(Recorder(), LinkConfig(latency_us=2000, bandwidth_gib_per_s=0.5))
    start = time.perf_counter()
    link.all_reduce(torch.zeros(2**18))
    link.all_gather(torch.zeros(2**10))
    elapsed = time.perf_counter() - start
    assert elapsed >= 2 * 2e-3 + (2**20 + 2**12) / 2**29


def test_a_single_rank_is_alone_whatever_is_configured() -> None:
    config = NativeEngineConfig(tp=2, collectives="gloo", link=LinkConfig())
    assert isinstance(make_collective(config, WHOLE, CPU, Rendezvous("nowhere"), 1.0), Alone)


def resolved(kind: Any, device: str) -> str:
    return resolve_collectives(NativeEngineConfig(collectives=kind), torch.device(device)).collectives


def test_auto_is_nccl_on_cuda_else_shared_memory_else_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise KernelUnavailable("no compiler")

    assert resolved("auto", "cuda") == "nccl"
    assert resolved("auto", "cpu") == "shared_memory"
    monkeypatch.setattr(factory, "load_kernel", no_compiler)
    assert resolved("auto", "cpu") == "gloo"


@pytest.mark.parametrize(("kind", "device"), [("nccl", "cpu"), ("shared_memory", "cuda:1")])
def test_collectives_that_the_device_cannot_run_are_refused(kind: str, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.collectives={kind}.*{device}"):
        resolved(kind, device)


def test_a_link_is_emulated_where_it_is_configured() -> None:
    config = NativeEngineConfig(tp=2, collectives="shared_memory", link=LinkConfig())
    with rendezvous() as place, ThreadPoolExecutor(2) as threads:
        shards = [Shard(index, 2) for index in range(2)]
        ranks = list(threads.map(lambda shard: make_collective(config, shard, CPU, place, 20.0), shards))
    assert all(isinstance(rank, EmulatedLink) for rank in ranks)
    assert all(rank.native is not None for rank in ranks)
    for rank in ranks:
        rank.close()


def test_a_native_exchange_over_a_link_sums_and_waits() -> None:
    config = NativeEngineConfig(tp=2, collectives="shared_memory", link=LinkConfig(latency_us=3000))
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

    def add(rank: Collective) -> tuple[list[float], float]:
        assert rank.native is not None
        tensor = torch.full((3,), float(rank.rank + 1))
        start = time.perf_counter()
        rank.check(function(rank.native.sum)(rank.native.exchange, tensor.data_ptr(), 3))
        return tensor.tolist(), time.perf_counter() - start

    with rendezvous() as place, ThreadPoolExecutor(2) as threads:
        shards = [Shard(index, 2) for index in range(2)]
        ranks = list(threads.map(lambda shard: make_collective(config, shard, CPU, place, 20.0), shards))
        results = list(threads.map(add, ranks))
    assert [values for values, _ in results] == [[3.0] * 3] * 2
    assert all(seconds >= 3e-3 for _, seconds in results)
    for rank in ranks:
        rank.close()

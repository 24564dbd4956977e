"""A process group of torch.distributed for weights alone: gloo between CPUs, nccl between GPUs.

It exists beside any other group of the process. A lost member never ends the process: a call fails within the limit,
and the group cannot be used any more. With nccl none of this has ever run.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's __all__

from tailrace.errors import WeightsError, one_line
from tailrace.transfer.weights.messages import Backend

_LOOK_S = 0.02
"""Seconds between checks whether all members have come."""
_HEARD_S = 0.1
"""Seconds in which most members see that a group is given up; the others see that rank 0 has hung up."""


def listen(host: str) -> socket.socket:
    """Open a listening socket for `host_store`, at a free port of this machine's address `host`.

    Raises:
        WeightsError: this machine has no such address, or no room for another socket.
    """
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise WeightsError(f"no process group can be formed at {host}: {one_line(error)}") from None


def host_store(listener: socket.socket, name: str, *, limit_s: float) -> Store:
    """Make the store where the members of the group `name` find each other, for rank 0. It takes over `listener`.

    Raises:
        WeightsError: the store cannot be made.
    """
    host, port = listener.getsockname()[:2]
    return _store(host, port, name, limit_s, is_master=True, master_listen_fd=listener.detach())


def reach_store(host: str, port: int, name: str, *, limit_s: float) -> Store:
    """Connect to the store of the group `name`, for the other ranks.

    Raises:
        WeightsError: the store cannot be reached.
    """
    try:
        socket.create_connection((host, port), timeout=limit_s).close()  # torch would try again up to its limit
    except OSError as error:
        raise WeightsError(f"the sender's process group at {host}:{port} is not there: {one_line(error)}") from None
    return _store(host, port, name, limit_s)


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`. Other machines that can reach `host` find this one there.

    Raises:
        WeightsError: there is no way to `host`.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(target)  # sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        raise WeightsError(f"there is no way to {host!r}: {one_line(error)}") from None


class ProcessGroup:
    """One rank of a group. Used in one thread at a time. Every rank makes the same calls in the same order."""

    def __init__(
        self, backend: Backend, store: Store, rank: int, size: int, *, address: str, limit_s: float, given_up: Event
    ) -> None:
        """Wait until all ranks have come. After that, no rank needs the store.

        Args:
            store: a store whose name no other group has.
            address: where gloo listens to the other ranks; nccl finds its own.
            limit_s: the longest that a call waits for another rank.
            given_up: once it is set, rank 0 waits for the others no longer.

        Raises:
            WeightsError: a rank did not come in time or cannot be reached, or the group was given up.
        """
        with _weights_errors("forming"):
            _gather(store, rank, size, limit_s, given_up)
        self._rank = rank
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        limit = timedelta(seconds=limit_s)
        make = _nccl if backend == "nccl" else _gloo
        with _weights_errors(backend):
            self._group: Any = make(store, rank, size, address, limit)
        try:
            self.meet()  # nccl connects at the first exchange
        except WeightsError:
            self.close()
            raise

    def broadcast(self, data: torch.Tensor) -> None:
        """Fill `data`, `[bytes]` of uint8 on the CPU, with the contents of rank 0's `data`.

        Raises:
            WeightsError: another rank is lost, or late.
        """
        with _weights_errors("a broadcast"):
            if self._device.type == "cpu":
                self._group.broadcast([data]).wait()
            else:
                there = data.to(self._device) if self._rank == 0 else torch.empty_like(data, device=self._device)
                self._group.broadcast([there]).wait()
                data.copy_(there)

    def meet(self) -> None:
        """Wait until every rank is here.

        Raises:
            WeightsError: another rank is lost, or late.
        """
        with _weights_errors("a meeting"):
            total = torch.ones(1, device=self._device)
            self._group.allreduce([total]).wait()
            total.item()

    def close(self) -> None:
        """Hang up, so that the calls of other ranks fail at once. Calling it twice is harmless.

        Raises:
            WeightsError: torch failed to do so; the group cannot be used any more all the same.
        """
        group, self._group = self._group, None  # gloo hangs up when its last reference goes
        if group is not None:
            with _weights_errors("the end"):
                group.shutdown()


def _gather(store: Store, rank: int, size: int, limit_s: float, given_up: Event) -> None:
    """Wait until all ranks have come, before torch does: torch's own wait cannot be ended.

    Rank 0 waits for the others and tells them whether to go on. The others count on each rank that has come, so a rank
    stays until then.
    """
    if rank and given_up.is_set():
        raise _given_up()
    store.set(f"here {rank}", "")
    awaited = ["go on"] if rank else [f"here {other}" for other in range(1, size)]
    deadline = time.monotonic() + limit_s
    while not store.check(awaited):
        if given_up.is_set() and not rank:
            store.set("go on", "no")
            time.sleep(_HEARD_S)
            raise _given_up()
        if time.monotonic() > deadline:
            raise WeightsError(f"not all of the {size} members of a process group for weights came in {limit_s:g} s")
        time.sleep(_LOOK_S)
    if not rank:
        store.set("go on", "yes")
    elif store.get("go on") == b"no":
        raise _given_up()


def _given_up() -> WeightsError:
    return WeightsError("a process group for weights was given up before all of its members had come")


def _store(host: str, port: int, name: str, limit_s: float, **options: Any) -> Store:
    with _weights_errors("the meeting place"):
        limit = timedelta(seconds=limit_s)
        return PrefixStore(name, TCPStore(host, port, timeout=limit, wait_for_workers=False, **options))


# torch's stubs know neither of the constructors that take options


def _gloo(store: Store, rank: int, size: int, address: str, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    group: Any = ProcessGroupGloo
    options = group._Options()
    options._timeout = limit
    options._devices = [group.create_device(hostname=address)]
    return group(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, address: str, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = limit
    with _blocking_waits():
        return ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """Groups made inside fail in `wait` when a peer is lost; by default torch ends the process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _weights_errors(what: str) -> Iterator[None]:
    """Turn the RuntimeErrors of torch, which are of many kinds, into WeightsErrors."""
    try:
        yield
    except WeightsError:
        raise
    except RuntimeError as error:
        raise WeightsError(
            f"{what} of a process group for weights failed (a member is lost or late, if this names nothing else): "
            f"{one_line(error)}"
        ) from None

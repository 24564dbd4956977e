"""Weights of the tests. Every element of version `v` depends on `v`, so that a mixture shows."""

import torch

from tailrace.errors import WeightsError
from tailrace.transfer.weights.media.process_group import ProcessGroup
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender

LIMIT_S = 20.0
CHUNK_MIB = 1 / 64
SHAPES = {"embed": (300, 64), "layer.weight": (64, 129), "layer.bias": (64,), "scalar": (), "none": (0, 3)}


def tensors(version: int, *, scale: int = 1) -> dict[str, torch.Tensor]:
    """Random tensors, seeded by the version. `scale` multiplies the rows of the first one."""
    source = torch.Generator().manual_seed(version)
    shapes = SHAPES | {"embed": (300 * scale, 64)}
    return {name: torch.randn(shape, generator=source) for name, shape in shapes.items()} | {
        "steps": torch.tensor([version])
    }


async def grouped(sender: WeightSender, *names: str, after: ProcessGroup | None = None) -> ProcessGroup:
    """Wait until these receivers are the members of the sender's group, and return the group.

    Args:
        sender: The sender.
        names: The receivers.
        after: An earlier group. The sender may not know yet that it broke; the new group must be another one.
    """
    broadcaster = sender._service.broadcaster

    def look() -> ProcessGroup | None:
        is_it = broadcaster._group is not after and sorted(sender.stats().group) == sorted(names)
        return broadcaster._group if is_it else None

    found = await sender._service.wakeups.wait_for(look, timeout_s=LIMIT_S)
    assert found, f"{sender.stats().group} are in the group: {sender.stats().group_error}"
    return found


async def everybody_listens(sender: WeightSender) -> None:
    """Wait until the sender can tell every receiver that it is closed."""
    receivers = sender._service.receivers
    listen = lambda: all(known.ticket for known in receivers.values()) or None  # noqa: E731
    assert await sender._service.wakeups.wait_for(listen, timeout_s=LIMIT_S)


def error_of(receiver: WeightReceiver) -> WeightsError | None:
    """The reason why weights do not come at the moment, as the receiver's own thread reports it."""
    with receiver._service.status as status:
        return status.error


def check(receiver: WeightReceiver, version: int, *, scale: int = 1, dtype: torch.dtype | None = None) -> None:
    """Assert that the receiver has exactly this version."""
    with receiver.weights() as (number, got):
        assert number == version
        expected = tensors(version, scale=scale)
        assert list(got) == list(expected)
        for name, tensor in expected.items():
            wanted = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            assert got[name].dtype == wanted.dtype
            assert torch.equal(got[name], wanted), name

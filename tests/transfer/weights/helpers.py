"""Weights of the tests: every element of version `v` tells of `v`, so that a mixture shows."""

import torch

from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender

LIMIT_S = 20.0
CHUNK_MIB = 1 / 64
SHAPES = {"embed": (300, 64), "layer.weight": (64, 129), "layer.bias": (64,), "scalar": (), "none": (0, 3)}


def tensors(version: int, *, scale: int = 1) -> dict[str, torch.Tensor]:
    """Seeded by the version. `scale`: of the first one's rows."""
    source = torch.Generator().manual_seed(version)
    shapes = SHAPES | {"embed": (300 * scale, 64)}
    return {name: torch.randn(shape, generator=source) for name, shape in shapes.items()} | {
        "steps": torch.tensor([version])
    }


async def grouped(sender: WeightSender, *names: str) -> None:
    """Until these receivers are the members of the sender's group."""

    def look() -> bool | None:
        return sorted(sender.stats().group) == sorted(names) or None

    found = await sender._roster.bell.until(look, timeout_s=LIMIT_S)
    assert found, f"{sender.stats().group} are in the group: {sender.stats().group_error}"


async def everybody_listens(sender: WeightSender) -> None:
    """Until the sender can tell every receiver that it is closed."""
    members = sender._roster.members
    listen = lambda: all(member.ticket for member in members.values()) or None  # noqa: E731
    assert await sender._roster.bell.until(listen, timeout_s=LIMIT_S)


def check(receiver: WeightReceiver, version: int, *, scale: int = 1, dtype: torch.dtype | None = None) -> None:
    """The receiver has exactly this version."""
    with receiver.weights() as (number, got):
        assert number == version
        expected = tensors(version, scale=scale)
        assert list(got) == list(expected)
        for name, tensor in expected.items():
            wanted = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            assert got[name].dtype == wanted.dtype
            assert torch.equal(got[name], wanted), name

"""A trainer's state as files: weights and optimizer in safetensors, counters and random states in JSON. No pickle."""

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tailrace.errors import UNREADABLE, CheckpointError, one_line, quoted
from tailrace.types import IntArray

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
COUNTERS = "trainer.json"

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""The tensors of AdamW's state besides the number of steps."""


class Counters(msgspec.Struct, kw_only=True):
    """The counters of a trainer over a run."""

    updates: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0
    """Optimizer steps tried; the position in the schedule."""
    skipped_in_a_row: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0
    """The number of the latest of them, in a row, that were skipped for a non-finite loss or gradient."""


_NumpyRandom = tuple[str, list[int], int, int, float]


class _Numbers(msgspec.Struct, kw_only=True):
    """The contents of `trainer.json`."""

    counters: Counters
    python_random: tuple[int, tuple[int, ...], float | None]
    numpy_random: _NumpyRandom


def save(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, counters: Counters) -> None:
    """Write all state that the next optimizer step depends on into an existing directory."""
    parameters = dict(model.named_parameters())
    save_file({name: parameter.detach() for name, parameter in parameters.items()}, directory / WEIGHTS)
    save_file(_optimizer_tensors(parameters, optimizer), directory / OPTIMIZER)
    save_file(_torch_random(), directory / RANDOM)
    numbers = _Numbers(counters=counters, python_random=random.getstate(), numpy_random=_numpy_random())
    (directory / COUNTERS).write_bytes(msgspec.json.encode(numbers))


def load(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Counters:
    """Restore the state that `save` wrote, bit for bit.

    Raises:
        CheckpointError: a file is missing, cannot be read, or is of another model. Nothing is restored then.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    weights = _read(directory / WEIGHTS, shapes)
    moments = _read(directory / OPTIMIZER, None)
    _check_optimizer(directory / OPTIMIZER, moments, parameters, optimizer)
    generators = _read(directory / RANDOM, None)
    numbers = _read_numbers(directory / COUNTERS)
    _check_random(directory, generators, numbers)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    _restore_optimizer(parameters, optimizer, moments)
    _restore_random(generators, numbers)
    return numbers.counters


def _optimizer_tensors(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """The optimizer's tensors under `field/parameter`."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    if isinstance(optimizer, torch.optim.AdamW) and any(states.values()):
        for name in _trained(parameters, optimizer):
            states[name] = states[name] or _first_state(parameters[name])
    return {f"{key}/{name}": tensor for name, state in states.items() for key, tensor in state.items()}


def _trained(parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters that the optimizer may change."""
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, parameter in parameters.items() if parameter.requires_grad and id(parameter) in owned]


def _first_state(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """AdamW's initial state of a parameter that has had no gradient."""
    moments = {field: torch.zeros_like(parameter, requires_grad=False) for field in _MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32), **moments}


def _restore_optimizer(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    optimizer.state.clear()
    for name, tensor in tensors.items():
        key, _, parameter = name.partition("/")
        owner = parameters[parameter]
        optimizer.state[owner][key] = tensor.to(owner.device, copy=True)  # the tensor read is a view of the file


def _check_optimizer(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Check that they are numbers, or tensors of the parameter's shape; for AdamW also that they are its state."""
    for name, tensor in tensors.items():
        owner = parameters.get(name.partition("/")[2])
        if owner is None or not tensor.is_floating_point() or (tensor.dim() and tensor.shape != owner.shape):
            raise CheckpointError(f"{path} is of another model: it has {quoted(name)} of shape {list(tensor.shape)}")
    if tensors and isinstance(optimizer, torch.optim.AdamW):
        _check_adamw(path, tensors, parameters, _trained(parameters, optimizer))


def _check_adamw(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    trained: Sequence[str],
) -> None:
    expected = {f"{field}/{name}" for name in trained for field in ("step", *_MOMENTS)}
    if other := min(expected ^ tensors.keys(), default=None):
        what = "has no" if other in expected else "has"
        raise CheckpointError(
            f"{path} is not of this AdamW: it {what} {quoted(other)}; expected step, {', '.join(_MOMENTS)} of each "
            "parameter; resume from another checkpoint"
        )
    for name, tensor in tensors.items():
        if wrong := _wrong_in_adamw(name.partition("/")[0], tensor, parameters[name.partition("/")[2]]):
            raise CheckpointError(f"{path} has {quoted(name)} {wrong}; resume from another checkpoint")


def _wrong_in_adamw(field: str, tensor: torch.Tensor, parameter: torch.nn.Parameter) -> str | None:
    """The error in a tensor of AdamW's state, as a phrase; None where it is right."""
    shape = torch.Size() if field == "step" else parameter.shape
    if tensor.shape != shape:
        return f"of shape {list(tensor.shape)}; expected {list(shape)}"
    if field == "step":
        whole = bool(tensor.isfinite()) and float(tensor) >= 0 and float(tensor).is_integer()
        return None if whole else f"with the value {float(tensor):g}; expected a whole number, 0 or more"
    if tensor.dtype != parameter.dtype:
        return f"of {tensor.dtype}; expected {parameter.dtype}"
    if not tensor.isfinite().all():
        return "with a number that is not finite"
    return "with a number below 0" if field == "exp_avg_sq" and tensor.lt(0).any() else None


def _check_random(directory: Path, generators: Mapping[str, torch.Tensor], numbers: _Numbers) -> None:
    """Check the random states by setting them in unused generators."""
    try:
        torch.Generator().set_state(generators["cpu"])
        if other := [device for device in generators if not re.fullmatch(r"cpu|cuda:\d{1,3}", device)]:
            raise ValueError(f"{quoted(other[0])} is no device")
        random.Random().setstate(numbers.python_random)
        np.random.RandomState().set_state(_legacy(numbers.numpy_random))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"{directory / RANDOM} or {directory / COUNTERS} holds no state of random generators ({one_line(error)}); "
            "resume from another checkpoint"
        ) from None


def _legacy(state: _NumpyRandom) -> tuple[str, npt.NDArray[np.uint32], int, int, float]:
    name, keys, position, has_gauss, gauss = state
    return name, np.array(keys, np.uint32), position, has_gauss, gauss


def _torch_random() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": tensor for index, tensor in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _numpy_random() -> _NumpyRandom:
    name, keys, position, has_gauss, gauss = cast("tuple[str, IntArray, int, int, float]", np.random.get_state())
    return name, keys.tolist(), position, has_gauss, gauss


def _restore_random(generators: Mapping[str, torch.Tensor], numbers: _Numbers) -> None:
    for device, tensor in generators.items():
        if device == "cpu":
            torch.set_rng_state(tensor)
        elif torch.device(device).index < torch.cuda.device_count():  # this machine may have fewer
            torch.cuda.set_rng_state(tensor, device)
    random.setstate(numbers.python_random)
    np.random.set_state(_legacy(numbers.numpy_random))


def _read(path: Path, shapes: dict[str, torch.Size] | None) -> dict[str, torch.Tensor]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from None
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes is not None and found != shapes:
        name = min(name for name in found | shapes if found.get(name) != shapes.get(name))
        raise CheckpointError(
            f"{path} is of another model: {name} is {_shape(found.get(name))} there and {_shape(shapes.get(name))} "
            f"here; resume with the model that made the checkpoint"
        )
    return tensors


def _shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _read_numbers(path: Path) -> _Numbers:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Numbers)
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from None

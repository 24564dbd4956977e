"""The state of an optimizer is restored as it was saved, or refused in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.errors import CheckpointError
from tailrace.trainer.state import OPTIMIZER, Counters, load, save

Tensors = dict[str, torch.Tensor]


def trained(*, used: bool = True) -> tuple[torch.nn.Sequential, torch.optim.AdamW]:
    """A model of two layers after two updates; `used`: whether the second layer has had gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        output = model(torch.ones(1, 3)) if used else model[0](torch.ones(1, 3))
        output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh() -> tuple[torch.nn.Sequential, torch.optim.AdamW]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def assert_goes_on_alike(
    one: tuple[torch.nn.Module, torch.optim.Optimizer], other: tuple[torch.nn.Module, torch.optim.Optimizer]
) -> None:
    for model, optimizer in (one, other):
        for _ in range(3):
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("used", [True, False])
def test_what_was_saved_goes_on_bit_for_bit(tmp_path: Path, used: bool) -> None:
    """This also holds if a parameter has had no gradient yet."""
    model, optimizer = trained(used=used)
    save(tmp_path, model, optimizer, Counters(updates=2))
    other = fresh()
    assert load(tmp_path, *other) == Counters(updates=2)
    assert_goes_on_alike((model, optimizer), other)


def test_a_state_before_the_first_update_is_empty(tmp_path: Path) -> None:
    model, optimizer = fresh()
    save(tmp_path, model, optimizer, Counters())
    assert load_file(tmp_path / OPTIMIZER) == {}
    other = fresh()
    load(tmp_path, *other)
    assert_goes_on_alike((model, optimizer), other)


def test_parameters_that_are_not_trained_have_no_state(tmp_path: Path) -> None:
    def frozen() -> tuple[torch.nn.Sequential, torch.optim.AdamW]:
        first, second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).requires_grad_(False)
        return torch.nn.Sequential(first, second), torch.optim.AdamW([first.weight, *second.parameters()])

    model, optimizer = frozen()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path, model, optimizer, Counters(updates=1))
    assert set(load_file(tmp_path / OPTIMIZER)) == {f"{field}/0.weight" for field in ("step", "exp_avg", "exp_avg_sq")}
    load(tmp_path, *frozen())


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


def without(*names: str) -> Callable[[Tensors], None]:
    def remove(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return remove


ALL_OF_BIAS = ("step/0.bias", "exp_avg/0.bias", "exp_avg_sq/0.bias")


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (put("exp_avg/0.weight", torch.zeros(())), r"'exp_avg/0\.weight' of shape \[\]; expected \[2, 3\]"),
        (put("exp_avg_sq/0.bias", torch.zeros(())), r"'exp_avg_sq/0\.bias' of shape \[\]; expected \[2\]"),
        (put("step/0.weight", torch.ones(2, 3)), r"'step/0\.weight' of shape \[2, 3\]; expected \[\]"),
        (put("exp_avg/0.weight", torch.zeros(2, 3).half()), r"of torch\.float16; expected torch\.float32"),
        (put("exp_avg_sq/0.weight", torch.zeros(2, 3).bfloat16()), r"of torch\.bfloat16; expected torch\.float32"),
        (put("step/0.weight", torch.tensor(-1.0)), r"'step/0\.weight' with the value -1; expected a whole number"),
        (put("step/0.weight", torch.tensor(torch.nan)), r"with the value nan; expected a whole number, 0 or more"),
        (put("step/0.weight", torch.tensor(torch.inf)), r"with the value inf; expected a whole number"),
        (put("step/0.weight", torch.tensor(1.5)), r"with the value 1\.5; expected a whole number"),
        (put("step/0.weight", torch.tensor(1)), r"is of another model: it has 'step/0\.weight'"),
        (put("exp_avg/0.bias", torch.full((2,), torch.nan)), r"'exp_avg/0\.bias' with a number that is not finite"),
        (put("exp_avg_sq/0.bias", torch.full((2,), -1.0)), r"'exp_avg_sq/0\.bias' with a number below 0"),
        (put("max_exp_avg_sq/0.bias", torch.zeros(2)), r"it has 'max_exp_avg_sq/0\.bias'; expected step, exp_avg, "),
        (put("exp_avg/2.bias", torch.zeros(2)), r"is of another model: it has 'exp_avg/2\.bias'"),
        (without("step/0.weight"), r"is not of this AdamW: it has no 'step/0\.weight'; expected step"),
        (without(*ALL_OF_BIAS), r"is not of this AdamW: it has no 'exp_avg/0\.bias'"),
    ],
)
def test_a_state_that_adamw_cannot_have_is_refused_in_one_line_and_nothing_is_restored(
    tmp_path: Path, forge: Callable[[Tensors], None], says: str
) -> None:
    save(tmp_path, *trained(), Counters(updates=2))
    tensors = load_file(tmp_path / OPTIMIZER)
    forge(tensors)
    save_file(tensors, tmp_path / OPTIMIZER)
    model, optimizer = fresh()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=says) as caught:
        load(tmp_path, model, optimizer)
    assert str(tmp_path / OPTIMIZER) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not optimizer.state
    assert all(torch.equal(mine, old) for mine, old in zip(model.parameters(), before, strict=True))

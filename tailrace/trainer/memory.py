"""The bytes of a trainer's tensors."""

from collections.abc import Iterable

import torch


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


class TrainerMemory:
    """The bytes of weights, gradients and optimizer. The trainer's thread notes them; any thread may take them."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._weights = bytes_of(model.parameters())
        self._gradients = self._most_gradients = 0
        """The bytes of the gradients, now and the most since they were taken."""
        self._state = 0

    def note(self) -> None:
        """Measure gradients and optimizer, which come into being with the first batch and the first step."""
        self._gradients = bytes_of(each.grad for each in self._model.parameters() if each.grad is not None)
        self._most_gradients = max(self._most_gradients, self._gradients)
        states = self._optimizer.state.values()
        self._state = bytes_of(each for state in states for each in state.values() if isinstance(each, torch.Tensor))

    def take(self) -> dict[str, int]:
        """Return the bytes by purpose, see `Trainer.memory`."""
        gradients, self._most_gradients = self._most_gradients, self._gradients
        return {"weights": self._weights, "gradients": gradients, "optimizer": self._state}

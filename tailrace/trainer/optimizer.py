"""AdamW and its learning-rate schedule."""

import math

import torch

from tailrace.config.trainer import TrainerConfig


def make_optimizer(model: torch.nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Make a fused AdamW (Loshchilov & Hutter 2019) that decays matrices only: neither biases nor norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(config: TrainerConfig, update: int, total_updates: int, frozen_updates: int = 0) -> float:
    """The learning rate of optimizer step `update`, counted from 0.

    It is 0 for `frozen_updates`. Then it rises linearly and reaches the peak with the last warm-up step. Then it decays
    so that it would be 0 at `total_updates`, one step after the last.
    """
    if update < frozen_updates:
        return 0.0
    update, total_updates = update - frozen_updates, total_updates - frozen_updates
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    progress = min(1.0, (update - config.warmup_steps) / max(1, total_updates - config.warmup_steps))
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * (1 - progress)
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * progress)) / 2

"""Frequencies of rotary position embeddings."""

import math

import torch

from tailrace.models.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position, [head_dim / 2], fp32."""
    plain = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.type:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case _:
            return _llama3(rope, plain)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Slow down long wavelengths, keep short ones, blend between (Llama 3.1)."""
    turns = rope.original_positions * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor

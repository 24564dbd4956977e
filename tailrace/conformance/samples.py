"""Ragged batches to train on, and the plain computation that training must equal: one pass for each sample alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrace.trainer.base import TrainSample
from tailrace.types import FloatArray

VOCABULARY = 261


def make_samples(
    *, groups: Sequence[tuple[int, Sequence[int]]] = ((5, (3, 7, 1)), (1, (4, 4)), (9, (2, 6, 5, 8))), seed: int = 0
) -> list[TrainSample]:
    """Make samples of groups given as (prompt tokens, response tokens), with holes in their masks.

    The mask of the last sample is all 0.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for group_id, (prompt_tokens, responses) in enumerate(groups):
        prompt_ids = rng.integers(0, VOCABULARY, prompt_tokens)
        for tokens in responses:
            mask = (rng.random(tokens) < 0.8).astype(np.int64)
            samples.append(
                TrainSample(
                    group_id=group_id,
                    prompt_ids=prompt_ids,
                    response_ids=rng.integers(0, VOCABULARY, tokens),
                    response_mask=mask,
                    columns={"advantages": np.full(tokens, rng.standard_normal(), np.float32)},
                )
            )
    samples[-1] = replace(samples[-1], response_mask=np.zeros_like(samples[-1].response_mask))
    return samples


def with_log_probs(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Add random log-probabilities of all other weights, far enough from each other that ratios are clipped."""
    rng = np.random.default_rng(1)

    def draw(sample: TrainSample) -> FloatArray:
        return (rng.standard_normal(len(sample.response_ids)) * 0.5 - 5.5).astype(np.float32)

    return [
        replace(
            sample,
            old_log_probs=draw(sample),
            columns={**sample.columns, "ref_log_probs": draw(sample), "rollout_log_probs": draw(sample)},
        )
        for sample in samples
    ]


def load_plain(model_dir: Path) -> PreTrainedModel:
    """Load the model in fp32, as transformers has it, except that the padding token is a token like any other."""
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    cast(torch.nn.Embedding, model.get_input_embeddings()).padding_idx = None
    return model


def plain_log_probs(model: PreTrainedModel, sample: TrainSample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the response by transformers' own forward pass over the lone sequence, [R]."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]))
    logits = cast(torch.Tensor, model(ids[None]).logits)[0, len(sample.prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.from_numpy(sample.response_ids)[:, None]).squeeze(1)

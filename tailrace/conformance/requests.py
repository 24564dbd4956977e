"""Requests, and ways to run them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np

from tailrace.config.engine import SamplingConfig
from tailrace.types import FinishReason, Request, Sample


def make_request(request_id: int, *, group_id: int | None = None, prompt: int = 9, **sampling: Any) -> Request:
    """Make a request whose prompt of `prompt` tokens is decided by its group."""
    group_id = request_id if group_id is None else group_id
    return Request(
        request_id=request_id,
        group_id=group_id,
        prompt_ids=np.random.default_rng(group_id).integers(5, 261, prompt),
        sampling=SamplingConfig(**{"max_new_tokens": 8, **sampling}),
        seed=1000 + request_id,
    )


async def collect(stream: AsyncIterator[Sample]) -> dict[int, Sample]:
    """Collect the samples of a stream, by request id."""
    return {sample.request_id: sample async for sample in stream}


def cut_off(sample: Sample, tokens: int) -> Sample:
    """What an aborted request gives after so many tokens of this response."""
    return replace(
        sample,
        response_ids=sample.response_ids[:tokens],
        rollout_log_probs=sample.rollout_log_probs[:tokens],
        weight_versions=sample.weight_versions[:tokens],
        finish_reason=FinishReason.ABORT,
    )


def same_tokens(one: dict[int, Sample], other: dict[int, Sample]) -> bool:
    """Whether each request got the same response."""
    return {i: s.response_ids.tolist() for i, s in one.items()} == {
        i: s.response_ids.tolist() for i, s in other.items()
    }

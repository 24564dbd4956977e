"""Calibration of `make bench-pipeline`: CORE CONFIG. It generates a step's responses on one core, then trains on them.

CONFIG is the configuration of a run as JSON; each turn gives the lengths of responses.
"""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import gate
import numpy as np
from replay import Lengths

from tailrace.algorithms.factory import make_algorithm
from tailrace.config.run import RunConfig
from tailrace.host.compute import prepare_torch
from tailrace.run.colocated import Parts, open_parts
from tailrace.run.inputs import load_inputs
from tailrace.trainer.base import TrainSample
from tailrace.types import IntArray, Request, Sample


def make_requests(
    config: RunConfig, prompts: Sequence[IntArray], lengths: Lengths, ids: "itertools.count[int]"
) -> list[Request]:
    """Make a group of requests for each prompt."""
    return [
        Request(
            request_id=(number := next(ids)),
            group_id=group_id,
            prompt_ids=prompt,
            sampling=config.sampling.model_copy(update={"max_new_tokens": length, "ignore_eos": True}),
            seed=number,
        )
        for group_id, (prompt, group) in enumerate(zip(prompts, lengths, strict=True))
        for length in group
    ]


def train_sample(sample: Sample, prompts: Sequence[IntArray]) -> TrainSample:
    """Make a sample for training, with an advantage that is not zero."""
    ones = np.ones(len(sample.response_ids), np.float32)
    return TrainSample(
        group_id=sample.group_id,
        prompt_ids=prompts[sample.group_id],
        response_ids=sample.response_ids,
        response_mask=ones.astype(np.int64),
        columns={
            "advantages": ones * (1 if sample.request_id % 2 else -1),
            "rollout_log_probs": sample.rollout_log_probs,
        },
    )


async def one_step(
    config: RunConfig, parts: Parts, prompts: Sequence[IntArray], requests: Sequence[Request]
) -> dict[str, Any]:
    """Return the CPU seconds of both halves. There is one core; what else runs there meanwhile does not count."""
    loop = asyncio.get_running_loop()
    start = time.process_time()
    async with aclosing(parts.engine.submit(requests)) as stream:
        samples = [sample async for sample in stream]
    generated = time.process_time()
    batch = [train_sample(sample, prompts) for sample in samples]
    loss = make_algorithm(config.algorithm).policy_task()[1].loss
    await loop.run_in_executor(parts.device, lambda: parts.trainer.accumulate(batch, loss))
    await loop.run_in_executor(parts.device, parts.trainer.apply)
    return {"generation_s": generated - start, "training_s": time.process_time() - generated}


async def run(config: RunConfig) -> None:
    """Run a step for each turn."""
    prepare_torch(config.device, config.threads)
    inputs = load_inputs(config)
    ids = itertools.count()
    async with AsyncExitStack() as stack:
        parts = await open_parts(config, inputs, stack)
        for task in gate.turns():
            lengths = task["lengths"]
            prompts = [prompt.prompt_ids for prompt in inputs.prompts.train[: len(lengths)]]
            gate.done(**await one_step(config, parts, prompts, make_requests(config, prompts, lengths, ids)))


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    asyncio.run(run(RunConfig.model_validate_json(sys.argv[2])))

"""What the model of a recipe answers its first prompts: the lengths, and where groups are remade the rewards, too."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import cycle, islice

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.config.rewards import RewardsConfig
from tailrace.config.run import RunConfig
from tailrace.engine.core import EngineCore
from tailrace.errors import NothingGraded, PlanError
from tailrace.host.compute import prepare_torch
from tailrace.planner.problem import Table
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.rewards.graders import Graders, Group
from tailrace.run.inputs import Inputs, load_inputs
from tailrace.types import Prompt, Request, Sample
from tailrace.workloads.replay import Replay, Script, Turn

STEPS = 4
"""Training steps whose responses are generated."""
_GENERATE_S = 60.0
"""Seconds after which no further step is begun, and the first one is given up after twice as many."""
_GRADE_S = 300.0
"""Seconds after which all gradings are given up."""


def own_responses(recipe: str) -> Replay:
    """Generate responses to the first prompts of a recipe, which is JSON.

    They are graded where the algorithm has groups remade.

    Raises:
        NothingGraded: all gradings have failed.
        PlanError: a step of them takes too long, or their grading; or see `Table.of`.
        UserError: the recipe does not go with its model or its prompts, or a grader cannot be made.
    """
    config = RunConfig.model_validate_json(recipe)
    is_graded = Table.of(config).remaking is not None
    prepare_torch(config.device, config.threads)
    inputs = load_inputs(config)
    groups = _generated(config, inputs)
    rewards: list[list[float | None]] = [[None] * len(samples) for _, samples in groups]
    if is_graded:
        rewards = asyncio.run(_rewards(config.rewards, inputs, groups))
    return Replay(
        [
            [_script(prompt, sample, reward) for sample, reward in zip(samples, graded, strict=True)]
            for (prompt, samples), graded in zip(groups, rewards, strict=True)
        ]
    )


_Groups = Sequence[tuple[Prompt, Sequence[Sample]]]


def _generated(config: RunConfig, inputs: Inputs) -> _Groups:
    """Generate a few steps of responses."""
    engine, size = config.engine, config.algorithm.group_size
    assert isinstance(engine, NativeEngineConfig), "others are refused"
    prompts = cycle(inputs.prompts.train)
    found: list[tuple[Prompt, list[Sample]]] = []
    began = time.monotonic()
    with closing(EngineCore(engine, inputs.model_dir, device=torch.device(config.device))) as core:
        for _ in range(STEPS):
            if found and time.monotonic() > began + _GENERATE_S:
                break
            asked = list(islice(prompts, config.groups_per_step))
            for number, prompt in enumerate(asked, len(found)):
                for sample in range(size):
                    core.add(_request(config, prompt, number, sample))
            made: dict[int, Sample] = {}
            while core.has_work:
                made |= {sample.request_id: sample for sample in core.step()}
                if not found and time.monotonic() > began + 2 * _GENERATE_S:
                    raise PlanError(
                        f"a step of responses takes more than {2 * _GENERATE_S:.0f} s here; give their lengths with "
                        "--workload"
                    )
            first = len(found)
            found += [
                (prompt, [made[number * size + sample] for sample in range(size)])
                for number, prompt in enumerate(asked, first)
            ]
    return found


def _request(config: RunConfig, prompt: Prompt, group: int, number: int) -> Request:
    request = group * config.algorithm.group_size + number
    return Request(
        request_id=request,
        group_id=group,
        number=number,
        prompt_ids=prompt.prompt_ids,
        sampling=config.sampling,
        seed=config.seed + request,
    )


async def _rewards(config: RewardsConfig, inputs: Inputs, groups: _Groups) -> list[list[float | None]]:
    """The rewards of all responses, by group; None where the grading failed and the recipe gives no reward."""
    async with Graders(config) as graders:

        async def graded(prompt: Prompt, samples: Sequence[Sample]) -> list[Grade]:
            group = Group(len(samples))
            texts = [inputs.decode(sample.response_ids.tolist()) for sample in samples]
            requests = map(partial(GradingRequest.of, prompt), samples, texts)
            return await asyncio.gather(
                *(graders.grade(request, group, place) for place, request in enumerate(requests))
            )

        try:
            async with asyncio.timeout(_GRADE_S):
                grades = await asyncio.gather(*(graded(prompt, samples) for prompt, samples in groups))
        except TimeoutError:
            count = sum(len(samples) for _, samples in groups)
            raise PlanError(
                f"the grading of {count} responses takes more than {_GRADE_S:.0f} s; raise rewards.workers, or give "
                "lengths with --workload"
            ) from None
    NothingGraded.check([grade.error for of_group in grades for grade in of_group], "the first responses")
    return [[grade.reward for grade in of_group] for of_group in grades]


def _script(prompt: Prompt, sample: Sample, reward: float | None) -> Script:
    turn = Turn(generated_tokens=len(sample.response_ids))
    return Script(
        prompt_tokens=len(prompt.prompt_ids), turns=(turn,), reward=reward, finish_reason=sample.finish_reason
    )

"""Parameters of distributions, from which samples are drawn."""

import numpy as np
import polars as pl

from tailrace.workloads.parameters import Parameters, Single, Turns
from tailrace.workloads.samplers.base import MOST_TOKENS, Workload, check_amounts
from tailrace.workloads.samplers.conversations import Conversations
from tailrace.workloads.samplers.scores import shares_of
from tailrace.workloads.samplers.single import SingleTurns
from tailrace.workloads.trace import Provenance, Trace


class Fitted(Workload):
    """Draws the prompts of a step's groups, and responses to them. Prompts differ from step to step."""

    def __init__(self, parameters: Parameters) -> None:
        """Draw with these parameters."""
        self.name = parameters.name
        self._parameters = parameters
        self._most = (parameters.provenance.context or MOST_TOKENS) - 1  # tokens of a prompt
        self._responses = _responses(parameters)

    def sample(self, *, steps: int, groups: int, group_size: int, seed: int) -> Trace:
        """See `Workload`."""
        check_amounts(steps=steps, groups=groups, group_size=group_size, seed=seed)
        frames = [self._step(step, groups, group_size, np.random.default_rng([seed, step])) for step in range(steps)]
        known = self._parameters.provenance
        limits = Provenance(source=self.name, context=known.context, max_new_tokens=known.max_new_tokens)
        return Trace.of(pl.concat(frames), limits)

    def _step(self, step: int, groups: int, size: int, random: np.random.Generator) -> pl.DataFrame:
        scores = random.standard_normal(groups)
        prompts = np.clip(np.rint(self._parameters.prompt_tokens.quantile(shares_of(scores))), 1, self._most)
        responses = self._responses.draw(random, step, prompts, scores, size)
        numbers = {
            "step": np.full(groups * size, step),
            "group": np.repeat(np.arange(groups), size),
            "sample": np.tile(np.arange(size), groups),
            "prompt_tokens": np.repeat(prompts, size),
        }
        return pl.DataFrame(numbers).hstack(responses).with_columns(**self._judged(groups, size, random))

    def _judged(self, groups: int, size: int, random: np.random.Generator) -> dict[str, pl.Series | pl.Expr]:
        """Draw what comes after responses. It does not depend on their lengths."""
        parameters = self._parameters
        columns: dict[str, pl.Series | pl.Expr] = {"task": pl.lit(parameters.task, pl.String)}
        if parameters.reward_s is not None:
            columns["reward_s"] = pl.Series(parameters.reward_s.quantile(random.random(groups * size)))
        if parameters.correct_share is not None:
            columns["reward"] = pl.Series((random.random(groups * size) < parameters.correct_share).astype(np.float64))
        if parameters.kept_share is not None:
            columns["kept"] = pl.Series(np.repeat(random.random(groups) < parameters.kept_share, size))
        return columns


def _responses(parameters: Parameters) -> SingleTurns | Conversations:
    match parameters.response:
        case Single() as single:
            return SingleTurns(parameters, single)
        case Turns() as turns:
            return Conversations(parameters, turns)

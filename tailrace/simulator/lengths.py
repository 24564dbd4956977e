"""What is expected of responses in simulated time: nothing, what a scenario says, or what a predictor learns.

As in `rollout.foresight`, the policy knows the length of each response that has ended, and `siblings` learns it: one
sample of each group begins before the others. Each group has a prompt of its own here, and a remade one has another, so
none has a past. Whether its placement pays is not checked.
"""

import math
import random
from collections.abc import Sequence
from typing import assert_never

from tailrace.config.rollout import SiblingsLengths
from tailrace.planning.lengths.base import Asked, Expectation, Finished, LengthPredictor
from tailrace.planning.lengths.factory import make_predictor
from tailrace.planning.remaining import LengthHistory
from tailrace.simulator.samples import Response
from tailrace.simulator.scenario import Scenario
from tailrace.workloads.replay import Script


class SimulatedLengths:
    """The expectations of a run."""

    def __init__(self, scenario: Scenario, longest: int) -> None:
        """`longest`: tokens of the longest response that there may be."""
        self.history = LengthHistory()
        """The lengths of responses that have ended, as a policy knows them."""
        self._knows = scenario.knows_lengths
        self._error = scenario.expectation_error
        self.longest = longest
        """See `__init__`."""
        self._chance = random.Random(scenario.seed)
        self._siblings: LengthPredictor | None = None
        if self._knows == "siblings":
            self._siblings = make_predictor(SiblingsLengths(discount=scenario.lengths_discount))

    def of(self, prompt: int, scripts: Sequence[Script]) -> list[Expectation]:
        """What is expected at first of the responses to a prompt, by its number."""
        match self._knows:
            case "nothing":
                return [_certain(float(self.longest))] * len(scripts)
            case "lengths":
                return [self._told(script.tokens) for script in scripts]
            case "group_means":
                mean = sum(script.tokens for script in scripts) / len(scripts)
                return [self._told(mean)] * len(scripts)
            case "siblings":
                assert self._siblings is not None
                return self._siblings.expect([_asked(prompt, scripts[0])]) * len(scripts)
            case _:
                assert_never(self._knows)

    def wants_scout(self, first: Response) -> bool:
        """Whether one sample of a group should begin before the others."""
        siblings = self._siblings
        return siblings is not None and siblings.scouts and not siblings.knows(_asked(first.prompt, first.script))

    def again(self, response: Response) -> Expectation:
        """What is expected of a response by now."""
        assert self._siblings is not None
        return self._siblings.expect([_asked(response.prompt, response.script)])[0]

    def suppose(self, response: Response, tokens: float) -> Expectation:
        """What is expected of a response if another one of its group had so many tokens."""
        assert self._siblings is not None
        return self._siblings.suppose(_asked(response.prompt, response.script), tokens)

    def learn(self, response: Response) -> None:
        """Take in the length of a response that has ended."""
        self.history.add(response.tokens)
        if self._siblings is not None:
            asked = _asked(response.prompt, response.script)
            self._siblings.learn([Finished(asked=asked, tokens=response.tokens, version=response.first_version)])

    def _told(self, tokens: float) -> Expectation:
        """What is told of so many tokens. Who errs says how far it may be off."""
        if not self._error:
            return _certain(tokens)
        return Expectation.of(math.log(tokens) + self._chance.gauss(0.0, self._error), self._error)


def _certain(tokens: float) -> Expectation:
    return Expectation(tokens, tokens, tokens)


def _asked(prompt: int, script: Script) -> Asked:
    return Asked(prompt_id=str(prompt), prompt_tokens=script.prompt_tokens)

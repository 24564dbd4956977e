"""The prompts of a run in simulated time: each place of a training step has a group, and a remade one another."""

import random
from collections.abc import Sequence

from tailrace.simulator.lengths import SimulatedLengths
from tailrace.simulator.samples import Group, Response
from tailrace.simulator.scenario import Scenario
from tailrace.workloads.replay import Replay, Script


class SimulatedPrompts:
    """Makes groups of responses that have not begun."""

    def __init__(self, scenario: Scenario, replay: Replay, lengths: SimulatedLengths, *, drawn: Replay | None) -> None:
        """`drawn`: see `SimulatedRun`."""
        self._scenario = scenario
        self._replay = replay
        self._lengths = lengths
        self._drawn = (drawn or replay).groups
        """Those that take the places of groups that are remade."""

    def group(self, step: int, number: int, needed: int) -> Group:
        """The group at a place of a step. `needed`: the oldest weight version that may begin it."""
        place = step * self._scenario.groups_per_step + number
        return self._made(step, place, self._replay.groups[place], needed)

    def instead_of(self, group: Group) -> Group:
        """A group of the workload, which is drawn, for the place of one that was thrown away."""
        again, place = group.remade + 1, group.number % len(self._drawn)
        chance = random.Random(f"{self._scenario.seed} {place} {again}")  # the same in every mode, whatever its times
        return self._made(group.step, group.number, chance.choice(self._drawn), group.responses[0].needed, again)

    def _made(self, step: int, place: int, played: Sequence[Script], needed: int, remade: int = 0) -> Group:
        scripts = played[: self._scenario.group_size]
        prompt = place + remade * len(self._replay.groups)
        expected = self._lengths.of(prompt, scripts)
        responses = [
            Response(
                step=step,
                group=place,
                number=sample,
                prompt=prompt,
                script=script,
                tokens=script.tokens,
                needed=needed,
                expected=each,
                limit=self._lengths.longest,
            )
            for sample, (script, each) in enumerate(zip(scripts, expected, strict=True))
        ]
        tokens = scripts[0].prompt_tokens + sum(response.tokens for response in responses)
        return Group(place, step, responses, tokens, remade)

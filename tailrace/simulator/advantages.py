"""The advantages in simulated time: they take none, but wait for what they are computed from.

gradings of a group ─┐
its reference scores ├─▶ the group, or with `whole_steps` all groups of its step ─▶ trainer, critic
its values ──────────┘
"""

from collections import defaultdict
from collections.abc import Callable

from tailrace.simulator.agenda import Agenda
from tailrace.simulator.samples import Group
from tailrace.simulator.scenario import Scenario


class SimulatedAdvantages:
    """Passes groups on to those that train on them."""

    def __init__(self, agenda: Agenda, scenario: Scenario, let_train: Callable[[Group], None]) -> None:
        """`let_train`: called with each group that has its advantages."""
        self._agenda = agenda
        self._hop_s = scenario.hop_s
        self._claimed = scenario.groups_per_step if scenario.whole_steps else 1
        """Groups whose advantages are computed together."""
        self._let_train = let_train
        self._ready: dict[int, list[Group]] = defaultdict(list)
        """Groups that have all that is needed, by step."""

    def take(self, group: Group) -> None:
        """Take a part of what a group needs, which is there now."""
        group.needed -= 1
        if group.needed:
            return
        ready = self._ready[group.step]
        ready.append(group)
        if len(ready) == self._claimed:
            del self._ready[group.step]
            self._agenda.after(2 * self._hop_s, lambda: self._pass_on(ready))  # to the advantages, and from there

    def _pass_on(self, groups: list[Group]) -> None:
        for group in groups:
            self._let_train(group)

"""The advantages in simulated time: they take none, but wait for what they are computed from.

gradings of a group ─┐
its reference scores ├─▶ the group, or with `whole_steps` all groups of its step ─▶ trainer, critic
its values ──────────┘

A group that the algorithm has remade goes no further: another prompt takes its place.
"""

from collections import defaultdict
from collections.abc import Callable

from tailrace.simulator.agenda import Agenda
from tailrace.simulator.samples import Group
from tailrace.simulator.scenario import Scenario


class SimulatedAdvantages:
    """Passes groups on to those that train on them."""

    def __init__(
        self,
        agenda: Agenda,
        scenario: Scenario,
        let_train: Callable[[Group], None],
        remake: Callable[[Group], None],
    ) -> None:
        """`let_train`: called with each group that has its advantages. `remake`: with each that is thrown away."""
        self._agenda = agenda
        self._remaking = scenario.remaking
        self._hop_s = scenario.hop_s
        self._claimed = scenario.groups_per_step if scenario.whole_steps else 1
        """Groups whose advantages are computed together."""
        self._let_train = let_train
        self._remake = remake
        self._ready: dict[int, list[Group]] = defaultdict(list)
        """Groups that have all that is needed, by step."""

    def take(self, group: Group) -> None:
        """Take a part of what a group needs, which is there now."""
        group.needed -= 1
        if group.needed:
            return
        if self._is_remade(group):
            self._agenda.after(3 * self._hop_s, lambda: self._remake(group))  # by advantages and prompts to the engines
            return
        ready = self._ready[group.step]
        ready.append(group)
        if len(ready) == self._claimed:
            del self._ready[group.step]
            self._agenda.after(2 * self._hop_s, lambda: self._pass_on(ready))  # to the advantages, and from there

    def _is_remade(self, group: Group) -> bool:
        remaking = self._remaking
        if remaking is None or group.remade >= remaking.most:
            return False
        return remaking.wants([response.script for response in group.responses])

    def _pass_on(self, groups: list[Group]) -> None:
        for group in groups:
            self._let_train(group)

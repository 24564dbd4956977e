"""What samples of RL steps are drawn from."""

from abc import ABC, abstractmethod

from tailrace.errors import TraceError
from tailrace.workloads.trace import Trace

MOST_TOKENS = 2**30
"""The limit of lengths where a workload has none: what a trace can hold."""


MOST_SAMPLES = 50_000_000
"""The most samples of a trace that is drawn: they take up to 10 GB."""


class Workload(ABC):
    """What samples of an RL step are drawn from."""

    name: str

    @abstractmethod
    def sample(self, *, steps: int, groups: int, group_size: int, seed: int) -> Trace:
        """Draw a trace. The seed fixes every value, and a step is the same however many steps are drawn.

        Args:
            steps: numbered from 0.
            groups: of each step, numbered from 0 in each.
            group_size: samples of each group, numbered from 0.

        Returns:
            The trace. Its provenance has the workload's name as source, and the workload's limits.

        Raises:
            TraceError: an argument is out of range, or the workload cannot give such groups.
        """


def check_amounts(*, steps: int, groups: int, group_size: int, seed: int) -> None:
    """Check the arguments of `Workload.sample`.

    Raises:
        TraceError: one is below 1, or the seed below 0; or there would be too many samples.
    """
    for name, value, least in (
        ("steps", steps, 1),
        ("groups", groups, 1),
        ("group_size", group_size, 1),
        ("seed", seed, 0),
    ):
        if value < least:
            raise TraceError(f"{name} is {value}; expected {least} or more")
    if (samples := steps * groups * group_size) > MOST_SAMPLES:
        raise TraceError(
            f"{samples:,} samples would be drawn at once; at most {MOST_SAMPLES:,} are, so lower groups or steps"
        )

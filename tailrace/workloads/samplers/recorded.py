"""A recorded trace, whose groups are drawn again: the bootstrap (Efron 1979) over whole groups."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import polars as pl

from tailrace.errors import TraceError
from tailrace.workloads.samplers.base import Workload, check_amounts
from tailrace.workloads.trace import Provenance, Trace

_OF_ITS_RUN = ("first_version", "last_version", "start", "end")
"""Columns that say when a sample was made in its own run; they are null in a drawn one."""


class Recorded(Workload):
    """Draws whole groups of all recorded steps, with replacement.

    A group of another size than the one asked for gives so many of its samples, also with replacement. Groups of one
    sample do not say how the samples of a prompt differ, so a trace that has only these, such as a service's, can be
    drawn with a group size of 1 alone.
    """

    def __init__(self, trace: Trace) -> None:
        """Draw from this trace."""
        self.name = trace.provenance.source
        self._trace = trace
        sizes = trace.samples.group_by("step", "group", maintain_order=True).len()["len"].to_numpy()
        self._sizes: npt.NDArray[np.int64] = sizes.astype(np.int64)
        self._begins = np.cumsum(self._sizes) - self._sizes

    def sample(self, *, steps: int, groups: int, group_size: int, seed: int) -> Trace:
        """See `Workload`."""
        check_amounts(steps=steps, groups=groups, group_size=group_size, seed=seed)
        if group_size > 1 and self._sizes.max() == 1:
            raise TraceError(
                f"{self.name} has one sample of each prompt, and so no groups of {group_size}; draw groups of 1, or "
                "fit it with `tailrace trace fit`, where the samples of a group are independent"
            )
        rows = np.concatenate(list(self._rows(steps, groups, group_size, seed)))
        numbers = np.indices((steps, groups, group_size)).reshape(3, -1)
        drawn = self._trace.samples[rows].drop(_OF_ITS_RUN)
        named = dict(zip(("step", "group", "sample"), numbers, strict=True))
        of_trace = self._trace.provenance
        limits = Provenance(source=self.name, context=of_trace.context, max_new_tokens=of_trace.max_new_tokens)
        return Trace.of(drawn.with_columns(**{name: pl.Series(number) for name, number in named.items()}), limits)

    def _rows(self, steps: int, groups: int, size: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the rows of each step, [groups · size]."""
        for step in range(steps):
            random = np.random.default_rng([seed, step])
            drawn = random.integers(len(self._sizes), size=groups)
            again = random.integers(self._sizes[drawn, None], size=(groups, size))
            whole = np.broadcast_to(np.arange(size), (groups, size))
            places = np.where(self._sizes[drawn, None] == size, whole, again)
            yield (self._begins[drawn, None] + places).ravel()

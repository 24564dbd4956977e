"""Tasks as a graph: which of them wait for each other, and how long the longest way through them takes.

AsyncFlow, section 4.3, plans over the graph of an algorithm's tasks. Here its edges follow from a table: a task waits
for those that write the columns that it reads.
"""

from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

from tailrace.types import TaskSpec

Graph = Mapping[str, frozenset[str]]
"""The tasks that each task waits for."""


def graph_of(tasks: Iterable[TaskSpec]) -> Graph:
    """Return the graph of a table. Columns that no task writes are there from the start."""
    table = list(tasks)
    writers = {column: task.name for task in table for column in task.writes}
    return {task.name: frozenset(writers[column] for column in task.reads if column in writers) for task in table}


def critical_path(graph: Graph, seconds: Mapping[str, float]) -> tuple[tuple[str, ...], float]:
    """Return the tasks of the longest way, first to last, and its seconds. A task without `seconds` takes none."""
    ways: dict[str, tuple[tuple[str, ...], float]] = {}
    for task in TopologicalSorter(graph).static_order():
        before = max((ways[other] for other in graph[task]), key=lambda way: way[1], default=((), 0.0))
        ways[task] = (*before[0], task), before[1] + seconds.get(task, 0.0)
    return max(ways.values(), key=lambda way: way[1], default=((), 0.0))

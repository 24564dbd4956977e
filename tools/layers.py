"""The import rules of the package, room by room: `tests/test_imports.py` enforces them, `docs/architecture.md` draws
them.

A room is a folder or a file. Within `ROOMS[folder]`, every room of that folder has an entry. Each room is above all
rooms that it may import, so that no imports form a circle. `python -m tools.layers` prints the picture.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

NOUNS = {"errors", "events", "host", "config", "registers", "types"}
"""Rooms that every room above them may import."""

ROOMS: Mapping[str, Mapping[str, set[str]]] = {
    "tailrace": {
        "errors": set(),
        "registers": set(),
        "statistics": set(),
        "host": {"errors"},
        "events": {"errors", "registers"},
        "activity": {"events", "registers"},
        "config": {"errors", "host", "registers"},
        "types": {"config"},
        "algorithms": NOUNS,
        "rewards": NOUNS | {"models"},
        "prompts": NOUNS | {"workloads"},
        "models": NOUNS,
        "planning": NOUNS | {"statistics"},
        "simulator": NOUNS | {"activity", "planning", "workloads"},
        "planner": NOUNS | {"algorithms", "planning", "simulator", "workloads"},
        "workloads": NOUNS | {"statistics"},
        "report": NOUNS | {"planning", "statistics", "workloads"},
        "transfer": NOUNS | {"planning"},
        "engine": NOUNS | {"planning", "models"},
        "trainer": NOUNS | {"algorithms", "models", "planning"},
        "cluster": NOUNS | {"transfer"},
        "conformance": NOUNS | {"engine", "trainer", "algorithms", "transfer"},
        "rollout": NOUNS | {"activity", "engine", "planning", "transfer"},
        "tasks": NOUNS
        | {"activity", "transfer", "engine", "rollout", "trainer", "algorithms", "rewards", "prompts", "planning"}
        | {"workloads"},
        "run": NOUNS
        | {"activity", "tasks", "rollout", "cluster", "transfer", "engine", "trainer", "algorithms", "rewards"}
        | {"prompts", "models", "planning", "report", "statistics", "workloads"},
        "api": NOUNS | {"run", "prompts", "rewards"},
        "bench": NOUNS | {"engine", "models", "report", "rewards", "run", "workloads"},
        "commands": NOUNS
        | {
            "run",
            "rollout",
            "bench",
            "workloads",
            "algorithms",
            "cluster",
            "transfer",
            "engine",
            "trainer",
            "rewards",
            "prompts",
            "models",
            "planning",
            "report",
            "simulator",
            "statistics",
            "planner",
        },
        "cli": NOUNS | {"run", "commands", "report", "workloads"},
        "__main__": {"cli"},
        "__init__": {"api"},
    },
    "tailrace/engine": {
        "base": {"model"},
        "kernels": set(),
        "kv_cache": set(),
        "memory": set(),
        "model": set(),
        "scheduling": set(),
        "driver": {"base", "model"},
        "profile": {"scheduling"},
        "collectives": {"kernels", "memory", "model"},
        "sampling": {"collectives", "kernels", "model"},
        "decoder": {"collectives", "kernels", "kv_cache", "model", "sampling", "scheduling"},
        "ranks": {"collectives", "decoder", "kv_cache", "memory", "model", "sampling", "scheduling"},
        "lane": {"profile", "ranks", "scheduling"},
        "arrangement": {"collectives", "decoder", "lane", "profile", "ranks", "scheduling"},
        "adaptive_tp": {"arrangement", "collectives", "decoder", "kv_cache", "lane", "ranks", "scheduling"},
        "core": {"adaptive_tp", "arrangement", "base", "decoder", "driver", "lane", "model", "profile", "ranks"}
        | {"scheduling"},
        "one_by_one": {"base", "driver", "model", "scheduling"},
        "backends": {"adaptive_tp", "base", "core", "decoder", "driver", "kv_cache", "model", "one_by_one"}
        | {"scheduling"},
        "factory": {"backends", "base"},
        "timed": {"base"},
        "checks": {"backends", "base", "factory"},
        "opening": {"base", "factory"},
    },
    "tailrace/transfer": {
        "wire": set(),
        "shared_files": set(),
        "socket_directory": {"shared_files", "wire"},
        "queue": {"shared_files", "socket_directory", "wire"},
        "weights": {"shared_files", "socket_directory", "wire"},
    },
    "tailrace/transfer/queue": {
        "base": set(),
        "cells": set(),
        "storage": set(),
        "holding": {"base"},
        "address": set(),
        "policies": {"base"},
        "rows": {"base", "policies"},
        "snapshot": {"base", "cells", "rows"},
        "table_factory": {"policies", "rows"},
        "local": {"base", "cells", "policies", "rows", "snapshot"},
        "messages": {"base", "rows"},
        "client": {"address", "base", "cells", "holding", "messages", "rows", "snapshot", "storage"},
        "controller": {"base", "cells", "messages", "policies", "rows", "storage"},
        "unit": {"base", "cells", "messages", "storage"},
        "processes": {"address", "base", "client", "controller", "messages", "rows", "storage", "table_factory"}
        | {"unit"},
        "adapters": {"address", "base", "cells", "client", "messages", "rows"},
    },
}
"""The rooms that each room may import, by folder and by room; all are rooms of that folder."""


def room_of(path: Path, folder: str) -> str:
    """Return the room of `folder` that a file below it is in; both paths are relative to the repository."""
    return path.relative_to(folder).parts[0].removesuffix(".py")


def type_only(tree: ast.Module) -> set[int]:
    """Return the ids of all nodes under `if TYPE_CHECKING`."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def floors(folder: str) -> Iterator[list[str]]:
    """Yield the rooms of `folder`, lowest floor first. A room is one floor above the highest that it may import."""
    order = TopologicalSorter(ROOMS[folder])
    order.prepare()
    while order.is_active():
        floor = order.get_ready()
        yield sorted(floor)
        order.done(*floor)


def picture() -> str:
    """Return the floors of every folder that has rules, as `docs/architecture.md` shows them."""
    lines = []
    for folder in ROOMS:
        lines.append(f"{folder}/")
        stack = list(enumerate(floors(folder)))
        lines += [f"  {floor:2}  {'  '.join(rooms)}" for floor, rooms in reversed(stack)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())

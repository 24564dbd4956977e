"""What the adapters of `tailrace bench` have in common. Imports nothing of Tailrace, and no framework."""

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_jobs(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the header and the groups of `jobs.jsonl`; `tailrace/bench/jobs.py` has their form."""
    header, *groups = map(json.loads, (directory / "jobs.jsonl").read_bytes().splitlines())
    return header, groups


def check_plays(plays: Mapping[str, object], header: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> None:
    """Exit with a message where the benchmark asks for something that an adapter of single turns does not play.

    `plays`: what the header has to say, by key.
    """
    for key, value in plays.items():
        if header[key] != value:
            raise SystemExit(f"this adapter plays {key} {value} alone, and the benchmark has {header[key]}")
    if any(len(job["turns"]) > 1 for group in groups for job in group["samples"]):
        raise SystemExit("this adapter plays single turns, and the workload has conversations")


def grading_s(seconds: Sequence[float], graders: int) -> float:
    """Return the seconds in which so many graders are done with samples that take these `seconds` each.

    A grader that is done takes the next sample.
    """
    free = [0.0] * graders
    for duration in seconds:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)

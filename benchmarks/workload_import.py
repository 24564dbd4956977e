"""How many rows a second `tailrace trace import` reads: packed lengths of a million samples, and conversations.

    python benchmarks/workload_import.py

writes both files with seeded lengths, imports each three times, and ends with one JSON line. A row is one sample. No
peer stands beside it: PolyTrace publishes its records without a reader of them.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tailrace.workloads.importers.factory import import_trace
from tailrace.workloads.trace import Provenance

PACKED_ROWS = 1_000_000
CONVERSATION_ROWS = 50_000
_GROUP = 8
_PROMPTS = 512
"""Prompts of a step."""
_ROUNDS = 3


def import_rows_per_s(*, rows: int = PACKED_ROWS) -> float:
    """Return the rows of packed lengths that are imported in a second, the median of three."""
    return _speed(_packed, rows)


def conversation_rows_per_s(*, rows: int = CONVERSATION_ROWS) -> float:
    """Return the same for conversations of two turns with a call between them."""
    return _speed(_conversations, rows)


def _speed(records: Callable[[int], Iterator[dict[str, Any]]], rows: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records(rows)))
        return statistics.median(_once(path) for _ in range(_ROUNDS))


def _once(path: Path) -> float:
    begun = time.perf_counter()
    trace = import_trace([path], Provenance(source="benchmark"))
    return len(trace) / (time.perf_counter() - begun)


def _packed(rows: int) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    for number in range(rows // _GROUP):
        step, prompt = divmod(number, _PROMPTS)
        lengths = np.ceil(random.lognormal(6.0, 0.7, _GROUP)).astype(int).tolist()
        yield {
            "step": step,
            "dp_rank": prompt % 8,
            "local_index": prompt // 8,
            "input": 100 + prompt,
            "output": lengths,
        }


def _conversations(rows: int) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    for number in range(rows):
        group, sample = divmod(number, _GROUP)
        first, returned, last = np.ceil(random.lognormal(5.0, 0.5, 3)).astype(int).tolist()
        turns = [
            {"prompt_tokens": 300, "cached_tokens": 0, "completion_tokens": first, "engine_latency_s": 0.5},
            {
                "prompt_tokens": 300 + first + returned,
                "cached_tokens": 299 + first,
                "completion_tokens": last,
                "engine_latency_s": 0.7,
            },
        ]
        call = {"turn": 0, "tool_name": "search", "latency_s": 0.1, "response_token_len": returned, "status": "success"}
        numbers = {"step": group // _PROMPTS, "prompt_group_id": group, "sample_id": sample, "prompt_len": 300}
        yield {**numbers, "turns": turns, "tool_calls": [call], "finish_reason": "stop"}


def main() -> None:
    """Print both speeds."""
    packed, conversations = import_rows_per_s(), conversation_rows_per_s()
    print(f"packed lengths   {packed:12,.0f} rows/s of {PACKED_ROWS:,}")
    print(f"conversations    {conversations:12,.0f} rows/s of {CONVERSATION_ROWS:,}")
    print(json.dumps({"import_rows_per_s": round(packed), "import_conversation_rows_per_s": round(conversations)}))


if __name__ == "__main__":
    main()

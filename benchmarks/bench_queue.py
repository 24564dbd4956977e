"""`make bench-queue`: the transfer queue beside TransferQueue 0.1.11, both in processes of their own on one machine.

Each side has a controller, two storage units and one client (`queue_ours.py`, `queue_theirs.py`). It is blocked while
the other has its turn: TransferQueue's processes, Ray's among them, take a twentieth of one core while they wait.
`queue_turns.py` defines, once for both, what a turn does and how it is timed. In a round every side has its turn. The
first round is warm-up, and the median of the others counts. The last line is JSON; ratios are ours over theirs, of
rates.

    batches   256 rows of about 58 KB, put and got whole; ours also by TCP alone, without shared memory
    calls     rows of 64 bytes, one a call
    claims    16 rows at a time, beside a thousand and a million stored ones
    crowd     4 producers and 4 consumers at once, each a process

Three figures are of ours alone: `two_controllers_over_one` (the crowd's rate with two controllers over that with one),
`unit_joined.py` (puts before and after another unit has joined) and `slow_engine.py` (two engines of which one is
slowed to half).
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from gate import Contestant
from peers import peer_python
from slow_engine import slow_engine
from unit_joined import unit_joined

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench-queue"
PACKAGES = ("torch==2.13.0", "TransferQueue==0.1.11", "ray==2.60.0", "tensordict==0.15.3", "pyzmq==27.3.0")
COMPARED = {
    "put": "SyncQueue.put / TransferQueueClient.put",
    "get": "SyncQueue.claim, cells included / get_meta and get_data",
    "get_and_read": "the same, and every byte read once",
    "get_and_release": "get and SyncQueue.ack / get_meta, get_data and clear_partition",
    "small_claim": "as get, one row a call",
    "claim_ms": "as get, 16 rows; theirs_claim: get_meta alone",
    "aggregate": "put beside get_and_read and SyncQueue.ack / put beside get_and_read; theirs clears after the turn",
}
"""The calls that are compared: ours / theirs."""
PARTS = ("put", "get", "get_and_read", "get_and_release")
"""The parts of a batch that are timed."""
WORKLOADS = ("varlen", "dense")
PASSES, CALLS, CLAIMS, CROWD_PUTS = 5, 100, 15, 16
"""Numbers of each in a turn."""

Figures = dict[str, Any]
Sides = Mapping[str, Contestant]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of each comparison, after one of warm-up.")] = 9,
    stored: Annotated[int, typer.Option(min=4096, help="Rows that are stored while few are claimed.")] = 2**20,
) -> None:
    """Run the comparisons."""
    python = peer_python(BUILD, PACKAGES)
    for name, compared in COMPARED.items():
        print(f"{name:>16}  {compared}")
    with ExitStack() as stack:
        sides = {"ours": ours(stack, "batch"), "tcp": ours(stack, "batch", "tcp"), "theirs": theirs(stack, python)}
        figures = batches(sides, rounds)
        figures |= crowd({name: sides[name] for name in ("ours", "theirs")}, rounds)
    with ExitStack() as stack:
        sides = {"ours": ours(stack, "small"), "theirs": theirs(stack, python)}
        figures |= calls(sides, rounds)
        figures |= claims(sides, rounds, stored)
    with ExitStack() as stack:
        figures |= controllers(
            {name: ours(stack, "batch", controllers=n) for name, n in (("one", 1), ("two", 2))}, rounds
        )
    figures |= unit_joined() | slow_engine("math-32b", steps=4)
    print(json.dumps({"bench": "queue"} | figures))


def batches(sides: Sides, rounds: int) -> Figures:
    """Return the rates of putting and getting whole batches, and of our put beside a plain copy of the same bytes."""
    measured = {workload: batch_medians(sides, workload, rounds) for workload in WORKLOADS}
    figures: Figures = {}
    for name, suffix in (("ours", ""), ("tcp", "_tcp")):
        for workload, of_side in measured.items():
            for part in PARTS:
                ratio = of_side["theirs"][f"{part}_s"] / of_side[name][f"{part}_s"]
                figures[f"{workload}_{part}{suffix}"] = round(ratio, 2)
    varlen = measured["varlen"]["ours"]
    figures["copy_bandwidth_fraction"] = round(varlen["copy_s"] / varlen["put_s"], 3)
    figures["mb_per_s"] = {
        workload: {
            name: {part: round(those["bytes"] / those[f"{part}_s"] / 1e6) for part in (*PARTS, "copy")}
            for name, those in of_side.items()
        }
        for workload, of_side in measured.items()
    }
    return figures


def batch_medians(sides: Sides, workload: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median of all passes of all rounds, by side and figure; every side compares all cells once."""
    turns = [
        take_turns(sides, number, do="batch", workload=workload, passes=PASSES, compare=number == 0)
        for number in range(rounds + 1)
    ]
    return {name: medians([turn[name] for turn in turns[1:]]) for name in sides}


def crowd(sides: Sides, rounds: int) -> Figures:
    """Return rows and bytes per second through the queue with many producers and consumers."""
    turns = [take_turns(sides, number, do="crowd", puts=CROWD_PUTS) for number in range(rounds + 1)]
    of_side = {name: medians([turn[name] for turn in turns[1:]]) for name in sides}
    rates = {
        f"aggregate_{unit}_per_s": {name: round(those[unit] / those["seconds"]) for name, those in of_side.items()}
        for unit in ("rows", "bytes")
    }
    return {"aggregate": round(of_side["theirs"]["seconds"] / of_side["ours"]["seconds"], 2)} | rates


def controllers(sides: Sides, rounds: int) -> Figures:
    """Return the rate of many producers and consumers with two controllers over that with one, each with two units."""
    turns = [take_turns(sides, number, do="crowd", puts=CROWD_PUTS) for number in range(rounds + 1)]
    one, two = (medians([turn[name] for turn in turns[1:]])["seconds"] for name in ("one", "two"))
    return {"two_controllers_over_one": round(one / two, 2)}


def calls(sides: Sides, rounds: int) -> Figures:
    """Return calls per second with one small row each."""
    turns = [take_turns(sides, number, do="calls", calls=CALLS) for number in range(rounds + 1)]
    of_side = {name: medians([turn[name] for turn in turns[1:]]) for name in sides}
    ours, theirs = of_side["ours"], of_side["theirs"]
    return {
        "small_put": round(theirs["put_s"] / ours["put_s"], 2),
        "small_claim": round(theirs["get_s"] / ours["get_s"], 2),
        "small_calls_per_s": {
            name: {"put": round(1 / those["put_s"]), "claim": round(1 / those["get_s"])}
            for name, those in of_side.items()
        },
    }


def claims(sides: Sides, rounds: int, stored: int) -> Figures:
    """Return the time of a claim of a few rows beside a thousand stored rows and beside `stored`."""
    few, many = [], []
    for number in range(rounds + 1):
        take_turns(sides, number, do="fill", rows=1024)
        few.append(take_turns(sides, number, do="claims", claims=CLAIMS))
    take_turns(sides, 0, do="fill", rows=stored)
    for number in range(rounds + 1):
        many.append(take_turns(sides, number, do="claims", claims=CLAIMS))
    beside_few, beside_many = (
        {name: medians([turn[name] for turn in those[1:]]) for name in sides} for those in (few, many)
    )
    ms = {
        "claim_ms_1k_rows": milliseconds(beside_few["ours"]["get_s"]),
        "claim_ms_1m_rows": milliseconds(beside_many["ours"]["get_s"]),
    }
    return ms | {
        "claim_1m_over_1k": round(beside_many["ours"]["get_s"] / beside_few["ours"]["get_s"], 2),
        "stored_rows": [1024, stored],
        "theirs_claim_ms": [milliseconds(those["theirs"]["claim_s"]) for those in (beside_few, beside_many)],
        "theirs_claim_and_fetch_ms": [milliseconds(those["theirs"]["get_s"]) for those in (beside_few, beside_many)],
    }


def take_turns(sides: Sides, number: int, **task: Any) -> dict[str, Figures]:
    """Return the figures of each of `sides` for `task`, taken one after the other."""
    figures = {}
    for name, side in sides.items():
        figures[name] = side.step(**task)
        described = "  ".join(f"{key} {value:.5g}" for key, value in medians([figures[name]]).items())
        what = f"{task['do']} {task.get('workload', '')}"
        print(f"{name:>8} {what:<14} {described}{'  (warm-up)' if number == 0 else ''}", flush=True)
    return figures


def medians(turns: Sequence[Figures]) -> dict[str, float]:
    """Return the median of each figure, over all turns and over all values that a turn has of it."""
    joined: dict[str, list[float]] = {}
    for turn in turns:
        for key, value in turn.items():
            joined.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    return {key: statistics.median(values) for key, values in joined.items()}


def milliseconds(seconds: float) -> float:
    """Return milliseconds, rounded."""
    return round(seconds * 1e3, 3)


def ours(stack: ExitStack, table: str, transport: str = "shared", controllers: int = 1) -> Contestant:
    """Start Tailrace's side."""
    name = f"ours-{table}-{transport}-{controllers}"
    return start(stack, name, sys.executable, "queue_ours.py", table, transport, str(controllers))


def theirs(stack: ExitStack, python: Path) -> Contestant:
    """Start TransferQueue's side."""
    return start(stack, "theirs", python, "queue_theirs.py")


def start(stack: ExitStack, name: str, python: str | Path, program: str, *arguments: str) -> Contestant:
    """Start a contestant that `stack` ends."""
    command = [str(python), str(HERE / program), str(BUILD / name), *arguments]
    contestant = Contestant(command, BUILD / f"{name}.log", {})
    stack.callback(contestant.stop)
    return contestant


if __name__ == "__main__":
    typer.run(main)

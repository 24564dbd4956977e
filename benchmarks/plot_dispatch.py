"""Draws `docs/images/dispatch.svg`: one step of a workload on virtual engines, under several ways to dispatch prompts.

    python benchmarks/plot_dispatch.py

The engines are those of `dispatch_virtual.py`, and so is the step, the first with its seed. Each engine has a row: how
many responses it decodes. The last line is JSON, with the seconds of each way.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dispatch_virtual import ARMS, MODELS, generate, serving
from svg import begun

from tailrace.engine.timed import TimedEngine
from tailrace.host.virtual_loop import VirtualLoop
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "dispatch.svg"
WORKLOAD = "code-14b"
ENGINES, SLOTS, GROUPS, GROUP_SIZE = 6, 64, 96, 8
EVERY_S = 2.0
"""Virtual seconds between two looks at the engines."""
SHOWN = {
    "pull": ("pull", "#84909c"),
    "skewness_siblings": ("skewness-aware, one sample of each group first (siblings)", "#22997a"),
    "skewness_ceiling": ("skewness-aware, the mean length of each group known", "#4285c9"),
    "oracle": ("skewness-aware, all lengths known (oracle)", "#d97f26"),
}
"""The title and the colour of each arm."""

WIDTH, LEFT, RIGHT, TOP = 880, 84, 70, 8
ROW, GAP, HEADING = 20, 3, 24
BLOCK = HEADING + ENGINES * (ROW + GAP) + 10
"""Height of an arm."""
THIN = 1.0
"""Least height of responses that are decoded."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A step under one arm."""

    seconds: float
    running: Sequence[Sequence[int]]
    """Of each engine, the responses that it decodes, every `EVERY_S` from the start."""


async def watched(engines: Sequence[TimedEngine], seen: list[list[int]]) -> None:
    """Look at the engines until cancelled."""
    while True:
        for engine, running in zip(engines, seen, strict=True):
            running.append(engine.stats().running)
        await asyncio.sleep(EVERY_S)


async def play(name: str, replay: Replay) -> Turn:
    """Generate the step under an arm."""
    arm = ARMS[name]
    seen: list[list[int]] = [[] for _ in range(ENGINES)]
    async with serving(arm, replay, engines=ENGINES, slots=SLOTS, groups=GROUPS, model=MODELS[WORKLOAD]) as (
        service,
        engines,
    ):
        watching = asyncio.create_task(watched(engines, seen))
        seconds = await generate(service, arm, replay, 0, GROUPS)
        watching.cancel()
    return Turn(seconds, seen)


def place(seconds: float, longest: float) -> float:
    """Where a moment is on the horizontal axis, which is `longest` seconds long."""
    return round(LEFT + seconds / longest * (WIDTH - LEFT - RIGHT), 1)


def outline(running: Sequence[int], longest: float, floor: int) -> str:
    """The path of an area as high as the responses of an engine."""
    steps = [f"M{LEFT} {floor}"]
    for look, (before, count) in enumerate(pairwise([0, *running, 0])):
        if count != before:
            height = max(ROW * count / SLOTS, THIN) if count else 0
            steps.append(f"H{place(EVERY_S * look, longest)}V{round(floor - height, 1)}")
    return "".join(steps) + "Z"


def drawing(name: str, turn: Turn, longest: float, top: int) -> Iterator[str]:
    """Yield the drawing of an arm; `longest` seconds are as wide as the picture."""
    title, colour = SHOWN[name]

    yield f'<text x="{LEFT}" y="{top + 16}" font-weight="bold">{title}</text>'
    for number, running in enumerate(turn.running):
        floor = top + HEADING + number * (ROW + GAP) + ROW
        looks = max((look + 1 for look, count in enumerate(running) if count), default=0)
        end = place(min(EVERY_S * looks, turn.seconds), longest)
        yield f'<text x="{LEFT - 8}" y="{floor - 6}" text-anchor="end">engine {number + 1}</text>'
        yield f'<rect x="{LEFT}" y="{floor - ROW}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" fill="#f1f3f5"/>'
        yield f'<path d="{outline(running, longest, floor)}" fill="{colour}"/>'
        yield f'<line x1="{end}" x2="{end}" y1="{floor - ROW}" y2="{floor}" stroke="#30363d" stroke-width="1.5"/>'
    x, bottom = place(turn.seconds, longest), top + HEADING + ENGINES * (ROW + GAP)
    yield f'<line x1="{x}" x2="{x}" y1="{top + HEADING - 4}" y2="{bottom}" stroke="{colour}" stroke-dasharray="4 3"/>'
    yield f'<text x="{x + 5}" y="{top + 16}" fill="{colour}" font-weight="bold">{turn.seconds:.0f} s</text>'


def main() -> None:
    """Write the picture."""
    trace = open_workload(WORKLOAD).sample(steps=1, groups=GROUPS, group_size=GROUP_SIZE, seed=0)
    replay = Replay.of(trace)
    turns = {}
    for name in SHOWN:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            turns[name] = runner.run(play(name, replay))
    longest = max(turn.seconds for turn in turns.values())
    height = TOP + BLOCK * len(turns) + 44
    parts = begun(WIDTH, height)
    for number, (name, turn) in enumerate(turns.items()):
        parts += drawing(name, turn, longest, TOP + number * BLOCK)
    for tick in range(0, int(longest) + 1, 100):
        parts.append(f'<text x="{place(tick, longest)}" y="{height - 30}" text-anchor="middle">{tick}</text>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">seconds; the height of a row is {SLOTS} '
        "responses, a line is where an engine ends</text>"
    )
    PICTURE.write_text("\n".join([*parts, "</svg>"]) + "\n")
    print(json.dumps({name: round(turn.seconds, 1) for name, turn in turns.items()}))


if __name__ == "__main__":
    main()

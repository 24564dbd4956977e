"""Adaptive TP on eight ranks whose steps take what a table says, with the controller of the engine.

The table has the shape of PAT, figure 4: with one sequence TP 8 takes 37 % less than TP 2, and with 128 of them 26 %
more. No rank runs: `planning.drain` says when sequences end, and a switch takes what the controller foresees.
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence

from tailrace.planning.drain import Work, drain
from tailrace.planning.latency import LatencyPredictor
from tailrace.planning.remaining import LengthHistory, Ranked, RemainingEstimate, Survival, Unfinished
from tailrace.planning.tp_decision import Snapshot
from tailrace.planning.tp_merge import context, merge
from tailrace.planning.tp_profile import DecodePoint, PrefillPoint, ProfileKey, SwitchCost, TPProfile, grid
from tailrace.planning.tp_stage import chosen
from tailrace.planning.tp_switch import SwitchController

RANKS, DEGREES, SEQUENCES, PROMPT = 8, (1, 2, 4, 8), 256, 100
LONGEST = 16_384
FIXED_MS = {1: 42.0, 2: 24.0, 4: 17.5, 8: 15.1}
"""Milliseconds of a step with one sequence."""
SEQUENCE_MS = {1: 0.10, 2: 0.12, 4: 0.13, 8: 0.17}
"""Milliseconds of each further sequence of a replica."""


def step_s(tp: int, size: int, tokens: int) -> float:
    """Seconds of a step of one replica; a token of context takes 30 ns on one rank."""
    return (FIXED_MS[tp] + SEQUENCE_MS[tp] * (size - 1)) / 1e3 + 3e-8 * tokens / tp


def table() -> TPProfile:
    """The profile of such ranks."""
    key = ProfileKey(
        model="",
        architecture={},
        dtype="bfloat16",
        ranks=RANKS,
        threads_per_rank=1,
        hardware="",
        cores=1,
        backend="",
        collectives="",
    )
    points = [(size, length) for size, length in grid(SEQUENCES * LONGEST, SEQUENCES, LONGEST + PROMPT, points=60)]
    return TPProfile(
        key=key,
        created="",
        tailrace="",
        token_budget=SEQUENCES * LONGEST,
        decode=tuple(
            DecodePoint(tp=tp, replicas=1, batch_size=b, context_tokens=b * length, seconds=step_s(tp, b, b * length))
            for tp in DEGREES
            for b, length in points
        ),
        prefill=tuple(
            PrefillPoint(tp=tp, batch_size=b, length=length, seconds=1e-4 * b * length / tp)
            for tp in DEGREES
            for b, length in ((1, 16), (1, 4096), (64, 4096))
        ),
        switches=tuple(
            SwitchCost(source_tp=a, target_tp=b, reshard_s=0.6, rest_s=0.4, kv_bytes_per_s=8e9)
            for a, b in itertools.permutations(DEGREES, 2)
        ),
        group_s={tp: 0.0 for tp in DEGREES if tp > 1},
    )


def controller(profile: TPProfile, estimate: RemainingEstimate, least_gain: float = 0.02) -> SwitchController:
    """A controller as an engine has it, with places for all sequences. It does not return at the end of a batch."""
    return SwitchController(
        profile,
        estimate,
        max_batch_size=SEQUENCES,
        least_gain=least_gain,
        steps_between=64,
        look_ahead=True,
        returns=False,
    )


def snapshot(tp: int, replicas: Sequence[Sequence[Work]]) -> Snapshot:
    """The engine with these sequences and what they will make, which only `Ranked` is told."""
    return Snapshot(
        tp=tp,
        degrees=DEGREES,
        replicas=tuple(
            tuple(
                Unfinished(
                    context=held,
                    generated=held - PROMPT,
                    most=max(1, LONGEST + PROMPT - held),
                    expected=held - PROMPT + remaining,
                )
                for held, remaining in running
            )
            for running in replicas
        ),
        kv_bytes_per_token=131_072,
        groups=frozenset(DEGREES),
    )


def dealt(tp: int, lengths: Sequence[int]) -> list[list[Work]]:
    """The sequences of each replica when all have their prompts."""
    count = RANKS // tp
    return [[(PROMPT, tokens) for tokens in lengths[first::count]] for first in range(count)]


def adaptive_s(asked: SwitchController, steps: LatencyPredictor, lengths: Sequence[int], tp: int = 1) -> float:
    """Seconds of a batch that begins under degree `tp` and changes it as the controller says."""
    replicas, seconds = dealt(tp, lengths), 0.0
    while unfinished := sum(map(len, replicas)):
        decision = asked.decide(snapshot(tp, replicas))
        if decision.switch:
            seconds += chosen(decision).switch_s
            replicas, tp = merge(replicas, tp, decision.chosen, tokens=context).replicas, decision.chosen
        stop = unfinished - math.ceil(unfinished / 8)
        state = drain(steps, tp, replicas, (), slots=SEQUENCES, stops={stop} - {0})[0]
        replicas, seconds = state.replicas, seconds + state.seconds
    return seconds


def eight_ranks(batches: Sequence[Sequence[int]]) -> dict[str, float]:
    """Adaptive TP's time over that of the best degree that stays, of TP 2, and of a controller that knows all lengths.

    The lengths of the first batch are known before. Both ratios are of the sums over the others.
    """
    profile, history = table(), LengthHistory()
    steps = LatencyPredictor(profile)
    found, foreseen, stays = 0.0, 0.0, dict.fromkeys(DEGREES, 0.0)
    for number, batch in enumerate(batches):
        if number:
            found += adaptive_s(controller(profile, Survival(history)), steps, batch)
            foreseen += adaptive_s(controller(profile, Ranked(), least_gain=0.0), steps, batch)
            for tp in DEGREES:
                stays[tp] += drain(steps, tp, dealt(tp, batch), (), slots=SEQUENCES)[-1].seconds
        for length in batch:
            history.add(length)
    others = {"vs_best_static": min(stays.values()), "vs_tp2": stays[2], "vs_hindsight": foreseen}
    return {name: round(found / seconds, 3) for name, seconds in others.items()}


def decision_ms(lengths: Sequence[int]) -> float:
    """Milliseconds of CPU of the median of 50 decisions with all sequences under way."""
    history, chance = LengthHistory(), random.Random(0)
    for length in lengths:
        history.add(length)
    works = [(PROMPT + made, length - made) for length in lengths for made in [chance.randrange(length)]]
    asked, state = controller(table(), Survival(history)), snapshot(1, [works[first::8] for first in range(8)])
    seconds = []
    for _ in range(50):
        began = time.thread_time()
        asked.decide(state)
        seconds.append(time.thread_time() - began)
    return round(1e3 * statistics.median(seconds), 2)

"""Engines whose ranks are rearranged when a test says so."""

import os
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tailrace.conformance.requests import make_request
from tailrace.engine.core import EngineCore
from tailrace.errors import TailraceWarning
from tailrace.planning.tp_verdict import SwitchReport
from tailrace.types import FinishReason, Request, Sample
from tests.engine.helpers import make_core

Cache = Literal["move", "recompute"]


def make_switching_core(model_dir: Path, *, dp: int = 1, tp: int = 1, **config: Any) -> EngineCore:
    """Make a core without a TP profile, so that only the test decides on switches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TailraceWarning)
        return make_core(
            model_dir, dp=dp, tp=tp, threads_per_rank=1, adaptive_tp={"profile": str(model_dir / "none")}, **config
        )


def switch(core: EngineCore, tp: int, *, cache: Cache = "move") -> tuple[list[Sample], SwitchReport]:
    """Switch to TP `tp` between two steps. Return the samples that finished meanwhile, and the switch's report."""
    samples = core.settle()
    return samples, core.arrangement.switch(tp, cache=cache)


def steps(core: EngineCore, count: int) -> list[Sample]:
    return [sample for _ in range(count) if core.has_work for sample in core.step()]


def pids(core: EngineCore) -> list[int]:
    return [pid for lane in core.lanes for pid in lane.replica.pids]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def group_of(group: int, chance: random.Random) -> list[Request]:
    """Make three requests of one prompt, greedy or sampled, of random lengths."""
    samplings: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}]
    return [
        make_request(
            3 * group + member,
            group_id=group,
            prompt=3 + 5 * group % 17,
            max_new_tokens=chance.randint(1, 24),
            ignore_eos=True,
            **samplings[group % 3],
        )
        for member in range(3)
    ]


def wander(
    core: EngineCore, degrees: Sequence[int], *, switches: int, seed: int, backlog: int = 12
) -> tuple[list[Request], dict[int, Sample]]:
    """Serve requests that come and leave at random moments, and switch at others. Return the requests and samples.

    Args:
        core: The engine core.
        degrees: The TP degrees to switch to.
        switches: The number of switches.
        seed: The seed of all choices.
        backlog: The number of unfinished requests beyond which no request comes.
    """
    chance = random.Random(seed)
    requests: list[Request] = []
    coming: list[Request] = []
    samples: list[Sample] = []
    done = 0
    while core.has_work or done < switches:
        action = chance.random()
        if action < 0.3 and done < switches and len(requests) - len(samples) < backlog:
            coming = coming or group_of(len(requests) // 3, chance)
            core.check(coming[0])
            core.add(coming[0])
            requests.append(coming.pop(0))
        elif action < 0.33:
            samples += core.settle()
            samples += core.abort([chance.randrange(len(requests) + 1)])
        elif action < 0.55 and done < switches:
            target = chance.choice([tp for tp in degrees if tp != core.arrangement.config.tp])
            samples += switch(core, target, cache=chance.choice(("move", "move", "recompute")))[0]
            done += 1
        else:
            samples += steps(core, chance.randint(1, 3))
        if chance.random() < 0.2:
            samples += core.settle()
    assert sorted(sample.request_id for sample in samples) == [request.request_id for request in requests]
    assert core.stats().used_blocks == 0
    return requests, {sample.request_id: sample for sample in samples}


def responses(samples: dict[int, Sample], reference: dict[int, Sample]) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of `reference`. Those of aborted samples are cut to the length in `samples`."""
    cut = {i: len(s.response_ids) if s.finish_reason is FinishReason.ABORT else None for i, s in samples.items()}
    return {
        i: (reference[i].response_ids[:end].tolist(), reference[i].rollout_log_probs[:end].tolist())
        for i, end in cut.items()
    }

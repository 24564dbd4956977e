"""`make bench-elastic`: a run that chooses its number of engines, and engines that join and leave.

    python benchmarks/bench_elastic.py [--steps 16] [--virtual-steps 30] [--seeds 3]

The parts are programs of their own, whose figures they explain: `elastic_real.py` (processes on this machine) and
`elastic_virtual.py` (the decisions in virtual time, with the steps of an H100). The last line is JSON. Its
`step_over_right` has the worst of all seeds.
"""

import json
from typing import Any

import elastic_real
import elastic_virtual
import typer


def summary(real: dict[str, Any], virtual: list[dict[str, Any]]) -> dict[str, Any]:
    """The last line."""
    ratios = [found["step_over_right"] for found in virtual]
    worst = {
        part: max((of[part] for of in ratios if of[part] is not None), default=None) for part in ("run", "settled")
    }
    claimed = ("exposed_s", "tokens_lost")
    return {
        "bench": "elastic",
        "step_over_right": worst,
        **{name: real[name] for name in claimed},
        "real": {name: figure for name, figure in real.items() if name not in claimed},
        "virtual": virtual,
    }


def main(steps: int = 16, virtual_steps: int = 30, groups: int = 128, seeds: int = 3) -> None:
    """Make both parts, the real one first: it needs the machine for itself."""
    real = elastic_real.measure(steps)
    print(json.dumps({"real": real}), flush=True)
    pace = elastic_virtual.TRAINER_TOKENS_PER_S
    virtual = elastic_virtual.compare(steps=virtual_steps, groups=groups, seeds=seeds, trainer_tokens_per_s=pace)
    print(json.dumps(summary(real, virtual)))


if __name__ == "__main__":
    typer.run(main)

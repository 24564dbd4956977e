"""`make bench-simulator`: how far predictions are from what was measured.

    python benchmarks/bench_simulator.py [--no-machine]

The parts are programs of their own: `simulator_machine.py` (real runs here), `simulator_tpot.py` (published
measurements of serving), `simulator_serving.py` (recorded runs of vLLM), `simulator_training.py` (published trainers),
`simulator_scale.py` (what a simulation of 1,024 devices takes). The second and the third need the extra `plan`; the
third and the fourth need TAILRACE_DATA. A part that is left out says why. The last line is JSON.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import simulator_serving
import simulator_tpot
import simulator_training
import typer

HERE = Path(__file__).parent
PART_LIMIT_S = 4 * 3600.0


def of_program(name: str) -> dict[str, Any]:
    """The last line of another program, which measures itself and so has a process of its own."""
    command = [sys.executable, str(HERE / name)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=PART_LIMIT_S)
    print(done.stdout, end="", flush=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    machine: Annotated[bool, typer.Option(help="Compare with real runs here: half an hour on 2 cores.")] = True,
) -> None:
    """Make all parts."""
    found: dict[str, Any] = {"bench": "simulator"}
    found |= {"devices_1024": of_program("simulator_scale.py")["devices_1024"]}
    if machine:
        found |= {"this_machine_error_pct": of_program("simulator_machine.py")["this_machine_error_pct"]}
    if importlib.util.find_spec("aiconfigurator_core") is None:
        print('left out: time per output token and recorded runs, since pip install "tailrace[plan]" was not made')
    else:
        found |= simulator_tpot.tpot_errors()
    if (data := os.environ.get("TAILRACE_DATA")) is None:
        print("left out: recorded runs and published trainers, since TAILRACE_DATA is not set")
    else:
        found |= simulator_training.training_figures(Path(data))
        if importlib.util.find_spec("aiconfigurator_core") is not None:
            found |= simulator_serving.serving_figures(Path(data))
    print(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)

"""One round: run, do harm, check that the run went on as it should, and find what it has left behind."""

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import msgspec
import torch
import yaml
from safetensors.torch import load_file

from tailrace import cli
from tailrace.cluster.base import WorkerSpec
from tailrace.config.run import RunConfig
from tailrace.host.interrupt import INTERRUPTED
from tailrace.trainer.checkpoint import CheckpointStore, find_damage
from tests.chaos.plan import ROWS_PER_STEP, STEPS, Plan
from tests.chaos.processes import adopt_orphans, exposed, gone, open_to_others, shared_memory
from tests.chaos.watch import Harm, follow
from tests.helpers.faulty_run import record_rows, rows_of_steps
from tests.helpers.runs import learned, steps_of

ATTEMPT_LIMIT_S = 300.0
"""The time limit of one attempt at a run. The limits of its parts add up to less."""
_NO_ROOM, _TRIES = "Ray did not start on this machine", 3
"""What a run prints when the machine is too busy for Ray, and how often such a run is started again."""
_GONE_LIMIT_S = 30.0
"""The time in which whatever a dead driver has left must end by itself."""


class Outcome(msgspec.Struct, kw_only=True):
    """The result of a round."""

    plan: str
    done: list[str]
    """The harm that was done, and how the run took it."""
    faults_done: int
    wrong: list[str]
    """Rows, steps, weights or messages that are not as they should be."""
    hung: list[str]
    left: list[str]
    """Processes, files and shared memory that were left behind."""
    exposed: list[str]
    """Sockets and files that others could have reached."""
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether the round found any problem."""
        return bool(self.wrong or self.hung or self.left or self.exposed)


def no_outcome(plan: Plan) -> Outcome:
    """The outcome of a round that has not begun."""
    return Outcome(
        plan=str(plan),
        done=[],
        faults_done=0,
        wrong=[],
        hung=[],
        left=[],
        exposed=[],
        seconds=0.0,
    )


class Round:
    """A round, played in a process of its own."""

    def __init__(self, plan: Plan, model: Path, prompts: Path, reference: Path | None, directory: Path) -> None:
        """Make the round.

        Args:
            plan: What to run and what to harm.
            model: The model of the run.
            prompts: The prompts of the run.
            reference: The directory of a run without faults, if the round is to be compared with it.
            directory: An empty directory. Temporary files go to another one beside it, so that its path is short enough
                for Ray's sockets.
        """
        self._plan = plan
        self._model, self._prompts, self._reference = model, prompts, reference
        self._directory = directory
        self._temporary = directory.with_name(f"t{directory.name}")
        self._faults = list(plan.faults)
        self._outcome = no_outcome(plan)

    def play(self) -> Outcome:
        """Run, do harm, resume and check."""
        began = time.monotonic()
        adopt_orphans()
        os.umask(0)
        self._temporary.mkdir(mode=0o700)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._temporary)
        before = shared_memory()
        run = self._to_end()
        if run is not None:
            self._outcome.wrong += self._wrong(run)
            self._outcome.left += self._left_in(run)
            self._outcome.left += [f"{path.name} among temporary files" for path in self._temporary.iterdir()]
            self._outcome.left += [f"{path}" for path in shared_memory() - before if not _is_in_use(path)]
        remove(self._temporary)
        self._outcome.faults_done = len(self._plan.faults) - len(self._faults)
        self._outcome.seconds = round(time.monotonic() - began, 1)
        return self._outcome

    def _to_end(self) -> Path | None:
        """Run until a run has ended well, and return its directory.

        Return None if a run hangs, or fails although nothing harmed it. A fault whose moment an attempt has not reached
        is passed to the next attempt.
        """
        number, resume = 0, False
        while True:
            run = self._directory / f"run-{number}"
            config = self._plan.config(run, self._model, self._prompts)
            log = self._directory / f"log-{number}-{len(self._outcome.done)}-{int(resume)}"
            code, harm = self._attempt(config, log, resume)
            self._outcome.done += harm.told
            if code is None:
                self._outcome.hung.append(f"the run has not ended within {ATTEMPT_LIMIT_S:g} s, see {log}")
                return None
            if code == 0:
                return run
            has_checkpoint = CheckpointStore(run / "checkpoints", keep=5).latest() is not None
            self._outcome.wrong += _untold(code, log, run, must_hint=has_checkpoint and not resume)
            if _NO_ROOM in log.read_text(errors="replace") and self._outcome.done.count(_NO_ROOM) < _TRIES:
                self._outcome.done.append(_NO_ROOM)
            elif not any(fault.may_end_the_run for fault in harm.done):
                self._outcome.wrong.append(f"a run that was not harmed enough has ended with {code}, see {log}")
                return None
            resume = has_checkpoint
            number += not resume
            self._outcome.done.append(f"ended with {code}, then {'resumed' if resume else 'begun again'}")

    def _attempt(self, config: RunConfig, log: Path, resume: bool) -> tuple[int | None, Harm]:
        driver = os.fork()
        if not driver:
            drive(config, log, resume)
        code, harm = follow(driver, Path(config.output_dir), self._faults, ATTEMPT_LIMIT_S, self._look_around)
        left = gone(_GONE_LIMIT_S if code is not None else 0.0)
        if code is not None:
            self._outcome.left += left
        return code, harm

    def _look_around(self) -> None:
        found = [*exposed(), *open_to_others([self._temporary])]
        self._outcome.exposed += [one for one in found if one not in self._outcome.exposed]

    def _wrong(self, run: Path) -> Iterator[str]:
        rows = rows_of_steps(run)
        if sorted(rows) != list(range(STEPS)):
            yield f"steps {sorted(rows)} were trained"
        trained = sorted(order for step in rows.values() for order in step)
        if trained != list(range(STEPS * ROWS_PER_STEP)):
            yield f"rows {trained} were trained on"
        last = {event.step: event for event in steps_of(run)}
        if last.keys() != set(range(STEPS)):
            yield f"steps {list(last)} have events"
        for event in last.values():
            if event.samples != ROWS_PER_STEP or event.metrics["staleness_max"] > self._plan.mode.staleness:
                yield f"step {event.step} has {event.samples} samples, staleness {event.metrics['staleness_max']}"
        yield from _broken(run)
        if self._plan.mode.is_exact and self._reference is not None:
            yield from _differences(self._reference, run)

    def _left_in(self, run: Path) -> list[str]:
        return [f"{path} in the run" for path in run.rglob(".*") if path.name != ".lock"]


def drive(config: RunConfig, log: Path, resume: bool) -> NoReturn:
    """Run `tailrace train` in this forked process. `trained.jsonl` in the run's directory gets the rows."""
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(output, stream)
        recipe = log.with_suffix(".yaml")
        recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        sys.argv = ["tailrace", "train", str(recipe), *(["--resume"] if resume else [])]
        with ExitStack() as stack:
            stack.enter_context(patch("tailrace.run.separated.WorkerSpec", _recording_spec))
            record_rows(Path(config.output_dir) / "trained.jsonl")
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:  # the command itself had not begun
        code = INTERRUPTED
        print("Aborted.")
    except BaseException:  # of any kind: nothing else reports it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _recording_spec(**values: Any) -> WorkerSpec:
    if values["name"] == "trainer":
        values["factory"] = "tests.helpers.faulty_run:recording"
    return WorkerSpec(**values)


def _untold(code: int, log: Path, run: Path, *, must_hint: bool) -> Iterator[str]:
    """Yield what the messages of a failed run lack, or have too much of.

    Args:
        code: The exit code of the run.
        log: What the run has printed.
        run: Its directory.
        must_hint: Whether the run has saved a checkpoint, and must therefore say how to resume.
    """
    if code < 0:
        return  # it was killed
    said = log.read_text(errors="replace").strip()
    if "Traceback" in said:
        yield f"a traceback, see {log}"
    if not said:
        yield f"it has ended with {code} and said nothing, see {log}"
    if must_hint and "--resume" not in said:
        yield f"it has ended with {code} and not said how to go on, see {log}"
    if (run / "events.jsonl").exists() and not (run / "report.html").exists():
        yield f"it has ended with {code} and written no report, see {log}"


def _broken(run: Path) -> Iterator[str]:
    """Yield the run's damaged or missing files."""
    for path in CheckpointStore(run / "checkpoints", keep=5).list():
        if problem := find_damage(path):
            yield f"{path.name}: {problem}"
    for name in ("model/config.json", "report.html"):
        if not (run / name).exists():
            yield f"there is no {name}"


def _differences(reference: Path, run: Path) -> Iterator[str]:
    """Yield the differences from the reference: figures and weights must be equal bit for bit."""
    ours, theirs = ({event.step: learned(event) for event in steps_of(path)} for path in (run, reference))
    if ours != theirs:
        steps = [step for step in theirs if ours.get(step) != theirs[step]]
        yield f"the figures of steps {steps} differ from those of a run that nobody has harmed"
    made, expected = (load_file(path / "model" / "model.safetensors") for path in (run, reference))
    if made.keys() != expected.keys() or not all(torch.equal(made[name], expected[name]) for name in expected):
        yield "the weights differ from those of a run that nobody has harmed"


def _is_in_use(path: Path) -> bool:
    """Whether the process in the name of `path` lives, or `path` is gone: another process may have begun meanwhile."""
    numbers = [int(part) for part in path.name.split("-") if part.isdigit()]
    return any(Path(f"/proc/{number}").exists() for number in numbers) or not path.exists()


def prepare(directory: Path) -> tuple[Path, Path]:
    """Write the model and the prompts of all rounds."""
    from tailrace.conformance.tiny import write_tiny_model
    from tests.helpers.runs import write_prompts

    return write_tiny_model("llama", directory / "model"), write_prompts(directory / "prompts.jsonl")


def remove(directory: Path) -> None:
    """Remove all that a round has written."""
    shutil.rmtree(directory, ignore_errors=True)

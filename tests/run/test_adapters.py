"""Engines and trainers that users write: the examples of docs/adapters.md in whole runs, and early errors."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tailrace.commands.dry_run import print_plan
from tailrace.config.engine import AdapterEngineConfig
from tailrace.config.trainer import AdapterTrainerBackend, TrainerConfig
from tailrace.engine.backends.adapter import load_engine_factory
from tailrace.engine.base import EngineArgs
from tailrace.engine.factory import make_engine
from tailrace.errors import UserError
from tailrace.events import read_events
from tailrace.host.user_code import load_callable
from tailrace.registers.phases import PHASES
from tailrace.report.breakdown import breakdown_of
from tailrace.run.train import train
from tailrace.trainer.base import TrainerArgs
from tailrace.trainer.factory import make_trainer
from tests.conftest import TinyModel
from tests.helpers.local_workers import use_local_workers
from tests.helpers.runs import learned, small_run, steps_of, write_prompts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adapters.md").read_text()
MODULES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
SECTIONS: dict[str, Any] = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
LIMIT_S = 200


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the page's files."""
    directory = tmp_path_factory.mktemp("adapters")
    for name, code in MODULES.items():
        (directory / f"{name}.py").write_text(code)
    return directory


@pytest.fixture
def adapters(written: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the page's files importable."""
    monkeypatch.syspath_prepend(written)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


def test_the_engine_of_the_page_is_short() -> None:
    lines = [line for line in MODULES["my_engine"].splitlines() if line.strip()]
    assert len(lines) < 100


@pytest.mark.usefixtures("adapters")
def test_a_run_trains_with_the_adapters_of_the_page(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    run = tmp_path / "run"
    config = small_run(
        run, tiny_model("llama"), prompts, engine=SECTIONS["engine"], trainer__backend=SECTIONS["trainer"]["backend"]
    )
    assert train(config, resume=False) == 0
    assert len(steps_of(run)) == 4
    assert all(event.metrics["grad_norm"] > 0 for event in steps_of(run))
    initial, trained = load_file(tiny_model("llama") / "model.safetensors"), load_file(run / "model/model.safetensors")
    assert initial.keys() == trained.keys()
    assert any(not torch.equal(initial[name], trained[name]) for name in initial)
    versions = [event.version for event in read_events(run / "events.jsonl") if event.task == "update_weights"]
    assert versions[-1] == 4
    engine, _, trainer = breakdown_of(read_events(run / "events.jsonl"), steps_of(run))
    assert engine.share("generation") > 0
    assert engine.parts == {}, "this engine measures no parts of generation"
    assert set(trainer.parts) == {"update"}, "the trainer is a subclass of ours, which does"
    for worker in (engine, trainer):
        assert sum(map(worker.share, PHASES)) == pytest.approx(1)


@pytest.mark.usefixtures("adapters")
def test_the_engine_of_the_page_makes_the_run_that_ours_makes(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    engines: dict[str, Any] = {"ours": {"type": "hf"}, "theirs": SECTIONS["engine"]}
    for name, engine in engines.items():
        train(small_run(tmp_path / name, tiny_model("llama"), prompts, engine=engine, trainer__steps=2), resume=False)
    ours, theirs = (list(map(learned, steps_of(tmp_path / name))) for name in engines)
    assert ours == theirs


@pytest.mark.usefixtures("adapters")
def test_the_adapters_of_the_page_make_the_same_run_in_workers_of_their_own(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_local_workers(monkeypatch)
    placements: tuple[dict[str, Any], ...] = ({}, {"placement": "separated"})
    together, apart = (
        small_run(
            tmp_path / f"run-{number}",
            tiny_model("llama"),
            prompts,
            engine=SECTIONS["engine"],
            trainer__backend=SECTIONS["trainer"]["backend"],
            pipeline=pipeline,
        )
        for number, pipeline in enumerate(placements)
    )
    assert [train(config, resume=False) for config in (together, apart)] == [0, 0]
    ours, theirs = (list(map(learned, steps_of(Path(config.output_dir)))) for config in (together, apart))
    assert ours == theirs


def test_the_adapters_of_the_page_keep_the_contracts(written: Path) -> None:
    """The test runs as the adapters' author would run it: without the settings and fixtures of this repository."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_my_adapters.py"],
        cwd=written,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    counts = re.search(r"(\d+) passed, (\d+) skipped", done.stdout)
    assert counts is not None
    assert int(counts[1]) > 60
    assert int(counts[2]) == 4, "those of an engine that can be asked for something in the midst of a response"


@pytest.mark.usefixtures("adapters")
def test_a_dry_run_says_that_it_does_not_know_what_adapters_take(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    print_plan(small_run(tmp_path / "one", model, prompts, engine=SECTIONS["engine"]), resume=False)
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"# time: about training [\d.]+ s a step if every response", line) for line in lines)
    assert lines[-1] == "# what your engine will take is not known, and not counted"
    backend = SECTIONS["trainer"]["backend"]
    both = small_run(tmp_path / "two", model, prompts, engine=SECTIONS["engine"], trainer__backend=backend)
    print_plan(both, resume=False)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "# what your engine and your trainer will take is not known, and not counted"
    assert "nan" not in printed
    assert "# time" not in printed
    assert "# disk" not in printed


def takes_nothing() -> None:
    """A function that is no factory."""


def makes_no_engine(args: EngineArgs) -> str:
    return "an engine"


def makes_no_trainer(args: TrainerArgs, **others: object) -> None:
    return None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_engine", r"engine\.path 'my_engine' must be a dotted path to a function"),
        ("no_such_module.make", r"engine\.path 'no_such_module\.make': no module 'no_such_module' in "),
        ("tests.run.test_adapters.take_nothing", r"has no 'take_nothing'; did you mean 'takes_nothing'\?"),
        ("tests.run.test_adapters.takes_nothing", r"cannot be called with \(args\): too many"),
        (
            "tests.run.test_adapters.MODULES",
            r"engine\.path .* is of type dict, not a function",
        ),
    ],
)
def test_what_is_no_engine_factory_is_refused_before_the_run_has_a_directory(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, path: str, message: str
) -> None:
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, engine={"type": "adapter", "path": path})
    with pytest.raises(UserError, match=message):
        train(config, resume=False)
    assert not (tmp_path / "run").exists()


def test_what_is_no_trainer_factory_is_refused_before_the_run_has_a_directory(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    backend = {"type": "adapter", "path": "tests.run.test_adapters.makes_no_trainer", "options": {"args": 1}}
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, trainer__backend=backend)
    with pytest.raises(UserError, match=r"trainer\.backend\.path .* multiple values for argument 'args'"):
        train(config, resume=False)
    assert not (tmp_path / "run").exists()


def test_a_factory_that_makes_something_else_says_what(tiny_model: TinyModel, executor: Executor) -> None:
    config = AdapterEngineConfig(path="tests.run.test_adapters.makes_no_engine")
    with pytest.raises(UserError, match=r"made a str; it must make a tailrace\.engine\.base\.Engine"):
        make_engine(config, EngineArgs(model_dir=tiny_model("llama"), device="cpu", executor=executor))
    trainer = TrainerConfig(backend=AdapterTrainerBackend(path="tests.run.test_adapters.makes_no_trainer"))
    args = TrainerArgs(model_dir=tiny_model("llama"), config=trainer, temperature=1.0, total_updates=1, device="cpu")
    with pytest.raises(UserError, match=r"made a NoneType; it must make a tailrace\.trainer\.base\.Trainer"):
        make_trainer(args)


def test_the_working_directory_is_importable(
    tmp_path: Path, tiny_model: TinyModel, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lonely_engine.py").write_text("def make(args, size): return [size]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = AdapterEngineConfig(path="lonely_engine.make", options={"size": 3})
    with pytest.raises(UserError, match="made a list"):
        make_engine(config, EngineArgs(model_dir=tiny_model("llama"), device="cpu", executor=executor))


@pytest.mark.parametrize(("file", "told"), [("mine.py", "mine.py"), (None, "a notebook")])
def test_a_factory_of_the_program_that_runs_is_told_where_to_go(
    file: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ModuleType("__main__")
    if file is not None:
        program.__file__ = str(tmp_path / file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", program)
    says = (
        rf"engine\.path '__main__\.make' is of {told}, which runs here, and no other process can import that: put make "
        r"into a file of its own in the working directory, such as my_module\.py, and give my_module\.make$"
    )
    with pytest.raises(UserError, match=says):
        load_engine_factory(AdapterEngineConfig(path="__main__.make"))
    with pytest.raises(UserError, match=r"or Trainer\(recipe, reward=score\)$"):
        load_callable("rewards.grader.path", "__main__.score")

"""Algorithms that users write: the examples of docs/algorithms.md in whole runs, and early errors."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.table import REWARD, ROLLOUT, Cells, Compute, Serve, TableTask, actor, compute
from tailrace.api import Trainer
from tailrace.commands.dry_run import print_plan
from tailrace.config.algorithm import AdapterAlgorithmConfig, GrpoConfig
from tailrace.config.columns import ColumnKind
from tailrace.config.run import RunConfig
from tailrace.errors import AlgorithmError, ConfigError, NonFiniteError, QueueError, UserError, WorkerError
from tailrace.events import Event, read_events
from tailrace.run.train import train
from tailrace.tasks.base import Outputs, Task
from tailrace.tasks.context import TaskContext
from tailrace.trainer.backends.critic import Critic
from tailrace.trainer.base import UpdateResult
from tailrace.transfer.queue.base import Claim
from tests.conftest import TinyModel
from tests.helpers.local_workers import use_local_workers
from tests.helpers.runs import learned, small_run, steps_of, write_prompts

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
LIMIT_S = 120
SECTION: dict[str, Any] = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])["algorithm"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the page's files importable."""
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in FILES:
        sys.modules.pop(name, None)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run workers as tasks of this process, without Ray."""
    use_local_workers(monkeypatch)


def config(tmp_path: Path, model: Path, algorithm: dict[str, Any], name: str = "run", **changes: Any) -> RunConfig:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    return small_run(tmp_path / name, model, prompts, algorithm=algorithm, trainer__steps=2, **changes)


def adapter(name: str, **options: Any) -> dict[str, Any]:
    """The recipe's section for the algorithm `name` of this file."""
    return {"type": "adapter", "path": f"tests.run.test_algorithms.{name}", "group_size": 4, "options": options}


def spans(run: Path, task: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event.task == task]


@pytest.mark.usefixtures("module", "local")
def test_the_algorithm_of_the_page_trains_alike_in_both_placements(tmp_path: Path, tiny_model: TinyModel) -> None:
    learning = []
    for placement in ("colocated", "separated"):
        run = config(tmp_path, tiny_model("llama"), SECTION, placement, pipeline={"placement": placement})
        assert train(run, resume=False) == 0
        steps = steps_of(Path(run.output_dir))
        assert len(steps) == 2
        assert sum(event.samples or 0 for event in spans(Path(run.output_dir), "weights")) == 16
        assert all(0.2 < step.metrics["forking_tokens"] < 0.7 for step in steps)
        assert all(step.metrics["grad_norm"] > 0 for step in steps)
        learning.append([learned(step) for step in steps])
    assert learning[0] == learning[1]


@pytest.mark.usefixtures("module")
def test_a_run_of_the_pages_algorithm_is_resumed_with_what_its_tasks_have_written(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    run = config(tmp_path, tiny_model("llama"), SECTION, checkpoint={"every": 1, "keep": 5})
    train(run, resume=False)
    last = [learned(step) for step in steps_of(Path(run.output_dir))][-1]
    again = run.model_copy(update={"output_dir": str(tmp_path / "again")})
    train(again, resume=True, checkpoint=tmp_path / "run" / "checkpoints" / "step_000001")
    assert [learned(step) for step in steps_of(tmp_path / "again")] == [last]


@pytest.mark.usefixtures("module")
def test_the_advantages_of_the_page_differ_from_token_to_token() -> None:
    algorithm = make_algorithm(AdapterAlgorithmConfig.model_validate(SECTION))
    works = {task.name: task.work for task in algorithm.tasks}
    assert isinstance(works["advantage"], Compute)
    rows = [{"reward": reward, "response_mask": np.ones(3)} for reward in (0.0, 1.0)]
    low, high = (cells["advantages"] for cells in works["advantage"].function(rows))
    assert high[0] < high[1] < high[2] == pytest.approx(0.7071, abs=1e-3)
    np.testing.assert_allclose(low, -high)


def test_the_loss_of_the_page_keeps_the_contract(tmp_path: Path) -> None:
    """The test runs as the author of the algorithm would run it."""
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_my_algorithm.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"2\d passed, 3 skipped", done.stdout), "the skipped ones compare with a closed form"


@pytest.mark.usefixtures("module")
def test_a_dry_run_shows_an_algorithm_of_ones_own(
    tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    print_plan(config(tmp_path, tiny_model("llama"), SECTION), resume=False)
    assert "path: my_algorithm.ForkingTokens" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


PPO: dict[str, Any] = {"type": "ppo", "group_size": 4}


@pytest.mark.usefixtures("module", "local")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_critic_is_trained_beside_the_policy_in_both_placements(
    tmp_path: Path, tiny_model: TinyModel, streaming: bool
) -> None:
    losses = []
    for placement in ("colocated", "separated"):
        pipeline = {"placement": placement, "streaming": streaming}
        run = config(tmp_path, tiny_model("llama"), PPO, placement, pipeline=pipeline)
        assert train(run, resume=False) == 0
        directory = Path(run.output_dir)
        assert len(steps_of(directory)) == 2
        assert sum(event.samples or 0 for event in spans(directory, "values")) == 16
        updates = [event for event in spans(directory, "optimizer") if event.actor == "critic"]
        assert all(update.metrics["grad_norm"] > 0 for update in updates)
        losses.append([update.metrics["loss"] for update in updates])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.usefixtures("module", "local")
@pytest.mark.parametrize("placement", ["colocated", "separated"])
def test_a_critic_whose_updates_stay_non_finite_ends_the_run_with_its_evidence(
    tmp_path: Path, tiny_model: TinyModel, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(trainer: Critic) -> UpdateResult:
        trainer._evidence = {"loss": "nan"}
        raise NonFiniteError("the loss is nan")

    monkeypatch.setattr(Critic, "apply", apply)
    run = config(tmp_path, tiny_model("llama"), PPO, pipeline={"placement": placement})
    with pytest.raises(NonFiniteError, match=r"^critic: the loss is nan; the evidence is in .*evidence\.json"):
        train(run, resume=False)
    evidence = json.loads((Path(run.output_dir) / "evidence.json").read_text())
    assert evidence == {"policy": {}, "critic": {"loss": "nan"}}


@pytest.mark.usefixtures("module", "local")
@pytest.mark.parametrize("placement", ["colocated", "separated"])
def test_a_critic_is_in_a_checkpoint_and_goes_on_from_it(tmp_path: Path, tiny_model: TinyModel, placement: str) -> None:
    run = config(
        tmp_path,
        tiny_model("llama"),
        PPO,
        pipeline={"placement": placement},
        checkpoint={"every": 1, "keep": 5},
    )
    train(run, resume=False)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    assert (checkpoint / "models" / "critic" / "model.json").is_file()
    again = run.model_copy(update={"output_dir": str(tmp_path / "again")})
    train(again, resume=True, checkpoint=checkpoint)
    (step,) = steps_of(tmp_path / "again")
    assert learned(step) == pytest.approx(learned(steps_of(tmp_path / "run")[-1]), rel=1e-4)
    losses = [
        [event.metrics["loss"] for event in spans(tmp_path / name, "optimizer") if event.actor == "critic"]
        for name in ("run", "again")
    ]
    assert losses[1] == pytest.approx(losses[0][1:], rel=1e-4)


@pytest.mark.usefixtures("module")
def test_a_critic_has_one_worker(tmp_path: Path, tiny_model: TinyModel) -> None:
    cluster = {"pools": {"critic": {"workers": 2}}}
    run = config(tmp_path, tiny_model("llama"), PPO, pipeline={"placement": "separated"}, cluster=cluster)
    with pytest.raises(ConfigError, match=r"cluster.pools.critic has 2 workers, and one process trains a model; use 1"):
        train(run, resume=False)


@pytest.mark.usefixtures("module")
def test_a_loop_of_ones_own_trains_every_model_itself(tmp_path: Path, tiny_model: TinyModel) -> None:
    run = config(tmp_path, tiny_model("llama"), PPO, pipeline={"placement": "separated"})
    with pytest.raises(ConfigError, match=r"workers: 'critic' is not one of rollout, reward$"):
        Trainer(run).init_engines(workers=["rollout", "critic"])


class Plain(Grpo):
    """GRPO, as an adapter."""

    def __init__(self, group_size: int) -> None:
        super().__init__(GrpoConfig(group_size=group_size))

    def replaced(self, name: str, *tasks: TableTask) -> tuple[TableTask, ...]:
        """The table with `tasks` in the place of the task `name`."""
        return tuple(other for task in super().tasks for other in (tasks if task.name == name else (task,)))


def test_an_adapter_that_is_grpo_makes_the_run_of_grpo(tmp_path: Path, tiny_model: TinyModel) -> None:
    runs = {"ours": {"type": "grpo", "group_size": 4}, "theirs": adapter("Plain")}
    for name, algorithm in runs.items():
        train(config(tmp_path, tiny_model("llama"), algorithm, name), resume=False)
    ours, theirs = ([learned(step) for step in steps_of(tmp_path / name)] for name in runs)
    assert ours == theirs


class Judge(Task):
    """A task that writes the length of a response's text."""

    def __init__(self, context: TaskContext, task: TableTask) -> None:
        super().__init__(context, task.name)

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        return {row.id: {"judged": float(len(str(row.cells["response"])))} for row in claim.rows}


class Judged(Plain):
    """An algorithm with two rewards: one of a service in a pool of its own, and one of the grader."""

    @property
    def columns(self) -> dict[str, ColumnKind]:
        return {"judged": ColumnKind.FLOAT}

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        judge = TableTask(name="judge", reads=("response",), writes=("judged",), work=Serve(Judge), pool="judge")
        reads = ("reward", "judged", "response_mask")
        return self.replaced("advantage", judge, compute("advantage", self.judged, reads=reads, writes=("advantages",)))

    def judged(self, rows: Sequence[Cells]) -> list[Cells]:
        """The advantages of the sum of both rewards."""
        return super().advantages([{**row, "reward": row["reward"] + row["judged"]} for row in rows])


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("placement", ["colocated", "separated"])
def test_a_second_reward_is_a_service_in_a_pool_of_its_own(
    tmp_path: Path, tiny_model: TinyModel, placement: str
) -> None:
    changes: dict[str, Any] = {"pipeline": {"placement": placement}}
    if placement == "separated":
        changes["cluster"] = {"pools": {"judge": {"workers": 2}}}
    train(config(tmp_path, tiny_model("llama"), adapter("Judged"), **changes), resume=False)
    judged = spans(tmp_path / "run", "judge")
    assert sum(event.samples or 0 for event in judged) == 16
    workers = {event.worker for event in judged}
    assert workers == {""} if placement == "colocated" else workers <= {"judge-0", "judge-1"}
    assert len(steps_of(tmp_path / "run")) == 2


class Broken(Plain):
    """An algorithm whose advantages fail."""

    how: str

    def __init__(self, group_size: int, how: str) -> None:
        super().__init__(group_size)
        self.how = how

    def advantages(self, rows: Sequence[Cells]) -> list[Cells]:
        if self.how == "raises":
            raise ValueError("no such group")
        return [{"advantages": np.zeros(1, np.float32)}] if self.how == "few" else [{"other": 1.0} for _ in rows]


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("raises", AlgorithmError, r"task 'advantage' of the algorithm has failed: ValueError: no such group \(tests/"),
        ("few", AlgorithmError, r"returned cells for 1 rows, and it was called with 4; return one"),
        ("other", QueueError, r"advantages"),
    ],
)
def test_a_function_that_fails_ends_the_run_with_its_error(
    tmp_path: Path, tiny_model: TinyModel, how: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        train(config(tmp_path, tiny_model("llama"), adapter("Broken", how=how)), resume=False)


@pytest.mark.usefixtures("local")
def test_a_function_that_fails_in_a_worker_ends_the_run_with_its_error(tmp_path: Path, tiny_model: TinyModel) -> None:
    section = adapter("Broken", how="raises")
    with pytest.raises((AlgorithmError, WorkerError), match=r"ValueError: no such group"):
        train(config(tmp_path, tiny_model("llama"), section, pipeline={"placement": "separated"}), resume=False)


class Short(Plain):
    """An algorithm whose loss reads a column with too few numbers."""

    @property
    def columns(self) -> dict[str, ColumnKind]:
        return {"one": ColumnKind.FLOATS}

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        one = compute("one", self.one, reads=("response_ids",), writes=("one",))
        return self.replaced("actor", one, actor(self.loss, "one"))

    def one(self, rows: Sequence[Cells]) -> list[Cells]:
        """Write one number, however long the response is."""
        return [{"one": np.ones(1, np.float32)} for _ in rows]


class Unloved(Plain):
    """An algorithm whose loss raises."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        raise KeyError("token_weights")


class Uncounted(Plain):
    """An algorithm whose loss does not return the metric `tokens`."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        output = super().loss(inputs)
        return LossOutput(loss_sum=output.loss_sum, denominator=output.denominator, metrics={})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Short",
            r"column one has the shape \(1,\), and the response \d+ tokens; a column that a loss",
        ),
        ("Unloved", r"the loss of the algorithm has failed: KeyError: 'token_weights' \(tests/run/test_algorithms.py"),
        ("Uncounted", r"the loss of the algorithm returned no metric 'tokens'"),
    ],
)
def test_what_a_loss_cannot_use_or_say_ends_the_run_with_its_error(
    tmp_path: Path, tiny_model: TinyModel, name: str, says: str
) -> None:
    with pytest.raises(AlgorithmError, match=says):
        train(config(tmp_path, tiny_model("llama"), adapter(name)), resume=False)


class NoAlgorithm:
    """A class that is no algorithm."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size


class Larger(Plain):
    """An algorithm that changes the group size."""

    def __init__(self, group_size: int) -> None:
        super().__init__(group_size + 1)


class Unmakeable(Plain):
    """An algorithm whose code fails."""

    def __init__(self, group_size: int) -> None:
        super().__init__(group_size // 0)


class Idle(Plain):
    """An algorithm without a task that trains."""

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        return (ROLLOUT, REWARD)


class Unknown(Plain):
    """An algorithm that reads a column which does not exist."""

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        return self.replaced("actor", actor(self.loss, "token_weights"))


class Unwritten(Unknown):
    """An algorithm that reads a column of its own which no task writes."""

    @property
    def columns(self) -> dict[str, ColumnKind]:
        return {"token_weights": ColumnKind.FLOATS}


class Blind(Plain):
    """An algorithm whose policy is trained without the rewards."""

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        whole = actor(self.loss)
        return self.replaced("actor", replace(whole, reads=tuple(name for name in whole.reads if name != "reward")))


class Otherwise(Plain):
    """An algorithm that declares an existing column with another type."""

    @property
    def columns(self) -> dict[str, ColumnKind]:
        return {"reward": ColumnKind.TEXT}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (adapter("Plane"), r"has no 'Plane'; did you mean 'Plain'"),
        (adapter("Plain", beta=1), r"algorithm.path 'tests.run.test_algorithms.Plain' cannot be called with"),
        (adapter("NoAlgorithm"), r"made a NoAlgorithm; it must make a tailrace.algorithms.base.Algorithm"),
        (
            adapter("Unmakeable"),
            r"'tests.run.test_algorithms.Unmakeable' cannot be made: ZeroDivisionError",
        ),
        (adapter("Larger"), r"groups of 5, and algorithm.group_size is 4; have it keep the group_size"),
        (adapter("Idle"), r"with 0 tasks that train the policy; one task must do that"),
        (adapter("Unknown"), r"task 'actor' reads 'token_weights', which is no column of the queue"),
        (adapter("Unwritten"), r"task 'actor' reads 'token_weights', and no task writes it"),
        (adapter("Blind"), r"task 'actor' trains the policy and does not read reward; add them"),
        (adapter("Otherwise"), r"column 'reward' holds str, and there is one that holds float; rename it"),
    ],
)
def test_what_is_no_algorithm_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_model: TinyModel, section: dict[str, Any], says: str
) -> None:
    for refuse in (lambda run: train(run, resume=False), lambda run: print_plan(run, resume=False)):
        with pytest.raises(UserError, match=says):
            refuse(config(tmp_path, tiny_model("llama"), section))
        assert not (tmp_path / "run").exists()


def test_a_pool_that_no_task_is_in_is_refused(tmp_path: Path, tiny_model: TinyModel) -> None:
    run = config(
        tmp_path,
        tiny_model("llama"),
        adapter("Judged"),
        pipeline={"placement": "separated"},
        cluster={"pools": {"juge": {}}},
    )
    with pytest.raises(ConfigError, match=r"cluster.pools.juge is for no task .* did you mean 'judge'"):
        train(run, resume=False)
    assert not (tmp_path / "run").exists()


def test_a_table_is_an_algorithm_whatever_it_is_of() -> None:
    assert issubclass(Judged, Algorithm)
    assert make_algorithm(AdapterAlgorithmConfig.model_validate(adapter("Judged"))).pools() == (
        "rollout",
        "reward",
        "judge",
        "trainer",
    )

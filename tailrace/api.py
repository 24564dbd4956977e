"""The Python interface of Tailrace: train with a recipe, or use its engines in a training loop of one's own.

    Trainer(recipe).fit()            the run of `tailrace train`
    Trainer(recipe).init_engines()   the same workers without a trainer: see tailrace/run/own_loop.py

Source: the user-level interface of AsyncFlow (section 5.1). Nothing heavy is imported before one of the two is called.
"""

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.config.load import load_config, read_recipe
from tailrace.config.overrides import merged
from tailrace.config.run import RunConfig
from tailrace.config.written import written
from tailrace.errors import ConfigError
from tailrace.events import read_events
from tailrace.host.interrupt import Interrupt
from tailrace.prompts.given import prompts_section, written_rows
from tailrace.registers.events import EventKind
from tailrace.rewards.given import reward_section

if TYPE_CHECKING:
    from tailrace.run.own_loop import Engines

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The results of a run."""

    directory: Path
    """Directory of the run; see `RunDirectory`."""
    model: Path
    """Directory of the model, for `AutoModelForCausalLM.from_pretrained`."""
    report: Path
    """File of the report: one page with every plot."""
    metrics: Mapping[str, float]
    """Figures of the last training step."""
    evaluation: Mapping[str, float]
    """Figures of the last evaluation; empty where there was none."""


class Trainer:
    """A recipe, ready to be run: `Trainer("recipes/quickstart.yaml", ["trainer.steps=20"]).fit()`.

    Not to be confused with the backend that computes gradients, `tailrace.trainer.base.Trainer`.
    """

    def __init__(
        self,
        recipe: str | Path | Mapping[str, Any] | RunConfig,
        overrides: Sequence[str] = (),
        *,
        reward: Callable[..., Any] | None = None,
        prompts: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        """`recipe`: a YAML file, its contents, or a whole configuration. `overrides`: as on the command line.

        `reward`: the function that grades, in place of `rewards.grader`. It is any callable, called as one of `type:
        function` is. Graders are other processes: the objects that it uses are copied there in their present state.
        `prompts`: the rows of `prompts.source`, such as `[{"prompt": "1 + 1 =", "answer": "2"}]`. Both become part of
        the run, which can be resumed without this program.

        Raises:
            ConfigError: the recipe cannot be read, a key or a value is not valid, or `reward` cannot go to graders.
            PromptError: `prompts` are no rows.
        """
        if not isinstance(recipe, str | Path | Mapping | RunConfig):
            raise ConfigError(f"recipe is {recipe!r:.80}; expected the path of a YAML file, a mapping, or a RunConfig")
        given: dict[str, Any] = {}
        if reward is not None:
            given["rewards"] = {"grader": reward_section(reward)}
        if prompts is not None:
            given["prompts"] = {"source": prompts_section()}
        if isinstance(recipe, RunConfig) and not (given or overrides):
            self.config = recipe
        else:
            self.config = load_config(_with(recipe, given), overrides)
        answers = getattr(self.config.prompts.source, "answer_column", None)
        self._prompts = None if prompts is None else written_rows(prompts, answers)

    def fit(self, *, resume: bool = False) -> FitResult:
        """Train, export and report, as `tailrace train` does. Call it again with another output_dir, or with `resume`.

        It blocks. In a thread with a running event loop, such as a notebook's, the run has a thread of its own.

        `resume`: go on from the newest checkpoint in `config.output_dir` that the run has not left behind.

        Raises:
            KeyboardInterrupt: Ctrl-C (or SIGTERM, SIGHUP, in the main thread). A checkpoint of that moment was saved if
                there was something to save; `resume` goes on from it. A second Ctrl-C ends the process at once. In a
                notebook it only stops waiting for the run, which ends when it has saved.
            UserError: something about the input is wrong, and nothing was written.
            TailraceError: the run failed. Its last checkpoint is there.
        """
        from tailrace.run.directory import RunDirectory
        from tailrace.run.train import train

        interrupt = Interrupt()
        if _outside_of_loops(
            lambda: train(self.config, resume=resume, interrupt=interrupt, prompts=self._prompts), interrupt
        ):
            raise KeyboardInterrupt
        directory = RunDirectory(Path(self.config.output_dir))
        last = {event.task: event.metrics for event in read_events(directory.events)}
        return FitResult(
            directory=directory.path,
            model=directory.model,
            report=directory.report,
            metrics=last.get(EventKind.STEP, {}),
            evaluation=last.get(EventKind.EVALUATION, {}),
        )

    def init_engines(self, *, workers: Collection[str] | None = None) -> "Engines":
        """Start the queue and the recipe's workers except the trainer: the caller trains. Use it in a `with` block.

        `workers`: kinds to start: `rollout`, and optionally `reward` and `reference`; by default all that the algorithm
        needs. The caller does the work of the kinds that are left out, through `get_experience_data` and
        `put_experience_data`: the tasks `reward` and `advantage`, or `reference`.

        Raises:
            UserError: something about the input is wrong, `pipeline.placement` is not `separated`, or `output_dir`
                holds a run; nothing was written.
            TailraceError: a process cannot start.
        """
        from tailrace.run.own_loop import Engines

        return Engines(self.config, workers=workers, prompts=self._prompts)


def _with(
    recipe: str | Path | Mapping[str, Any] | RunConfig, given: Mapping[str, Any]
) -> Path | dict[str, Any] | Mapping[str, Any]:
    """The recipe to load: `recipe`, with the program's sections merged in."""
    if isinstance(recipe, RunConfig):
        return merged(written(recipe), given)
    if isinstance(recipe, Mapping):
        return merged(recipe, given) if given else recipe
    return merged(read_recipe(Path(recipe)), given) if given else Path(recipe)


def _outside_of_loops(work: Callable[[], T], interrupt: Interrupt) -> T:
    """Call `work`, which runs an event loop, and return its result.

    Where this thread runs a loop, use another thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # any error: the caller gets it
            done.set_exception(error)

    threading.Thread(target=run, name="fit", daemon=True).start()
    try:
        return done.result()  # training takes as long as it takes
    except KeyboardInterrupt:
        interrupt.ask()
        return done.result()

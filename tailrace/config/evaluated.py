"""The arguments of `tailrace eval`, as one configuration."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tailrace.config.base import path_of, path_text
from tailrace.config.generate import EvalConfig
from tailrace.config.load import load_as, read_recipe
from tailrace.config.shorthand import file_source, model_override, split_arguments, whole_model
from tailrace.config.task_source import task_sources
from tailrace.errors import ConfigError, UserError, quoted
from tailrace.registers import run_files

_ALL = "evaluation.max_prompts=null"
"""The bound of a recipe is for its own prompts."""


def evaluated_config(
    model: str, arguments: Sequence[str] = (), *, recipe: Path | None, prompts: Path | None, step: int | None
) -> EvalConfig:
    """Return the configuration of an evaluation of `model`, which may be the directory of a run.

    Args:
        model: a model, or the directory of a run.
        arguments: tasks, whose prompts are all answered, in place of the recipe's (see `task_sources`); and changes of
            the form `key=value`.
        recipe: a recipe of training or of an evaluation; by default that of the run.
        prompts: a file whose prompts are all answered, in place of the recipe's.
        step: the step of the run's checkpoint that is evaluated in place of the exported model.

    Raises:
        UserError: the arguments do not go together, or the run has no model; see also `load_as`.
    """
    tasks, overrides = split_arguments(arguments, EvalConfig.model_fields)
    chosen = model_override(model, EvalConfig.model_fields)
    run = _run_directory(model)
    if run is not None:
        recipe = recipe or run / run_files.CONFIG
        chosen = whole_model(path_text(run / run_files.MODEL))
        if step is None and not (run / run_files.MODEL).is_dir():
            raise UserError(f"{run} has exported no model yet; give the step of a checkpoint with --step")
    elif step is not None:
        raise UserError(
            f"--step {step} is for the directory of a run, and {model} is none: it has no {run_files.CONFIG}"
        )
    elif recipe is None and prompts is None and not tasks:
        raise ConfigError(
            f"{quoted(model)} is not the directory of a run, and there are no prompts: give that directory, tasks such "
            "as reasoning_gym:chain_sum or test.jsonl, or a training recipe with --recipe"
        )
    if tasks and prompts is not None:
        raise ConfigError(f"there are tasks and --prompts {prompts}; give the file as a task, too")
    if tasks:
        return load_as(EvalConfig, recipe, [chosen, *_of_tasks(tasks, recipe, overrides), *overrides])
    if prompts is None:
        return load_as(EvalConfig, recipe, [chosen, *overrides])
    if any(override.startswith("prompts.validation") for override in overrides):
        raise ConfigError(f"--prompts {prompts} takes the place of the recipe's prompts; leave prompts.validation out")
    whole = [f"prompts.source={file_source(prompts)}", "prompts.held_out=null", _ALL]
    config = load_as(EvalConfig, recipe, [chosen, *whole, *overrides])
    return config.model_copy(update={"prompts": config.prompts.model_copy(update={"validation": {}})})


def _run_directory(model: str) -> Path | None:
    """Return the directory of a run; None where `model` is none."""
    run = path_of(model, "the model", ConfigError)
    return run if (run / run_files.CONFIG).is_file() and not (run / "config.json").exists() else None


def _of_tasks(tasks: Sequence[str], recipe: Path | None, overrides: Collection[str]) -> list[str]:
    """Return the overrides that tasks stand for: their sets of prompts, and a grader where none is given.

    Raises:
        ConfigError: see `task_sources`; or nothing says how answers are graded.
    """
    values = {} if recipe is None else read_recipe(recipe)
    prompts = values.get("prompts")
    source = prompts.get("source") if isinstance(prompts, dict) else None
    sources = task_sources(tasks, source if isinstance(source, dict) else {})
    changes = ["prompts.source=null", "prompts.validation=null", _ALL]
    changes += [f"prompts.validation.{name}={json.dumps(section)}" for name, section in sources.items()]
    if "rewards" in values or any(override.startswith("rewards") for override in overrides):
        return changes
    return [*changes, f"rewards={json.dumps(_rewards(tasks, sources))}"]


def _rewards(tasks: Sequence[str], sources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the section `rewards` where none is given: problems of reasoning-gym come with their scorer."""
    for task, source in zip(tasks, sources.values(), strict=True):
        if source["type"] != "reasoning_gym":
            raise ConfigError(
                f"nothing says how the answers to {quoted(task)} are graded; give rewards.grader.type, such as math or "
                "exact, or a recipe with --recipe"
            )
    return {"grader": {"type": "reasoning_gym"}}

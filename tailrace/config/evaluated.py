"""The arguments of `tailrace eval`, as one configuration."""

import json
from collections.abc import Sequence
from pathlib import Path

from tailrace.config.base import expanded, path_text
from tailrace.config.generate import EvalConfig
from tailrace.config.load import load_as
from tailrace.config.shorthand import file_source, model_override
from tailrace.errors import ConfigError, UserError, quoted
from tailrace.registers import run_files


def evaluated_config(
    model: str, *, recipe: Path | None, prompts: Path | None, step: int | None, overrides: Sequence[str]
) -> EvalConfig:
    """Return the configuration of an evaluation of `model`, which may be the directory of a run.

    Args:
        recipe: a recipe of training or of an evaluation; by default that of the run.
        prompts: a file whose prompts are all answered, in place of the recipe's.
        step: the step of the run's checkpoint that is evaluated in place of the exported model.
        overrides: changes of the form `key=value`.

    Raises:
        UserError: the arguments do not go together, or the run has no model; see also `load_as`.
    """
    chosen = model_override(model, EvalConfig.model_fields)
    try:
        run = Path(expanded(model))
    except ValueError as error:
        raise ConfigError(f"the model {error}") from None
    is_run = (run / run_files.CONFIG).is_file() and not (run / "config.json").exists()
    if is_run:
        recipe = recipe or run / run_files.CONFIG
        chosen = f"model={{path: {json.dumps(path_text(run / run_files.MODEL))}, revision: null}}"
        if step is None and not (run / run_files.MODEL).is_dir():
            raise UserError(f"{run} has exported no model yet; give the step of a checkpoint with --step")
    elif step is not None:
        raise UserError(
            f"--step {step} is for the directory of a run, and {model} is none: it has no {run_files.CONFIG}"
        )
    elif recipe is None and prompts is None:
        raise ConfigError(
            f"{quoted(model)} is not the directory of a run, and there are no prompts: give that directory, a file "
            "with --prompts, or a training recipe with --recipe"
        )
    if prompts is None:
        return load_as(EvalConfig, recipe, [chosen, *overrides])
    if any(override.startswith("prompts.validation") for override in overrides):
        raise ConfigError(f"--prompts {prompts} takes the place of the recipe's prompts; leave prompts.validation out")
    whole = [f"prompts.source={file_source(prompts)}", "prompts.held_out=null"]
    config = load_as(EvalConfig, recipe, [chosen, *whole, *overrides])
    return config.model_copy(update={"prompts": config.prompts.model_copy(update={"validation": {}})})

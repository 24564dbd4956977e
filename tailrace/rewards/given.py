"""A reward function that a program gives: `Trainer(recipe, reward=f)`.

Dill writes the function into the configuration, since graders are other processes, maybe on other machines, and a
resumed run needs it again. Objects of a module are stored by name. All others are stored whole: closures, lambdas,
functions and classes of a notebook.
"""

import base64
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tailrace.config.rewards import MAX_PICKLED_CHARS, GivenReward
from tailrace.errors import ConfigError, UserError, quoted
from tailrace.host.user_code import describe
from tailrace.rewards.arguments import NAMES, asked_for


def reward_section(function: Callable[..., Any]) -> dict[str, Any]:
    """The section `rewards.grader` of a recipe for a function of this program.

    Raises:
        ConfigError: it is no function, or it uses something that cannot go to another process.
    """
    if not callable(function):
        raise ConfigError(f"reward is {quoted(function)}; expected a function, as in Trainer(recipe, reward=score)")
    name = str(getattr(function, "__qualname__", type(function).__name__))[:100]
    section = {"type": "given", "name": name, "python": _python(), "pickled": _pickled(name, function)}
    asked_for(GivenReward.model_validate(section), function, "rewards.grader", NAMES)
    return section


def given_function(config: GivenReward) -> Callable[..., Any]:
    """Read the function that `reward_section` wrote. Its modules are searched where the program had them.

    Raises:
        UserError: another version of Python has written it, or something that it uses is missing.
    """
    if config.python != _python():
        raise UserError(
            f"reward {config.name!r} was given by a program of Python {config.python}, and this is {_python()}: use "
            "that one, or give it again with Trainer(recipe, reward=…)"
        )
    import dill

    try:
        directories, code = dill.loads(base64.b64decode(config.pickled))
        sys.path.extend(directory for directory in directories if directory not in sys.path)
        function: Callable[..., Any] = dill.loads(code)
    except Exception as error:  # unpickling imports a user's modules, which may raise anything
        raise UserError(f"reward {config.name!r} cannot be made: {describe(error)}") from error
    return function


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _pickled(name: str, function: Callable[..., Any]) -> str:
    import dill

    program = getattr(sys.modules["__main__"], "__file__", None)
    directories = [os.getcwd(), *([str(Path(program).resolve().parent)] if program else [])]
    try:
        code = dill.dumps((directories, dill.dumps(function, recurse=True)))
    except Exception as error:  # pickling a user's objects may raise anything
        raise ConfigError(
            f"reward {name!r} cannot go to graders, which are other processes: {describe(error)}; make what it needs "
            "inside of it, or put it into a module"
        ) from None
    text = base64.b64encode(code).decode()
    if len(text) > MAX_PICKLED_CHARS:
        raise ConfigError(
            f"reward {name!r} takes {len(text) / 2**20:.1f} MiB with all that it uses, and may take "
            f"{MAX_PICKLED_CHARS / 2**20:g}; load what is large inside of it, or put it into a module"
        )
    return text

"""The user's own code: any callable by its dotted path, and the description of its errors. Imports no torch.

User code may raise anything, also errors whose text cannot be read. Describing them raises nothing.
"""

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tailrace.errors import TailraceError, UserError, did_you_mean, one_line, printable, quoted

T = TypeVar("T")

_MAX_CHARS = 500
"""The most characters of a line."""
_MAX_TRACEBACK_CHARS = 4000
_MAX_FRAMES = 20
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def load_callable(key: str, path: str) -> Callable[..., Any]:
    """Import `package.module.name`; the working directory is importable.

    Args:
        key: the key of the recipe, for messages.
        path: the value of the key.

    Raises:
        UserError: one line that says which part of the path is wrong.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise UserError(
            f"{key} {quoted(path)} must be a dotted path to a function, such as my_module.my_function for that of "
            "my_module.py in the working directory"
        )
    if module_name == "__main__":
        program = getattr(sys.modules["__main__"], "__file__", None)
        or_given = f"; or Trainer(recipe, reward={name})" if key.startswith("rewards.") else ""
        raise UserError(
            f"{key} {path!r} is of {_short(program) if program else 'a notebook'}, which runs here, and no other "
            f"process can import that: put {name} into a file of its own in the working directory, such as "
            f"my_module.py, and give my_module.{name}{or_given}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(module_name, key, path)
    if not hasattr(module, name):
        hint = did_you_mean(name, dir(module))
        raise UserError(f"{key} {path!r}: module {module_name!r} has no {name!r}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{key} {path!r} is of type {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def load_factory(key: str, path: str, *arguments: str, **options: Any) -> Callable[..., Any]:
    """Load the factory of an adapter, and check that it can be called with these; see `load_callable`, `check_call`.

    Raises:
        UserError: it is not there, or cannot be called so.
    """
    factory = load_callable(key, path)
    check_call(key, path, factory, *arguments, **options)
    return factory


def check_made(key: str, path: str, made: object, kind: type[T]) -> T:
    """Return what a factory has made, which must be of this kind.

    Raises:
        UserError: it is of another kind.
    """
    if not isinstance(made, kind):
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        raise UserError(f"{key} {path!r} made a {type(made).__name__}; it must make a {wanted}")
    return made


def check_call(key: str, path: str, function: Callable[..., Any], *arguments: str, **keywords: Any) -> None:
    """Check that `function` is not async and takes these keywords, and a positional argument for each of `arguments`.

    Raises:
        UserError: it is async, or does not take them.
    """
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key} {path!r} is an async function; it must be a plain one")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin may have none
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        call = ", ".join((*arguments, *(f"{name}=" for name in keywords)))
        raise UserError(f"{key} {path!r} cannot be called with ({call}): {error}") from None


def _import(module_name: str, key: str, path: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{key} {path!r}: no module {error.name!r} in {os.getcwd()} or among the installed ones"
            ) from None
        raise _unimportable(key, path, error) from error
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise _unimportable(key, path, error) from error


def _unimportable(key: str, path: str, error: BaseException) -> UserError:
    return UserError(f"{key} {path!r} cannot be imported: {describe(error)}")


@contextmanager
def making(what: str, raises: type[TailraceError]) -> Iterator[None]:
    """Let the user's code make `what` in the block: an error of that code becomes one line. Tailrace's own pass."""
    try:
        yield
    except TailraceError:
        raise
    except Exception as error:  # user code may raise anything
        raise raises(f"{what} cannot be made: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Return `ErrorName: message (file, line n)` on one line of bounded length. The file is the user's, if any."""
    name, message = re.sub(r"[^\w.]", "_", type(error).__name__), _message(error)
    text = name if message == name else f"{name}: {message}"
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]}…"
    return _writable(f"{text}{_place(error)}")


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.msg:
        return str(error.msg)  # its text has the place, too
    try:
        return one_line(error)
    except BaseException as problem:  # the user's own __str__ raised it
        return f"its text cannot be had ({type(problem).__name__})"


def _place(error: BaseException) -> str:
    """The last line of the user's own code that the error has passed, in parentheses; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_short(error.filename)}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f" ({_short(own[-1].filename)}, line {own[-1].lineno})" if own else ""


def _is_users(filename: str) -> bool:
    """Whether a file is neither Tailrace's nor Python's import system; it may be a library's."""
    return not filename.startswith((_OURS, "<frozen")) and not filename.endswith("/importlib/__init__.py")


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def user_traceback(error: BaseException) -> str | None:
    """The traceback without the lines of Tailrace; None if no other lines are left."""
    whole = traceback.TracebackException.from_exception(error)
    chain: traceback.TracebackException | None = whole
    while chain is not None:
        frames = [frame for frame in chain.stack if _is_users(frame.filename)][-_MAX_FRAMES:]
        chain.stack = traceback.StackSummary.from_list(frames)
        chain = chain.__cause__ or chain.__context__
    if not whole.stack:
        return None
    text = "".join(whole.format())
    return _writable(text if len(text) <= _MAX_TRACEBACK_CHARS else f"…{text[-_MAX_TRACEBACK_CHARS:]}")


def _writable(text: str) -> str:
    """Make a text fit for terminals and messages, which, unlike Python, refuse halves of surrogate pairs."""
    return printable(text)

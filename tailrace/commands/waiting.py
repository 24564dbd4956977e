"""What is told on a terminal while a command works: one line on standard error, which goes when it has ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Tell = Callable[[str], None]
"""Takes what is done now."""


@contextmanager
def waiting() -> Iterator[Tell]:
    """Yield what shows the line; where standard error is no terminal, nothing is shown."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(f"{text} …")

"""What `tailrace generate` takes beside `key=value`: options and prompts that stand for keys."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


def split_arguments(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Prompts, and `key=value` overrides. What has no key of letters, digits, `_` and `.` is a prompt."""
    texts: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        (overrides if _OVERRIDE.match(argument) else texts).append(argument)
    return texts, overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorthand:
    """Options of the command line that set keys; None and False set nothing."""

    prompts: Path | None
    samples: int | None
    raw: bool
    order: str | None

    def overrides(self) -> Iterator[str]:
        """The keys that the options stand for."""
        if self.prompts is not None:
            kind = "parquet" if self.prompts.suffix == ".parquet" else "jsonl"
            path = json.dumps(str(self.prompts))
            yield f"prompts.source={{type: {kind}, path: {path}, answer_column: null}}"
        if self.samples is not None:
            yield f"samples={self.samples}"
        if self.raw:
            yield "prompts.chat_template=false"
        if self.order is not None:
            yield f"order={self.order}"

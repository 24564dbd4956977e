"""Figures about files, imports, functions and pages, and the rules that they break.

`python -m tools.layout` prints one line for each figure, and exits with 1 where a rule is broken.
"""

import ast
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from tools.layers import ROOMS, room_of, type_only

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tailrace"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
MAX_COMPLEXITY = 10
"""A function with a larger cyclomatic complexity (McCabe's, as ruff counts it) counts as complicated."""


class Figure(NamedTuple):
    """A count, and the most that its rule allows."""

    name: str
    value: float
    most: float | None
    """The most that the rule allows; None where there is no rule."""
    which: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether the value is above what its rule allows."""
        return self.most is not None and self.value > self.most


def figures() -> Iterator[Figure]:
    """Yield all figures."""
    files = sorted(PACKAGE.rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    loose = [path.name for path in PACKAGE.glob("*.py")]
    yield Figure("loose files at the root", len(loose), 8, " ".join(sorted(loose)))
    cycles = list(_folder_cycles(trees))
    yield Figure("folder cycles", len(cycles), 0, "; ".join(cycles))
    ruleless = [str(path.relative_to(ROOT)) for path in files if not _has_rule(path)]
    yield Figure("files with no import rule", len(ruleless), 0, " ".join(ruleless))
    undocumented = _ruff("D100,D101,D102,D103,D104")
    yield Figure("public names without a docstring", len(undocumented), 0, " ".join(undocumented[:5]))
    lengths = sorted(length for tree in trees.values() for length in _function_lengths(tree))
    yield Figure("lines of a function, median", statistics.median(lengths), 8)
    yield Figure("lines of a function, longest", lengths[-1], 60)
    complicated = _ruff("C901")
    share = 100 * len(complicated) / len(lengths)
    yield Figure(f"% of functions with a complexity above {MAX_COMPLEXITY}", round(share, 2), 1)
    for page in PAGES:
        words = [len(sentence.split()) for sentence in sentences(page.read_text(encoding="utf-8"))]
        yield Figure(f"words a sentence, {page.relative_to(ROOT)}", round(statistics.fmean(words or [0]), 1), None)


def _has_rule(path: Path) -> bool:
    """Return whether a file's room has a rule in every folder with rules that the file is in."""
    own = path.relative_to(ROOT)
    rooms = [(room_of(own, folder), rules) for folder, rules in ROOMS.items() if own.is_relative_to(folder)]
    return all(room == "__init__" or room in rules for room, rules in rooms)


def _folder_cycles(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield the rooms of each folder that import each other, whatever the rules say.

    Two files of one folder may name each other's types (`if TYPE_CHECKING`); folders may not.
    """
    modules = {_module(path): path for path in trees}
    edges = {
        module: {to for to, is_type in _imported(trees[path], modules) if not (is_type and to[:-1] == module[:-1])}
        for module, path in modules.items()
    }
    folders = {module[:depth] for module in modules for depth in range(1, len(module))}
    for folder in sorted(folders):
        depth = len(folder)
        graph: dict[str, set[str]] = {}
        for module, targets in edges.items():
            if module[:depth] == folder and len(module) > depth:
                inside = {to[depth] for to in targets if to[:depth] == folder and len(to) > depth}
                graph.setdefault(module[depth], set()).update(inside - {module[depth]})
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            yield f"{'/'.join(folder)}: {' → '.join(reversed(error.args[1]))}"


def _module(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imported(tree: ast.Module, modules: dict[tuple[str, ...], Path]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the modules that a file imports, and whether each is for types alone."""
    hidden = type_only(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((tuple(alias.name.split(".")), id(node) in hidden) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = tuple((node.module or "").split("."))
            for alias in node.names:
                module = (*package, alias.name) if (*package, alias.name) in modules else package
                yield module, id(node) in hidden


def _function_lengths(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def _ruff(rules: str) -> list[str]:
    """Return the places where `rules` are broken, whatever rules the project selects."""
    complexity = f"lint.mccabe.max-complexity={MAX_COMPLEXITY}"
    command = [sys.executable, "-m", "ruff", "check", "--select", rules, "--config", complexity]
    done = subprocess.run(
        [*command, "--output-format", "json", "--exit-zero", str(PACKAGE)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    return [f"{Path(each['filename']).relative_to(ROOT)}:{each['location']['row']}" for each in found]


def sentences(page: str) -> list[str]:
    """Return the sentences of a page in Markdown, without code, tables, headings or pictures."""
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if not re.match(r"\s*(\||#|    |!\[)", line)]
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    cut = [re.split(r"(?<=[.!?:])\s+(?=[A-Z`\[*])", " ".join(text.split())) for text in paragraphs]
    return [sentence for part in cut for sentence in part if re.search(r"\w", sentence)]


def main() -> int:
    """Print the figures; return 1 where a rule is broken."""
    broken = False
    for figure in figures():
        rule = "" if figure.most is None else f" (at most {figure.most:g})"
        mark = "BROKEN " if figure.is_broken else ""
        which = f": {figure.which}" if figure.is_broken and figure.which else ""
        print(f"{mark}{figure.name}: {figure.value:g}{rule}{which}")
        broken |= figure.is_broken
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())

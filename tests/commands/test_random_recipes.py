"""A random recipe either dry-runs, or is refused in one line that names a key, and nothing is written.

Recipes are made from the schemas, so that new keys are included. Each is a correct recipe with up to three changes. A
change is to a key of any section and variant: to a value at or beyond its bounds, of another type, without a value or
without an end. It may also be to an unknown key or type, or to a whole section.
"""

import math
import random
import re
import signal
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tailrace.commands import this_machine
from tailrace.config.base import Config
from tailrace.config.places import Place, places
from tailrace.config.recipe_text import write_yaml
from tailrace.config.run import RunConfig
from tests.config.test_places import put, sections
from tests.conftest import Command, TinyModel
from tests.helpers.effort import effort
from tests.helpers.runs import write_prompts

SEED = 7
RECIPES = effort(200, 80)
LIMIT_S = 60

SECTIONS = list(sections(Place(schema=RunConfig)))
NAMES = {place.key.rpartition(".")[2] for place in places(Place(schema=RunConfig)) if place.key}
NUMBERS: list[Any] = [0, 1, -1, 3, 7, 64, 2**31, 2**63, -(2**63), 10**30, 10**400]
NUMBERS += [0.0, -0.0, 0.5, 1e-300, 1e308, -1e308, math.nan, math.inf, -math.inf]
TEXTS: list[Any] = [
    "",
    " ",
    "1",
    "1e-5",
    "true",
    "null",
    "x",
    "é\u202e\U0001f600",
    "\x1b[31m",
    "a\nb",
    "\u2028",
    "${seed}",
]
TEXTS += [
    "${nope}",
    "${",
    r"\${x}",
    "~",
    "~nobody-at-all",
    "../x",
    "/proc/x",
    "/dev/null",
    "x" * 5000,
    "..",
    "%s{}",
    "*",
]
TEXTS += ["https://a:b@c", "\0", "/"]
LISTS: list[Any] = [[], [1], ["a"], [[]], [None], [1.5, 2], list(range(3000))]
MAPPINGS: list[Any] = [{}, {"a": 1}, {"type": "x"}, {"type": None}, {"": 1}, {"a": {"b": [{}]}}]
ODD = [None, True, False, *NUMBERS, *TEXTS, *LISTS, *MAPPINGS]


def fitting(schema: type[Config], name: str, rng: random.Random) -> Any:
    """A value at, within or just beyond the bounds of a key, one of its choices, or its default."""
    known = schema.model_json_schema()["properties"][name]
    forms = [known, *known.get("anyOf", ()), *(form.get("items", {}) for form in (known, *known.get("anyOf", ())))]
    values: list[Any] = []
    for form in forms:
        values += form.get("enum", [])
        for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(limit := form.get(bound), int | float):
                values += [limit, limit + 1, limit - 1, limit // 2, limit * 2]
    values.append(known.get("default"))
    value = rng.choice(values)
    return [value] if rng.random() < 0.1 else value


def change(values: Any, rng: random.Random) -> tuple[Any, str]:
    """Change one key of `values`. Return the changed values and the key's name."""
    place, path, tags = rng.choice(SECTIONS)
    assert place.schema is not None
    if rng.random() < 0.9:
        for where, tag in tags:
            values = put_type(
                values, where, tag if rng.random() < 0.97 else rng.choice(["", "x", None, 5, tag.upper()])
            )
    kind = rng.random()
    name = rng.choice(sorted(place.keys))
    if kind < 0.08:
        name = rng.choice([name + "x", name[:-1] or "q", name.upper(), "\x1b[0m", "", "a.b", "x" * 300, "lr", "n"])
        return put(values, (*path, name), rng.choice(ODD)), name
    if kind < 0.14 and path:
        return put(values, path, rng.choice(ODD)), place.key.rpartition(".")[2]
    value = fitting(place.schema, name, rng) if kind < 0.75 else rng.choice(ODD)
    return put(values, (*path, name), value), name


def put_type(values: Any, where: tuple[Any, ...], tag: object) -> Any:
    """Set the `type` of a section. The section loses its keys if that is another type, since types differ in keys."""
    section = values
    for part in where:
        section = section.get(part) if isinstance(section, dict) else None
    old = section if isinstance(section, dict) and section.get("type") == tag else {}
    return put(values, where, {**old, "type": tag})


def random_recipe(right: Any, rng: random.Random) -> tuple[Any, list[str]]:
    """A recipe, and the names of its changed keys."""
    values, names = right, []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        with suppress(TypeError, AttributeError):  # an earlier change has replaced the section
            values, name = change(values, rng)
            names.append(name)
    return values, names


def fault_of(done: subprocess.CompletedProcess[str], names: list[str]) -> str:
    """The fault in how a command ended; empty if there is none."""
    said = done.stderr.splitlines()
    if done.returncode == 0:
        return "" if not said and "# memory: about" in done.stdout else "it is accepted, and says something else"
    if done.returncode not in (1, 2) or done.stdout or len(said) != 1:
        return f"exit code {done.returncode}, {len(said)} lines"
    if not said[0].isprintable() or len(said[0]) > 1500:
        return f"a line of {len(said[0])} characters"
    own = (rf"(?<!\w){re.escape(name)}(?!\w)" for name in names if name)
    keys = (rf"\b{name}\b" for name in NAMES if len(name) > 3)
    return "" if any(re.search(pattern, said[0]) for pattern in (*own, *keys)) else "no key"


@contextmanager
def in_time() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError(f"it takes more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in directory.rglob("*"):
        stat = path.lstat()
        found[str(path)] = (stat.st_size, stat.st_mtime_ns if path.is_file() else 0)
    return found


@pytest.mark.filterwarnings("ignore::tailrace.errors.TailraceWarning")
def test_a_recipe_dry_runs_or_is_refused_in_one_line_that_names_a_key(
    tmp_path: Path, tiny_model: TinyModel, tailrace_here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "PROBE", 8)  # the machine's speed does not matter
    monkeypatch.chdir(tmp_path)
    right = {
        "output_dir": "run",
        "model": {"path": str(tiny_model("llama"))},
        "prompts": {"source": {"type": "jsonl", "path": str(write_prompts(tmp_path / "p.jsonl"))}, "held_out": 4},
        "rewards": {"grader": {"type": "exact"}},
        "algorithm": {"group_size": 4},
        "sampling": {"max_new_tokens": 12},
        "engine": {"type": "native", "dtype": "float32", "kv_cache_gib": 0.01},
        "trainer": {"steps": 4, "train_batch_size": 8, "precision": "fp32"},
    }
    recipe = tmp_path / "recipe.yaml"
    accepted, wrong = 0, []
    for number in range(RECIPES):
        values, names = random_recipe(right, random.Random(f"{SEED}-{number}"))
        recipe.write_bytes(write_yaml(values).encode())
        before = listing(tmp_path)
        try:
            with in_time():
                done = tailrace_here("train", "recipe.yaml", "--dry-run")
            fault = fault_of(done, names) or ("something is written" if listing(tmp_path) != before else "")
            accepted += done.returncode == 0
        except Exception as error:  # so that all faults are shown at once
            fault = "".join(traceback.format_exception(error)[-3:])
        if fault:
            wrong.append(f"recipe {number}: {fault}\n{done.stderr[-2000:]}\n{write_yaml(values)[:2000]}")
    assert wrong == [], "\n\n".join(wrong)
    assert RECIPES / 10 < accepted < RECIPES * 9 / 10, accepted

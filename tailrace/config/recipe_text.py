"""The text of recipes: a part of YAML with only one reading, and how values are written so that they can be read again.

Refused, since their effect is seldom meant or they cannot be written back: duplicate keys, keys that are no text, tags,
aliases, several documents. Numbers are decimal: `010` and `1:30`, which YAML 1.1 reads as 8 and 90, are texts. Dates
are texts, too.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

MAX_CHARS = 2**20
"""Maximum number of characters of a recipe."""
MAX_DEPTH = 64
"""Maximum depth of mappings and lists, in recipes and in cells of prompts; no key of a schema lies so deep."""

_TAG = "tag:yaml.org,2002:"
_NUMBERS = {
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))\Z"
    ),
}
"""The patterns of numbers. They include 1e-5, which YAML 1.1 takes for a text."""


class RecipeSyntaxError(ValueError):
    """Raised where a text is not the YAML of recipes; the message is one line."""


def read_yaml(text: str) -> Any:
    """Return the mapping, list, text, number or truth value that `text` holds; None where it is empty.

    Raises:
        RecipeSyntaxError: `text` holds something else, or more than one value.
    """
    if len(text) > MAX_CHARS:
        raise RecipeSyntaxError(f"it has more than the {MAX_CHARS} characters that a recipe may have")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark and "\n" in text.strip() else ""
        problem = "there is a second document" if error.problem == "but found another document" else error.problem
        raise RecipeSyntaxError(f"{where}{problem}") from None
    except yaml.reader.ReaderError as error:
        raise RecipeSyntaxError(f"the character {chr(error.character)!a} cannot be in YAML as it is") from None
    except (ValueError, OverflowError):  # raised by PyYAML itself
        raise RecipeSyntaxError("an escape in quotes, such as \\U…, is that of no character") from None
    return value


def drops_a_comment(text: str) -> bool:
    """Return whether YAML takes the end of `text` for a comment."""
    node = _Loader(text).get_single_node()
    return "#" in text[node.end_mark.index if node else 0 :]


def write_yaml(values: Mapping[str, Any], *, leaves_in_line: bool = False) -> str:
    """Return the text from which `read_yaml` makes `values`. `leaves_in_line`: mappings and lists without others within
    are written in one line, as far as it has room."""
    flow = None if leaves_in_line else False
    return yaml.dump(
        values,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=120 if leaves_in_line else None,
    )


def in_yaml(value: Any, limit: int = 100) -> str:
    """Return `value` as a recipe may have it, on one line without control characters, cut off at `limit` characters.

    Texts are in quotes. The result is for messages: a value that YAML does not have is written as Python does.
    """
    text = _flow(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _flow(value: Any) -> str:
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case float() if not math.isfinite(value):
            return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
        case Mapping():
            return "{" + ", ".join(f"{_flow_key(key)}: {_flow(entry)}" for key, entry in value.items()) + "}"
        case list() | tuple():
            return f"[{', '.join(map(_flow, value))}]"
    return repr(value)


def _flow_key(key: Any) -> str:
    return key if isinstance(key, str) and re.fullmatch(r"[A-Za-z_][\w.-]*", key) else repr(key)


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _problem(event, "an alias, which begins with *, is not possible; name a key, as in ${trainer.steps}")
        if getattr(event, "tag", None) is not None:
            raise _problem(event, "a tag, which begins with !, is not possible; leave it out")
        if self.depth == MAX_DEPTH:
            raise _problem(event, f"there are more than {MAX_DEPTH} mappings and lists within one another")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != f"{_TAG}str":
                raise _problem(key, f"the key {_source(key)} is no text; put it in quotes")
            if key.value in seen:
                raise _problem(key, f"the key {_source(key)} is there twice; remove one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _problem(place: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def _source(key: Any) -> str:
    return f"{key.value!a:.60}" if isinstance(key, yaml.ScalarNode) else f"that is a {key.id}"


def _integer(loader: _Loader, node: Any) -> int:
    try:
        return int(node.value.replace("_", ""))
    except ValueError:
        raise _problem(node, f"the number {node.value:.20}… has {len(node.value)} digits") from None


def _set_up() -> None:
    """Restrict the loader to these resolvers, and let the dumper quote what they, or YAML 1.1, would take for something
    else."""
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers
    kept = {f"{_TAG}bool", f"{_TAG}null"}
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag in kept] for first, known in resolvers.items()
    }
    for kind, pattern in _NUMBERS.items():
        for cls in (_Loader, _Dumper):
            cls.add_implicit_resolver(f"{_TAG}{kind}", pattern, list("-+.0123456789"))
    _Loader.add_constructor(f"{_TAG}int", _integer)


_set_up()

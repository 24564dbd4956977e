"""Explanations of pydantic's errors in one line that names the key and the fix."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from pydantic_core import ErrorDetails

from tailrace.config.base import Config
from tailrace.config.other_names import called_here
from tailrace.config.places import Place, at, named_places, places
from tailrace.config.recipe_text import in_yaml
from tailrace.errors import did_you_mean, nearest, quoted

Shown = Callable[[Any, str], Any]
"""A function of a value and its name that returns what may be shown of the value: secrets may not."""


_UNQUOTED = (
    "write it without quotes, powers of ten with digits alone (1e-5), and one from the environment as "
    "${oc.decode:${oc.env:NAME}}"
)
_EXPECTED = {
    "int_type": "expected an integer",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
}
_SAID = (
    (r"^(Input should be )a valid dictionary( or instance of \w+)?", r"\1a mapping"),
    (r"^(Input should be )a valid boolean", r"\1true or false"),
    (r"^(Input should be )a valid (list|tuple)", r"\1a list"),
    (r"^(Input should be )a valid string", r"\1a text"),
    (r"^(String|List|Tuple|Dictionary) should have", "It should have"),
    (r" after validation, not", ", not"),
    (r"\bNone\b", "null"),
    (r"\bTrue\b", "true"),
    (r"\bFalse\b", "false"),
)
"""Patterns of pydantic's messages, which use Python's words, and their replacements in YAML's words."""


def explain(root: type[Config], problems: Sequence[ErrorDetails], shown: Shown) -> str:
    """Return the problem to mend first, and the number of others."""
    # a mistake in a part causes a second one in its whole: a list is called too short where one of its items is refused
    wholes = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    problems = [problem for problem in problems if problem["loc"] not in wholes]
    order = {"extra_forbidden": 0, "missing": 2}  # a misspelt key leaves another key missing
    first = min(problems, key=lambda problem: order.get(problem["type"], 1))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{_explain(root, first, shown)}{more}"


def _explain(root: type[Config], problem: ErrorDetails, shown: Shown) -> str:
    location, kind, message = problem["loc"], problem["type"], problem["msg"]
    place = at(root, location)
    key, value = readable(place.key), in_yaml(shown(problem["input"], _last(place.key)))
    match kind:
        case "extra_forbidden":
            return _unknown_key(root, location, problem["input"], shown)
        case "missing":
            return f"{key} is required and missing"
        case "union_tag_not_found":
            return f"{key}.type is required: one of {', '.join(map(repr, place.variants))}"
        case "union_tag_invalid":
            context = problem["ctx"]
            return f"{key}.type is {in_yaml(shown(context['tag'], 'type'))}; expected one of {context['expected_tags']}"
        case "value_error":
            message = message.removeprefix("Value error, ")
            return f"{key} {message}" if key else message
    if hint := _meant(place, kind, problem["input"], shown):
        return f"{key} is {value}; {hint}"
    for pattern, said in _SAID:
        message = re.sub(pattern, said, message)
    near = ""
    if kind == "literal_error" and isinstance(problem["input"], str):
        near = did_you_mean(problem["input"], re.findall("'([^']*)'", problem["ctx"]["expected"]))
    return f"{key} is {value}: {message[0].lower()}{message[1:]}{near}"


def readable(key: str) -> str:
    """Return a key as it is where it can be read as a word, otherwise as Python writes it."""
    return key if key.isprintable() and len(key) <= 100 else quoted(key)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _meant(place: Place, kind: str, value: Any, shown: Shown) -> str:
    """Return how to write a value that has the wrong form; empty where that is not known."""
    key = readable(place.key)
    if kind in ("tuple_type", "list_type") and isinstance(value, str | int | float):
        entry = value if isinstance(value, str) else in_yaml(value)
        may_be_shown = shown(value, _last(place.key)) == value and readable(entry) == entry
        return f"expected a list: {key}=[{entry if may_be_shown else '…'}]"
    if kind in _EXPECTED and isinstance(value, str) and _is_scalar(value):
        return f"{_EXPECTED[kind]}, not the text of one; {_UNQUOTED}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        if isinstance(value, str) and value in place.variants:
            return f"did you mean {key}.type={value}?"
        if place.variants:
            return f"expected keys, {key}.type first: one of {', '.join(map(repr, place.variants))}"
        if place.schema:
            return f"expected keys, such as {key}.{next(iter(place.keys))}"
    if kind == "string_type" and isinstance(value, bool | int | float | None):
        return "expected a text; YAML takes what is not in quotes for something else"
    return ""


def _is_scalar(text: str) -> bool:
    """Return whether `text` reads as a number or a truth value."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return text.lower() in ("true", "false", "yes", "no", "on", "off")


def _unknown_key(root: type[Config], location: Sequence[int | str], value: object, shown: Shown) -> str:
    place, unknown = at(root, location[:-1]), str(location[-1])
    section = f"{place.key}." if place.key else ""
    name, colon, text = unknown.partition(":")
    if colon:  # the text is a value, so it may be a secret
        text = str(shown(text, name))
        unknown = f"{name}:{text}"
        hint = f"YAML needs a space after the colon: {readable(f'{name}: {text}')}"
    else:
        hint = _nearest_key(root, place, unknown, value)
    return f"unknown key {readable(f'{section}{unknown}')}; {hint}"


def _nearest_key(root: type[Config], place: Place, unknown: str, value: object) -> str:
    """Return a hint at the valid key that was probably meant: in another variant or in the same place, otherwise
    anywhere."""
    section = f"{readable(place.key)}." if place.key else ""
    if owners := [tag for tag, variant in place.chosen_from.items() if unknown in variant.model_fields]:
        return f"it belongs to {section}type {' or '.join(owners)}"
    if isinstance(value, str) and value in place.chosen_from:
        return f"did you mean {section}type={value}?"
    known = {place.key for place in places(Place(schema=root))}
    if other := called_here(f"{place.key}.{unknown}".removeprefix("."), value, known):
        return other
    if close := nearest(unknown, sorted(place.keys)):
        return f"did you mean {section}{close}?"
    if close := _anywhere(root, place.key, unknown):
        return f"did you mean {close}?"
    return f"expected one of {', '.join(sorted(place.keys))}"


def _anywhere(root: type[Config], section: str, name: str) -> str | None:
    """Return the key of another section whose last part is most like `name`.

    Among several, the one that shares most parts with `section` counts, then the one with the fewest parts.
    """
    keys = [place.key for place in named_places(Place(schema=root)) if place.key]
    close = nearest(name, dict.fromkeys(map(_last, keys)), cutoff=0.8)
    if close is None:
        return None
    return max((key for key in keys if _last(key) == close), key=lambda key: (_shared(key, section), -key.count(".")))


def _shared(key: str, other: str) -> int:
    """Return the number of leading parts that two keys share."""
    pairs = zip(key.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

"""Words that messages share, and the handling of failures."""

import re

import pytest

from tailrace import errors
from tailrace.errors import did_you_mean, nearest, on_failure, one_line, printable


def test_the_drawn_tree_is_that_of_the_classes() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^[│ ]*[├└]── (\w+)|^(TailraceError)$", errors.__doc__, re.MULTILINE)
    assert {name or root for name, root in drawn} == {kind.__name__ for kind in descendants(errors.TailraceError)}


def descendants(kind: type[Exception]) -> set[type[Exception]]:
    """`kind` and all classes below it, of this module."""
    below = {kind for sub in kind.__subclasses__() for kind in descendants(sub)}
    return {found for found in {kind, *below} if found.__module__ == errors.__name__}


def test_an_error_of_several_lines_becomes_one() -> None:
    assert one_line(ValueError("first\n\n  second\tthird ")) == "first second third"


def test_an_error_that_says_nothing_is_its_name() -> None:
    assert one_line(KeyError()) == "KeyError"


def test_the_most_alike_name_is_the_nearest() -> None:
    assert nearest("rewrad", ["rewards", "reward", "prompt"]) == "reward"
    assert nearest("rewrad", ["prompt"]) is None
    assert nearest("rewrad", ["reward"], cutoff=0.9) is None


def test_a_hint_ends_a_message_only_where_there_is_a_near_name() -> None:
    assert did_you_mean("rewrad", iter({"reward": 1})) == "; did you mean 'reward'?"
    assert did_you_mean("rewrad", []) == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("back\rover\x08", "back\\rover\\x08"),
        ("\x9b2J", "\\x9b2J"),
        ("left \u202e thgir", "left \\u202e thgir"),
        ("half \ud800", "half \\ud800"),
        ("été → 数 🙂", "été → 数 🙂"),
        ("first\n\tsecond", "first\n\tsecond"),
    ],
)
def test_what_would_steer_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
    assert one_line(ValueError(text)).isprintable()


def test_what_is_to_be_undone_is_undone_when_the_block_fails_and_else_not() -> None:
    undone: list[str] = []
    with on_failure(undone.append, "done"):
        pass
    with pytest.raises(KeyboardInterrupt), on_failure(undone.append, "failed"):
        raise KeyboardInterrupt
    assert undone == ["failed"]

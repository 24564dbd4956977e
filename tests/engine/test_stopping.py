"""Stop strings, token by token."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.conformance.requests import make_request
from tailrace.conformance.tiny import make_tokenizer
from tailrace.engine.scheduling.stopping import StopRules, StopStrings
from tailrace.errors import RequestError
from tests.engine.helpers import TinyModel

TOKENIZER = make_tokenizer()


def detokenize(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids))


def stops_at(text: str, *stop: str) -> int | None:
    """The number of bytes of `text` after which a stop string is found. Each byte is one token."""
    strings = StopStrings(stop, detokenize)
    for count, token in enumerate(TOKENIZER.encode(text, add_special_tokens=False), 1):
        if strings.push(token):
            return count
    return None


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcdef", "cd", 4),
        ("abcdef", "f", 6),
        ("aab", "ab", 3),
        ("nothing", "x", None),
        ("ein süßes Ende", "süß", 4 + 5),
        ("😀 ok", "😀", 4),
        ("x😀", "x", 1),
        ("two  spaces", "  s", 6),
    ],
)
def test_the_token_that_completes_a_stop_string_is_found(text: str, stop: str, expected: int | None) -> None:
    assert stops_at(text, stop) == expected


@settings(max_examples=150)
@given(
    st.text(alphabet="ab ß😀é", max_size=14), st.lists(st.text(alphabet="ab ß😀é", min_size=1, max_size=3), min_size=1)
)
def test_a_stop_string_is_seen_exactly_when_the_text_contains_it(text: str, stop: list[str]) -> None:
    prefixes = (text[:length] for length in range(1, len(text) + 1))
    first = next((prefix for prefix in prefixes if any(s in prefix for s in stop)), None)
    assert stops_at(text, *stop) == (None if first is None else len(first.encode()))


def test_bytes_that_never_form_text_do_not_grow_the_work() -> None:
    strings = StopStrings(("end",), detokenize)
    lone = TOKENIZER.encode("é", add_special_tokens=False)[0]
    for _ in range(100):
        assert not strings.push(lone)
    assert len(strings._pending) + len(strings._context) < 30
    assert [strings.push(token) for token in TOKENIZER.encode("end", add_special_tokens=False)] == [False, False, True]


def test_text_on_both_sides_of_broken_bytes_is_not_joined() -> None:
    strings = StopStrings(("ab",), detokenize)
    lone = TOKENIZER.encode("é", add_special_tokens=False)[0]
    a, b = TOKENIZER.encode("ab", add_special_tokens=False)
    assert not any(strings.push(token) for token in [a, *[lone] * 9, b])


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # for Qwen, transformers makes an empty tokenizer
def test_stop_strings_without_a_tokenizer_are_refused(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    directory = tmp_path / "m"
    shutil.copytree(tiny_model(family), directory, ignore=shutil.ignore_patterns("tokenizer*"))
    rules = StopRules(directory, eos_ids=(), max_model_len=64)
    with pytest.raises(RequestError, match=r"request 3 has stop strings, and .* has no tokenizer .*; use stop_token"):
        rules.check(make_request(3, stop=("x",)))
    rules.check(make_request(4))
    assert rules.rule(make_request(4)).max_tokens == 8
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match=r"request 5 has stop strings, and .* has no tokenizer"):
        rules.check(make_request(5, stop=("x",)))

"""Recipes are read as they are written, or refused in one line. No text in them runs, grows or changes silently."""

from pathlib import Path

import pytest

from tailrace.config.load import load_as, load_config
from tailrace.config.plain import NotPlainError, plain
from tailrace.config.recipe_text import RecipeSyntaxError, read_yaml
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2", "line 2: the key 'a' is there twice"),
        ("a: {b: 1, 'b': 2}", "the key 'b' is there twice"),
        ("x: y\n1: 2", "line 2: the key '1' is no text; put it in quotes"),
        ("~: 1", "the key '~' is no text"),
        ("? \n: 1", "the key '' is no text"),
        ("on: 1", "the key 'on' is no text"),
        ("? [a]\n: 1", "the key that is a sequence is no text"),
        (
            "a: &x {b: 1}\nc: *x",
            "line 2: an alias, which begins with *, is not possible; name a key, as in ${",
        ),
        ("a: &x [*x]", "an alias, which begins with *, is not possible"),
        ("a: !!python/object/apply:os.system [date]", "a tag, which begins with !, is not possible"),
        ("a: !!binary aGk=", "a tag, which begins with !, is not possible"),
        ("a: !!int x", "a tag"),
        ("a: ! b", "a tag, which begins with !, is not possible"),
        ("[" * 100_000, "more than 64 mappings and lists within one another"),
        ("{a: " * 2000, "more than 64 mappings"),
        ("- " * 2000, "more than 64 mappings"),
        ("\n".join("  " * depth + "a:" for depth in range(200)), "more than 64 mappings"),
        ("a: " + "9" * 5000, "has 5000 digits"),
        ("a: 1\n---\nb: 2", "line 2: there is a second document"),
        ("a:\n\tb: 1", r"line 2: found character '\t'"),
        ("a: \x1b[31m", r"the character '\x1b' cannot be in YAML as it is"),
        ("a: 'b", "unexpected end of stream"),
        ('a: "\\UFFFFFFFF"', "that of no character"),
        ("a: b: c", "mapping values are not allowed here"),
        ("a" * 2**21, "more than the 1048576 characters"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(RecipeSyntaxError) as caught:
        read_yaml(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_values_are_what_they_look_like() -> None:
    text = "a: 010\nb: 1:30\nc: 2024-01-01\nd: 1e-5\ne: -.5\nf: yes\ng: 1_000\nh: '1'\ni: .inf\nj: ~\nk: 0x1F\nl: <<"
    values = ["010", "1:30", "2024-01-01", 1e-5, -0.5, True, 1000, "1", float("inf"), None, "0x1F", "<<"]
    assert list(read_yaml(text).values()) == values


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is required and missing"),
        (b"- 1\n", "must be a YAML mapping of keys to values"),
        (b"a: \xff", "byte 3 is not UTF-8; save it so"),
        ("a: 1".encode("utf-16"), "byte 0 is not UTF-8"),
        (b"\x00" * 100, r"the character '\x00' cannot be in YAML"),
        (b'output_dir: "\\ud800"\n', r"output_dir has '\ud800', which is no character"),
        (b'output_dir: "a\\0b"\n', r"output_dir has the character \0"),
        (
            b"rewards: {grader: {type: function, path: a.b, arguments: {x: .nan}}}",
            "rewards.grader.arguments has .nan at x, and a number has to be finite",
        ),
        (
            b"threads: 1000000000000000000000000000000",
            "threads is 1000000000000000000000000000000: input should be less than or equal to 1024",
        ),
        (b"threads: -" + b"9" * 400, "threads is a whole number of more than 1024 bits"),
        (b"\x1b: 1", r"the character '\x1b' cannot be in YAML"),
        (b'"\\e[31m": 1', r"unknown key '\x1b[31m'"),
        (b'"%s": 1' % (b"k" * 1000), "unknown key 'kkk"),
        (b"output_dir: [%s]" % (b"1," * 9999), "output_dir is [1, 1,"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    text = str(caught.value)
    assert says in text
    assert text.isprintable()
    assert len(text.replace(str(recipe), "")) < 700


def test_a_recipe_of_windows_is_read(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_bytes(b"\xef\xbb\xbf" + QUICKSTART.read_bytes().replace(b"\n", b"\r\n"))
    assert load_config(recipe) == load_config(QUICKSTART)


def test_a_directory_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("a..b=1", "'a..b=…' is not of the form key=value"),
        ("=1", "is not of the form key=value"),
        (".a=1", "is not of the form key=value"),
        ("a.=1", "is not of the form key=value"),
        (" a=1", "is not of the form key=value"),
        ("a[0]=1", "a list is given whole, as in a=[1,2]"),
        ("+trainer.lr=1", "keys need no +"),
        ("~trainer=1", "keys need no ~"),
        ("", "'' is not of the form key=value"),
        ("seed=[1", "'seed=…' cannot be read: "),
        ("seed=1: 2: 3", "cannot be read: mapping values are not allowed here"),
        ("seed=*x", "an alias, which begins with *, is not possible"),
        ("seed=" + "9" * 20_000, "has 20000 digits"),
        ("prompts.system_prompt=a #b", "has a #, where YAML begins a comment; put the value in quotes"),
        ("seed=#", "has a #, where YAML begins a comment"),
        ("sampling.stop.0=x", "sampling.stop is a list, which has no keys to change; give sampling.stop whole"),
        ("engine.dtype=x", "engine is an interpolation, which has no keys to change; give engine whole"),
        ("seed=\x1b[31m", r"the character '\x1b' cannot be in YAML"),
        ("output_dir=\udcff", r"the character '\udcff' cannot be in YAML"),
        ("\x1b[31m=1", r"'\x1b[31m=…' is not of the form"),
        ("output_dir=~", "output_dir is null; expected a text"),
        ("output_dir=2024", "output_dir is 2024; expected a text"),
    ],
)
def test_an_override_that_is_none_is_refused_in_one_line(override: str, says: str) -> None:
    recipe = {"sampling": {"stop": ["a"]}, "engine": "${prompts}", "prompts": {}}
    with pytest.raises(ConfigError) as caught:
        load_as(RunConfig, recipe, [override])
    assert says in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", ["'a #b'", "a#b", '"#"', "[a, '#']"])
def test_a_hash_in_quotes_or_in_a_word_is_no_comment(value: str) -> None:
    load_config(QUICKSTART, [f"sampling.stop={value}"])


def test_a_later_override_counts_and_an_empty_one_is_null() -> None:
    assert load_config(QUICKSTART, ["seed=1", "seed=2"]).seed == 2
    assert load_config(QUICKSTART, ["model.revision="]).model.revision is None


def test_values_of_a_program_are_plain_or_refused() -> None:
    endless: dict[str, object] = {}
    endless["a"] = endless
    with pytest.raises(NotPlainError, match=r"^a\.a\..* has more than 64 mappings and lists"):
        plain(endless)
    with pytest.raises(NotPlainError, match=r"^a has the key 1, which is no text"):
        plain({"a": {1: 2}})
    with pytest.raises(NotPlainError, match=r"^a\.0 is of type set"):
        plain({"a": [{1}]})
    assert plain({"a": (1, 2.5), "p": Path("x")}) == {"a": [1, 2.5], "p": "x"}


@pytest.mark.parametrize(
    "section", [5, {"type": "jsonl", "path": "p", "pathh": "x"}, {"type": "x"}, {}, {"type": "hub"}]
)
@pytest.mark.parametrize("name", ["\x1b[31m", "n" * 5000])
def test_a_hint_for_a_key_of_ones_own_can_be_read(section: object, name: str) -> None:
    recipe = {"output_dir": "o", "rewards": {"grader": {"type": "exact"}}, "prompts": {"validation": {name: section}}}
    with pytest.raises(ConfigError) as caught:
        load_as(RunConfig, recipe)
    assert "prompts.validation." in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700

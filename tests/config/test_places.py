"""A misspelt key of any schema is answered with the key that was meant."""

from collections.abc import Iterator
from typing import Any

import pytest

from tailrace.config.base import Config
from tailrace.config.generate import EvalConfig, GenerateConfig, ProfileConfig, TPProfileConfig
from tailrace.config.load import load_as
from tailrace.config.places import Place
from tailrace.config.queue_table import ServeConfig
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError

COMMANDS = (RunConfig, GenerateConfig, EvalConfig, ProfileConfig, TPProfileConfig, ServeConfig)


def sections(place: Place, path: tuple[Any, ...] = (), tags: tuple[Any, ...] = ()) -> Iterator[tuple[Place, Any, Any]]:
    """Yield each section at or below `place`, with the parts of its key and the `type`s that lead to it."""
    for tag in place.variants:
        yield from sections(place.below(tag), path, (*tags, (path, tag)))
    if place.schema:
        yield place, path, tags
    for key in place.keys:
        yield from sections(place.below(key), (*path, key), tags)
    if place.entries:
        yield from sections(place.below(place.an_entry), (*path, place.an_entry), tags)


def put(values: Any, path: tuple[Any, ...], value: object) -> Any:
    """A copy of `values` with `value` at `path`."""
    if not path:
        return value
    if path[0] == 0:
        return [put(values[0] if values else {}, path[1:], value)]
    return {**(values or {}), path[0]: put((values or {}).get(path[0]), path[1:], value)}


ALL = [(schema, *found) for schema in COMMANDS for found in sections(Place(schema=schema))]


def test_sections_of_every_kind_are_walked() -> None:
    keys = {(schema, place.key, place.schema) for schema, place, _, _ in ALL}
    assert len(keys) > 60
    names = {key for schema, key, _ in keys if schema is RunConfig}
    assert {"engine.link", "engine.adaptive_tp", "prompts.source", "queue.storage", "algorithm.kl"} <= names
    assert any(key == "table.tasks.0.policy" for _, key, _ in keys)


@pytest.mark.parametrize("schema", COMMANDS)
def test_a_slip_in_any_key_names_the_key_that_was_meant(schema: type[Config]) -> None:
    for command, place, path, tags in ALL:
        for name in place.keys if command is schema else ():
            slip = f"{name}e" if name.endswith("type") else f"{name[:-1]}{name[-1] * 2}"
            if slip in place.keys:
                continue
            values: Any = put({}, (*path, slip), 5)
            for where, tag in tags:
                values = put(values, (*where, "type"), tag)
            with pytest.raises(ConfigError) as caught:
                load_as(schema, values)
            key = ".".join(map(str, (*path, "")))
            said = f"unknown key {key}{slip}; did you mean {key}"
            assert said in str(caught.value), (str(caught.value), said)
            assert "\n" not in str(caught.value)


def test_a_slip_is_told_before_what_is_missing_because_of_it() -> None:
    with pytest.raises(ConfigError, match=r"unknown key prompts\.source\.pathh; did you mean prompts\.source\.path\?"):
        load_as(GenerateConfig, None, ["prompts.source.type=jsonl", "prompts.source.pathh=x"])

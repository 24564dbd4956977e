"""A written configuration is read back as it was, and shown without secrets."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.config.base import Config
from tailrace.config.generate import EvalConfig, GenerateConfig
from tailrace.config.load import load_as, load_config
from tailrace.config.places import Place, places
from tailrace.config.recipe_text import read_yaml, write_yaml
from tailrace.config.run import RunConfig
from tailrace.config.shorthand import model_override
from tailrace.config.written import MASK, masked, shown, written
from tailrace.errors import ConfigError

BASE: dict[str, Any] = {
    "seed": 0,
    "output_dir": "out",
    "prompts": {"source": {"type": "jsonl", "path": "p.jsonl"}},
    "rewards": {"grader": {"type": "function", "path": "m.f"}},
}
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40),
    st.lists(st.sampled_from(["\\", "$", "{", "}", "${", "${seed}", "oc.env:X", "'", '"', "\n", " ", "#", ": "])).map(
        "".join
    ),
    st.sampled_from(
        ["yes", "null", "~", "1e3", "010", "1:30", "2024-01-01", "=", "<<", ".nan", "0x1F", "1_000", "-", "???"]
    ),
)


def reread(config: RunConfig) -> RunConfig:
    return load_config(read_yaml(write_yaml(written(config))))


@settings(max_examples=60)
@given(text=TEXTS, key=TEXTS)
@example(text="${oc.env:HOME}", key="k")
@example(text="\\\\${seed}\\", key="k")
@example(text="\ufeff\x85\u2028\x1b[31m", key="k")
def test_any_text_in_any_place_comes_back(text: str, key: str) -> None:
    config = load_config(BASE)
    arguments = {"plain": text, "deep": [{key: text}, text]}
    assert config.rewards.grader is not None
    grader = config.rewards.grader.model_copy(update={"arguments": arguments})
    prompts = config.prompts.model_copy(update={"system_prompt": text})
    sampling = config.sampling.model_copy(update={"stop": (f"x{text}",)})
    rewards = config.rewards.model_copy(update={"grader": grader})
    config = config.model_copy(update={"rewards": rewards, "prompts": prompts, "sampling": sampling})
    assert reread(config) == config


def test_a_text_with_an_interpolation_that_is_meant_so_is_escaped_once() -> None:
    config = load_config(BASE, [r"prompts.system_prompt='a \${x} b'"])
    assert config.prompts.system_prompt == "a ${x} b"
    assert reread(config) == config


@pytest.mark.parametrize(
    "text",
    ["a ${nope}", "${", "${trainer.nope}", "${oc.env:TAILRACE_NOPE}", "${oc.nope:1}", "${prompts.system_prompt}"],
)
def test_what_cannot_be_resolved_names_its_key_and_the_way_to_mean_it(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^recipe: prompts\.system_prompt cannot be resolved: .* has \\\$\{"
    ) as caught:
        load_config({**BASE, "prompts": {**BASE["prompts"], "system_prompt": text}})
    assert "\n" not in str(caught.value)


def with_secrets(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("TAILRACE_KEY", "sk-hidden1")
    arguments = {
        "api_key": "${oc.env:TAILRACE_KEY}",
        "header": "Bearer ${oc.env:TAILRACE_KEY}",
        "again": "${rewards.grader.arguments.header}!",
        "url": "https://me:hidden2@host/x",
        "openaiToken": "hidden3",
        "credentials": {"user": "hidden4", "list": ["hidden5"]},
        "max_tokens": 5,
        "model": "judge",
        "seed": "${seed}",
    }
    return load_config({**BASE, "rewards": {"grader": {"type": "function", "path": "m.f", "arguments": arguments}}})


def test_what_came_from_the_environment_is_written_as_it_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_secrets(monkeypatch)
    arguments = config.rewards.grader.arguments  # type: ignore[union-attr]
    assert arguments["again"] == "Bearer sk-hidden1!"
    text = write_yaml(written(config.resolved))
    assert "sk-hidden1" not in text
    assert "hidden2" in text, "a run that goes on needs it"
    assert reread(config) == config
    monkeypatch.setenv("TAILRACE_KEY", "sk-renewed")
    renewed = load_config(read_yaml(text)).rewards.grader
    assert renewed.arguments["again"] == "Bearer sk-renewed!"  # type: ignore[union-attr]
    monkeypatch.delenv("TAILRACE_KEY")
    with pytest.raises(
        ConfigError, match=r"rewards\.grader\.arguments\.\w+ cannot be resolved.*'TAILRACE_KEY' not found"
    ):
        load_config(read_yaml(text))


def test_what_is_shown_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    values = shown(with_secrets(monkeypatch).resolved)
    assert "hidden" not in str(values)
    assert values["rewards"]["grader"]["arguments"] == {
        "api_key": "${oc.env:TAILRACE_KEY}",
        "header": "Bearer ${oc.env:TAILRACE_KEY}",
        "again": "${rewards.grader.arguments.header}!",
        "url": "https://***@host/x",
        "openaiToken": "***",
        "credentials": {"user": "***", "list": ["***"]},
        "max_tokens": 5,
        "model": "judge",
        "seed": 0,
    }


def test_no_key_of_a_schema_but_code_keys_and_tokens_is_taken_for_a_secret() -> None:
    keys = {place.key.rpartition(".")[2] for place in places(Place(schema=RunConfig)) if place.key}
    assert shown(load_config(BASE)) == written(load_config(BASE))
    assert {key for key in keys if load_masks(key)} == {"api_key", "pickled", "token"}


def load_masks(key: str) -> bool:
    return bool(masked("text", key) == MASK)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.lr=${oc.env:TAILRACE_KEY}",
        "queue.typ={url: '${oc.env:TAILRACE_KEY}'}",
        "engine={type: native, link: '${oc.env:TAILRACE_KEY}'}",
        "queue={type: service, storage: {type: redis, url: 5, max_bytes: 'redis://a:sk-hidden1@b'}}",
        "queue={type: service, listen: ['${oc.env:TAILRACE_KEY}']}",
        "queue={type: service, unit_limit_s: 'https://sk-hidden1@host'}",
        "queue={type: service, unit_limit_s: 'https://host/x?api_key=sk-hidden1'}",
        "sampling.stop_token_ids=redis://a:sk-hidden1@b",
        "trainer={api_key:sk-hidden1}",
        "trainer={x:redis://a:sk-hidden1@b}",
        "rewards.grader.arguments.api_key='sk-hidden1",
        "rewards.grader.arguments.api_key=sk-hidden1 #",
        "rewards.grader.arguments.api_key=!sk-hidden1",
        "rewards.grader.arguments.api_key=*sk-hidden1",
        "rewards.grader.arguments.api_key sk-hidden1",
        "rewards.grader.arguments.api_key:sk-hidden1",
        "+rewards.grader.arguments.api_key=sk-hidden1",
        "rewards.grader.arguments[api_key]=sk-hidden1",
        "rewards.grader={type: exact, api_key: sk-hidden1}",
        "rewards.grader.pattern='(${oc.env:TAILRACE_KEY}'",
        "trainer={api_key: sk-hidden1}",
        "trainer=[{api_key: sk-hidden1}]",
    ],
)
def test_no_error_shows_a_secret(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setenv("TAILRACE_KEY", "sk-hidden1")
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, [override])
    assert "hidden1" not in str(caught.value)


@pytest.mark.parametrize("schema", [GenerateConfig, EvalConfig])
def test_no_error_of_a_command_shows_a_secret(schema: type[Config]) -> None:
    recipe = {**BASE, "rewards": {"grader": {"type": "exact"}}, "sampling": {"stop": ["sk-hidden1"]}}
    for override in ("trainer.api_key=sk-hidden1", "output_dir=sk-hidden1", "sampling.stop.0=sk-hidden1"):
        with pytest.raises(ConfigError) as caught:
            load_as(schema, recipe, [override])
        assert "hidden1" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        model_override("rewards.grader.arguments.api_key=sk-hidden1", EvalConfig.model_fields)
    assert "hidden1" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://me:p@ss@host/0", "redis://***@host/0"),
        ("redis://:p/ss?w#rd@host:6379/0", "redis://***@host:6379/0"),
        ("https://me@mine.org:pw@host", "https://***@host"),
        ("https://sk-token@host/x", "https://***@host/x"),
        ("https://sk-token@host:8080/x", "https://***@host:8080/x"),
        ("https://sk-token:x-oauth-basic@host", "https://***@host"),
        ("see https://a:b@c and https://d@e", "see https://***@c and https://***@e"),
        ("https://host/x?api_key=sk&max=3", "https://host/x?api_key=***&max=3"),
        ("https://host/x?max=3&access_token=sk#top", "https://host/x?max=3&access_token=***#top"),
        ("https://host/x?sv=1&sig=sk%3D", "https://host/x?sv=1&sig=***"),
        ("redis://host/0?password=sk", "redis://host/0?password=***"),
        ("https://host/#access_token=sk", "https://host/#access_token=***"),
        ("redis://me:${oc.env:PW}@host", "redis://me:${oc.env:PW}@host"),
        ("https://${oc.env:TOKEN}@host?key=${oc.env:KEY}", "https://${oc.env:TOKEN}@host?key=${oc.env:KEY}"),
        ("https://sk-${oc.env:TOKEN}@host", "https://***@host"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret_in_it(text: str, shown: str) -> None:
    assert masked({"url": text}) == {"url": shown}


@pytest.mark.parametrize(
    "text", ["https://host:8080/x?max_tokens=3", "unix:///run/redis.sock", "me@mine.org", "a?key=b", "https://h/@scope"]
)
def test_a_text_without_a_secret_is_shown_as_it_is(text: str) -> None:
    assert masked({"url": text}) == {"url": text}


def test_a_recipe_of_a_command_is_read_again(tmp_path: Path) -> None:
    config = load_as(GenerateConfig, None, ["seed=5"])
    assert load_as(GenerateConfig, written(config)) == config


def test_a_secret_may_be_a_number() -> None:
    arguments = {"api_key": 12345678, "retries": 3, "password": None, "token": "", "use_token": True}
    assert masked({"arguments": arguments}) == {"arguments": {**arguments, "api_key": MASK}}

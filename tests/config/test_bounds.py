"""Every number of every schema is bounded on both sides, and every value has the type of its key."""

import math
import re
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from tailrace.config.base import Config
from tailrace.config.generate import EvalConfig, GenerateConfig, ProfileConfig, TPProfileConfig
from tailrace.config.load import load_config
from tailrace.config.places import schemas_in
from tailrace.config.queue_table import ServeConfig
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError
from tests.config.test_load import RECIPE

ROOTS = (RunConfig, GenerateConfig, EvalConfig, ProfileConfig, TPProfileConfig, ServeConfig)

Key = tuple[type[Config], str]


def schemas(roots: tuple[type[Config], ...]) -> Iterator[type[Config]]:
    for schema in roots:
        yield schema
        for field in schema.model_fields.values():
            yield from schemas(tuple(schemas_in(field.annotation)))


SCHEMAS = tuple(dict.fromkeys(schemas(ROOTS)))
KEYS = [
    (schema, name)
    for schema in SCHEMAS
    for name, field in schema.model_fields.items()
    if not schemas_in(field.annotation) and "Any" not in str(field.annotation)
]


def rejects(schema: type[Config], values: dict[str, object], name: str) -> bool:
    """Whether the schema finds a fault in the value of the key `name`."""
    try:
        schema.model_validate(values)
    except ValidationError as error:
        return any(problem["loc"][:1] == (name,) for problem in error.errors())
    return False


def takes(key: Key, value: object) -> bool:
    """Whether the key takes `value`, alone or in a list or mapping."""
    schema, name = key
    return any(not rejects(schema, {name: form}, name) for form in (value, [value], [value, value], {"key": value}))


def test_no_key_takes_a_number_without_bounds() -> None:
    assert len(KEYS) > 120
    numbers = [key for key in KEYS if takes(key, 3) or takes(key, 0.5)]
    assert len(numbers) > 70
    extremes = (2**70, -(2**70), 1.7e308, -1.7e308, math.nan, math.inf, -math.inf)
    assert [(key, value) for key in numbers for value in extremes if takes(key, value)] == []


def test_a_number_that_has_to_be_above_zero_is_not_next_to_it() -> None:
    """A key takes so small a number only if it takes 0: 0 has a meaning of its own there, or is a factor."""
    floats = [key for key in KEYS if takes(key, 0.5) or takes(key, 1.5)]
    assert len(floats) > 20
    assert [key for key in floats if takes(key, 1e-40) and not takes(key, 0.0)] == []


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("sampling.temperature", "0.001"),
        ("evaluation.temperature", "0.001"),
        ("trainer.lr", "0.000000000000001"),
        ("trainer.eps", "0.000000000000001"),
        ("trainer.max_grad_norm", "0.000001"),
    ],
)
def test_what_divides_or_scales_a_step_is_large_enough_for_fp32(key: str, least: str) -> None:
    others = ["evaluation.samples=1"]
    load_config(RECIPE, [*others, f"{key}={least}"])
    with pytest.raises(ConfigError, match=rf"{re.escape(key)} is 1e-40\b.* {least}$"):
        load_config(RECIPE, [*others, f"{key}=1e-40"])


def test_no_integer_key_takes_a_truth_value_a_fraction_or_a_text() -> None:
    integers = [key for key in KEYS if takes(key, 3) and not takes(key, 3.5) and not takes(key, 0.5)]
    assert len(integers) > 50
    assert [(key, value) for key in integers for value in (True, 3.0, "3") if takes(key, value)] == []


def test_a_number_may_be_written_as_an_integer_and_a_power_of_ten() -> None:
    config = load_config(RECIPE, ["sampling.temperature=1", "trainer.lr=1e-5", "trainer.betas=[0,0.5]"])
    assert (config.sampling.temperature, config.trainer.lr, config.trainer.betas) == (1.0, 1e-5, (0.0, 0.5))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_defaults_are_taken_as_a_file_holds_them(schema: type[Config]) -> None:
    """Lists are included: a file holds them for keys that are kept as tuples."""
    defaults = {
        name: list(field.default) if isinstance(field.default, tuple) else field.default
        for name, field in schema.model_fields.items()
        if not field.is_required()
    }
    assert [name for name in defaults if rejects(schema, defaults, name)] == []

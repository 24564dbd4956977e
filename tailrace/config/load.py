"""From a recipe and `key=value` overrides to a configuration, or one clear line that says what is wrong."""

import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tailrace.config.base import Config
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError, nearest, one_line

_NO_KEYS = {
    "pipeline.mode": (
        "a mode is a choice of pipeline.placement, pipeline.max_staleness, pipeline.streaming and weights.mode: see "
        "docs/async.md"
    )
}
"""Keys that people look for, and what they find instead."""

_UNQUOTED = (
    "write it without quotes, powers of ten with a point (1.0e-5), and one from the environment as "
    "${oc.decode:${oc.env:NAME}}"
)
_EXPECTED = {
    "int_type": "expected an integer",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
}

Schema = TypeVar("Schema", bound=Config)


def load_config(recipe: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a training run; see `load_as`."""
    return load_as(RunConfig, recipe, overrides)


def load_as(schema: type[Schema], recipe: Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Schema:
    """Read a YAML recipe, apply `key=value` overrides and OmegaConf interpolations, and validate the whole.

    `recipe`: the file, or what one holds. Without a recipe there are the overrides alone.

    Raises:
        ConfigError: the file is missing or no YAML mapping, an override is malformed, a key is unknown (the message
            names the nearest valid one), or a value is not valid.
    """
    if isinstance(overrides, str):  # a sequence, too, of letters
        raise ConfigError(f"overrides is the text {overrides!r}; expected a list, such as [{overrides!r}]")
    source = _named(recipe)
    merged = _read_recipe(recipe) if isinstance(recipe, Path) else _plain(recipe or {})
    if foreign := sorted((RunConfig.model_fields.keys() - schema.model_fields.keys()) & set(merged)):
        raise ConfigError(
            f"{source} is a training recipe, with {', '.join(map(str, foreign))}; "
            f"this command takes {', '.join(sorted(schema.model_fields))}"
        )
    for override in sorted(overrides, key=_chooses_no_type):
        merged = _apply(merged, override)
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {_first_line(error)}") from None
    return parse_as(schema, _with_default_types(schema, typing.cast("dict[str, Any]", values)), source=source)


def keys_of(recipe: Path) -> set[str]:
    """The keys that a YAML recipe begins with.

    Raises:
        ConfigError: the file is missing or no YAML mapping.
    """
    return set(map(str, _read_recipe(recipe)))


def _with_default_types(schema: type[Config], values: dict[str, Any]) -> dict[str, Any]:
    """A section that is a variant by default needs no `type` to change one of its keys."""
    for name in schema.model_fields:
        section = values.get(name)
        if not isinstance(section, dict):
            continue
        if (variant := schema.default_type(name, values)) is not None:
            section = {"type": variant, **section}
        below, variants = _descend(schema, name)
        below = variants.get(str(section.get("type")), below)
        values[name] = section if below is None else _with_default_types(below, section)
    return values


def parse_config(values: Mapping[str, Any], *, source: str) -> RunConfig:
    """The configuration of a training run; see `parse_as`."""
    return parse_as(RunConfig, values, source=source)


def parse_as(schema: type[Schema], values: Mapping[str, Any], *, source: str) -> Schema:
    """Validate plain values.

    Raises:
        ConfigError: a key is unknown or a value is not valid; `source` says where the values came from.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{source}: {_explain(schema, problems[0])}{more}") from None


def _named(recipe: Path | Mapping[str, Any] | None) -> str:
    if recipe is None:
        return "command line"
    return str(recipe) if isinstance(recipe, Path) else "recipe"


def _plain(recipe: Mapping[str, Any]) -> DictConfig:
    try:
        return OmegaConf.create(dict(recipe))
    except OmegaConfBaseException as error:
        raise ConfigError(f"the recipe cannot be read: {_first_line(error)}") from None


def _read_recipe(recipe: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(recipe)
    except FileNotFoundError:
        raise ConfigError(f"the recipe {recipe} does not exist{_nearest_file(recipe)}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the recipe {recipe} cannot be read: {one_line(error)}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"the recipe {recipe} must be a YAML mapping of keys to values")
    return loaded


def _apply(config: DictConfig, override: str) -> DictConfig:
    """Merge one `key=value`; a new `type` drops the keys of the old variant, which the new one does not know."""
    key, separator, _ = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"the override {override!r} is not of the form key=value, such as trainer.lr=1e-5")
    try:
        change = OmegaConf.from_dotlist([override])
        _drop_old_variants(config, change)
        return typing.cast(DictConfig, OmegaConf.merge(config, change))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"the override {override!r} cannot be applied: {_first_line(error)}") from None


def _chooses_no_type(override: str) -> bool:
    """Overrides that choose a variant come first, so that the keys of the variant may stand before it."""
    return not override.partition("=")[0].endswith(".type")


def _drop_old_variants(config: DictConfig, change: DictConfig) -> None:
    """Remove what `config` says of a variant where `change` chooses another one."""
    for key in map(str, change):
        if OmegaConf.is_interpolation(change, key) or OmegaConf.is_interpolation(config, key):
            continue
        old, new = config.get(key), change.get(key)
        if not isinstance(old, DictConfig) or not isinstance(new, DictConfig):
            continue
        if "type" in old and "type" in new and old.type != new.type:
            old.clear()
        _drop_old_variants(old, new)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _nearest_file(recipe: Path) -> str:
    names = [path.name for path in sorted(recipe.parent.glob("*.yaml"))]
    close = nearest(recipe.name, names)
    return f"; did you mean {recipe.parent / close}?" if close else ""


def _explain(root: type[Config], problem: ErrorDetails) -> str:
    location, kind, message = problem["loc"], problem["type"], problem["msg"]
    key = ".".join(_config_keys(root, location))
    if kind == "extra_forbidden":
        return f"unknown key {key}; {_nearest_key(root, location, problem['input'])}"
    if kind == "missing":
        return f"{key} is required and missing"
    if kind == "union_tag_not_found":
        _, variants = _descend(_schema_at(root, location[:-1]), str(location[-1]))
        return f"{key}.type is required: one of {', '.join(map(repr, variants))}"
    if kind == "union_tag_invalid":
        context = problem["ctx"]
        return f"{key}.type is {context['tag']!r}; expected one of {context['expected_tags']}"
    if hint := _meant(root, problem, key):
        return f"{key} is {problem['input']!r}; {hint}"
    message = message.removeprefix("Value error, ").replace("tuple", "list").replace("Tuple", "List")
    if kind == "value_error":
        return f"{key} {message}" if key else message
    return f"{key} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _meant(root: type[Config], problem: ErrorDetails, key: str) -> str:
    """How to write a value that has the wrong form; empty where it is not known."""
    location, kind, value = problem["loc"], problem["type"], problem["input"]
    if kind in ("tuple_type", "list_type") and isinstance(value, str | int | float):
        return f"expected a list: {key}=[{value}]"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str) and _is_scalar(value):
        return f"{_EXPECTED[kind]}, not the text of one; {_UNQUOTED}"
    if kind in ("model_type", "model_attributes_type", "dict_type") and isinstance(value, str):
        _, variants = _descend(_schema_at(root, location[:-1]), str(location[-1]))
        if value in variants:
            return f"did you mean {key}.type={value}?"
    return ""


def _is_scalar(text: str) -> bool:
    """Whether it reads as a number or a truth value."""
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false", "yes", "no", "on", "off")
    return True


def _config_keys(root: type[Config], location: tuple[int | str, ...]) -> Iterator[str]:
    """The keys of a pydantic location, without the tags that it adds for unions."""
    for key, tag in _walk(root, location):
        if not tag:
            yield key


def _walk(root: type[Config], location: tuple[int | str, ...]) -> Iterator[tuple[str, bool]]:
    """Each part of a location, and whether it is a union's tag."""
    variants: dict[str, type[Config]] = {}
    model: type[Config] | None = root
    for part in map(str, location):
        if part in variants:
            model, variants = variants[part], {}
            yield part, True
            continue
        model, variants = _descend(model, part)
        yield part, False


def _descend(model: type[Config] | None, key: str) -> tuple[type[Config] | None, dict[str, type[Config]]]:
    """The schema under `key`, or the variants by tag where it is a union."""
    if key.isdigit():  # a place in a list, whose entries have the schema that the list was found under
        return model, {}
    field = model.model_fields.get(key) if model else None
    if field is None:
        return None, {}
    members = schemas_in(field.annotation)
    if field.discriminator is not None:
        return None, {member.model_fields["type"].default: member for member in members}
    return (members[0] if members else None), {}


def schemas_in(annotation: Any) -> list[type[Config]]:
    """The schemas in an annotation, in order: one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [schema for argument in typing.get_args(annotation) for schema in schemas_in(argument)]


def _nearest_key(root: type[Config], location: tuple[int | str, ...], value: object) -> str:
    """The valid key that was probably meant: in another variant or in the same place, else anywhere."""
    unknown = str(location[-1])
    place = ".".join((*_config_keys(root, location[:-1]), ""))
    if place + unknown in _NO_KEYS:
        return _NO_KEYS[place + unknown]
    if ":" in unknown:
        return f"YAML needs a space after the colon: {unknown.replace(':', ': ', 1)}"
    variants = _variants_at(root, location[:-1])
    if owners := [tag for tag, variant in variants.items() if unknown in variant.model_fields]:
        return f"it belongs to {place}type {' or '.join(owners)}"
    if isinstance(value, str) and value in variants:
        return f"did you mean {place}type={value}?"
    siblings = sorted(_schema_at(root, location[:-1]).model_fields)
    if close := nearest(unknown, siblings):
        return f"did you mean {place}{close}?"
    everywhere = dict(_all_keys(root, ""))
    if close := nearest(unknown, everywhere, cutoff=0.8):
        return f"did you mean {everywhere[close]}?"
    return f"expected one of {', '.join(siblings)}"


def _variants_at(root: type[Config], location: tuple[int | str, ...]) -> dict[str, type[Config]]:
    """The variants by tag of the union whose tag ends the location; none where it ends with a key."""
    if len(location) < 2:
        return {}
    return _descend(_schema_at(root, location[:-2]), str(location[-2]))[1]


def _schema_at(root: type[Config], location: tuple[int | str, ...]) -> type[Config]:
    model: type[Config] | None = root
    variants: dict[str, type[Config]] = {}
    for part in map(str, location):
        model, variants = (variants[part], {}) if part in variants else _descend(model, part)
    assert model is not None, location
    return model


def _all_keys(model: type[Config], prefix: str) -> Iterator[tuple[str, str]]:
    """(last part, dotted path) of every key below `model`."""
    for name, field in model.model_fields.items():
        yield name, prefix + name
        for schema in schemas_in(field.annotation):
            yield from _all_keys(schema, f"{prefix}{name}.")

"""Load a configuration from a recipe and `key=value` overrides, or say in one clear line what is wrong."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from tailrace.config.base import Config, path_of
from tailrace.config.explain import explain
from tailrace.config.overrides import merged, override_values
from tailrace.config.places import Place
from tailrace.config.plain import NotPlainError, plain
from tailrace.config.recipe_text import MAX_CHARS, read_yaml
from tailrace.config.recipes import find_recipe, shipped_recipes
from tailrace.config.run import RunConfig
from tailrace.config.written import is_interpolated, masked
from tailrace.errors import ConfigError

Schema = TypeVar("Schema", bound=Config)
References = Mapping[tuple[int | str, ...], str]
"""Texts that name the environment, by place; see `Config.references`."""

_ENVIRONMENT = "oc.env:"


def load_config(recipe: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a training run; see `load_as`."""
    return load_as(RunConfig, recipe, overrides)


def load_for_cluster(recipe: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a run on accelerators that need not be there; see `load_as`.

    Defaults are those of the device `cuda`, unless the recipe names another. Those of this machine's CPU may differ,
    such as its dtypes.
    """
    config = load_config(recipe, overrides)
    return config if "device" in config.model_fields_set else load_config(recipe, [*overrides, "device=cuda"])


def load_as(schema: type[Schema], recipe: Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Schema:
    """Read a YAML recipe, apply `key=value` overrides and OmegaConf interpolations, and validate the whole.

    The recipe may be that of a training run. Another schema then takes the keys that both have, before overrides are
    applied; interpolations may still name the other keys.

    `recipe`: the file, or the mapping that it holds. Without a recipe, only the overrides count.

    Raises:
        ConfigError: the file is missing or no YAML mapping, an override is malformed, a key is unknown (the message
            names the nearest valid one), or a value is not valid.
    """
    if isinstance(overrides, str):  # a text is a sequence as well, of letters
        raise ConfigError('overrides is one text; expected a list of them, such as ["trainer.lr=1e-5"]')
    source = _named(recipe)
    values = read_recipe(recipe) if isinstance(recipe, Path) else _plain(recipe or {}, source)
    is_of_training = bool((RunConfig.model_fields.keys() - schema.model_fields.keys()) & set(values))
    taken = _part_of_training(values, schema) if is_of_training else values
    for override in _types_first(overrides):
        change = override_values(override)
        if is_of_training:
            _check_taken(change, schema)
        values, taken = merged(values, change), merged(taken, change)
    whole = _resolved(values, source)
    references = {place: text for place, text in _references(values, whole) if _has(taken, place)}
    chosen = _with_default_types(Place(schema=schema), _selected(whole, taken))
    return parse_as(schema, chosen, source=source, references=references)


def changed_recipe(recipe: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the contents of a recipe with overrides, which count in the order in which `load_as` takes them.

    Raises:
        ConfigError: the file is missing or no YAML mapping, or an override is malformed.
    """
    values = read_recipe(recipe)
    for override in _types_first(overrides):
        values = merged(values, override_values(override))
    return values


def _part_of_training(values: Mapping[str, Any], schema: type[Config]) -> dict[str, Any]:
    return schema.part_of_training(_shared(values, Place(schema=schema), Place(schema=RunConfig)))


def _shared(values: Mapping[str, Any], ours: Place, theirs: Place) -> dict[str, Any]:
    """Return `values` of a training recipe, whose places are `theirs`, without the keys that have no place in
    `ours`."""
    return {
        key: _shared(value, ours.below(key), theirs.below(key))
        if isinstance(value, dict) and key in ours.keys and key in theirs.keys
        else value
        for key, value in values.items()
        if key in ours.keys or key not in theirs.keys
    }


def _selected(values: Any, keys: Any) -> Any:
    """Return `values` at the keys that `keys` has, too, and add the entries that `keys` alone has."""
    if not isinstance(values, dict) or not isinstance(keys, dict):
        return values
    return {key: _selected(values[key], entry) if key in values else entry for key, entry in keys.items()}


def _check_taken(change: Mapping[str, Any], schema: type[Config]) -> None:
    """Check that a change of a training recipe concerns a key that `schema` has.

    Raises:
        ConfigError: it concerns a key or a section of training alone.
    """
    for key in _of_training_alone(change, Place(schema=schema), Place(schema=RunConfig)):
        raise ConfigError(f"{key} is for training, and this command trains nothing; leave it out")


def _of_training_alone(values: Mapping[str, Any], ours: Place, theirs: Place) -> Iterator[str]:
    """Yield the keys among `values` that are in `theirs` and not in `ours`."""
    for key, value in values.items():
        if key in theirs.keys and key not in ours.keys:
            yield _first_key(value, theirs.below(key))
        elif isinstance(value, dict):
            yield from _of_training_alone(value, ours.below(key), theirs.below(key))


def _first_key(values: Any, place: Place) -> str:
    """Return the dotted key of the first of `values`, which are at `place`, as deep as a schema has it."""
    first = next(iter(values), "") if isinstance(values, dict) else ""
    return _first_key(values[first], place.below(first)) if first in place.keys else place.key


def keys_of(recipe: Path) -> set[str]:
    """Return the top-level keys of a YAML recipe.

    Raises:
        ConfigError: the file is missing or no YAML mapping.
    """
    return set(read_recipe(recipe))


def parse_as(
    schema: type[Schema], values: Mapping[str, Any], *, source: str, references: References | None = None
) -> Schema:
    """Validate plain values.

    Raises:
        ConfigError: a key is unknown or a value is not valid; `source` says where the values came from.
    """
    hidden = {str(_at(values, place)): text for place, text in (references or {}).items()}
    try:
        config = schema.model_validate(values)
    except ValidationError as error:
        problem = explain(schema, error.errors(), lambda value, key: masked(_without(value, hidden), key))
        for secret, text in hidden.items():
            problem = problem.replace(secret, text) if len(secret) > 4 else problem
        raise ConfigError(f"{source}: {problem}") from None
    return config.with_references(references) if references else config


def _with_plan_beside(file_path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a recipe's file with `observe.plan` as an absolute path: both files are written together,
    and may be moved together."""
    observe = values.get("observe")
    plan = observe.get("plan") if isinstance(observe, dict) else None
    if not isinstance(plan, str) or is_interpolated(plan) or plan.startswith("~"):
        return values
    return merged(values, {"observe": {"plan": str((file_path.parent / plan).absolute())}})


def _named(recipe: Path | Mapping[str, Any] | None) -> str:
    if recipe is None:
        return "command line"
    return str(recipe) if isinstance(recipe, Path) else "recipe"


def read_recipe(recipe: Path, above: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the contents of a YAML recipe, without resolving its interpolations.

    A recipe with the key `base` changes another recipe, of which `base` is the name, where it ships, or else the file,
    from the recipe's own directory. The file of `observe.plan`, too, is sought from the directory of its recipe.

    `above`: the recipes whose base this one is.

    Raises:
        ConfigError: see `load_as`, or a recipe is its own base.
    """
    file_path = find_recipe(recipe)
    if file_path.resolve() in above:
        raise ConfigError(f"the recipe {recipe} is its own base; take the key base out of one of them")
    values = _with_plan_beside(file_path, _read_mapping(recipe, file_path))
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"the recipe {recipe}: base is {base!r}; expected the file or the name of a recipe")
    beside = file_path.parent / path_of(base, f"the recipe {recipe}: base", ConfigError)
    found = shipped_recipes().get(base, beside)
    return merged(read_recipe(found, (*above, file_path.resolve())), values)


def _read_mapping(recipe: Path, file_path: Path) -> dict[str, Any]:
    try:
        with file_path.open("rb") as file:
            values = read_yaml(file.read(4 * MAX_CHARS + 1).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"the recipe {recipe} cannot be read: byte {error.start} is not UTF-8; save it so") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the recipe {recipe} cannot be read: {reason}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"the recipe {recipe} must be a YAML mapping of keys to values")
    return values


def _types_first(overrides: Sequence[str]) -> list[str]:
    """The overrides, with those that choose a variant before its keys, which may stand before its type.

    They stay behind earlier ones that give the section, or one around it, as a whole.
    """
    ordered: list[str] = []
    for override in overrides:
        key = override.partition("=")[0]
        section = key.removesuffix(".type")
        place = len(ordered)
        if section != key:
            place = max((number for number, other in enumerate(ordered, 1) if _is_around(other, section)), default=0)
        ordered.insert(place, override)
    return ordered


def _is_around(override: str, section: str) -> bool:
    """Whether an override gives a section, or one around it, or the type of one of these."""
    outer = override.partition("=")[0].removesuffix(".type")
    return section == outer or section.startswith(f"{outer}.")


def _resolved(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return `values` with their interpolations resolved."""
    if not _has_dollars(values):
        return _plain(values, source)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except RecursionError:
        raise ConfigError(f"{source}: it has interpolations in interpolations, too deep to be resolved") from None
    except OmegaConfBaseException as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{source}: {error.full_key or 'a value'} cannot be resolved: {reason}; a text with ${{ in it has \\${{"
        ) from None
    return _plain(resolved, source)


def _has_dollars(values: Any) -> bool:
    if isinstance(values, dict | list):
        return any(map(_has_dollars, values.values() if isinstance(values, dict) else values))
    return isinstance(values, str) and "${" in values


def _plain(values: Any, source: str) -> dict[str, Any]:
    try:
        return plain(values)  # type: ignore[no-any-return]
    except NotPlainError as error:
        raise ConfigError(f"{source}: {error}") from None


def _references(values: Any, resolved: Any) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yield place and text of what depends on the environment: texts that name it, and texts that contain such a text's
    value."""
    interpolated = list(_interpolated(values, resolved, ()))
    named = [str(value) for _, text, value in interpolated if _ENVIRONMENT in text]
    for place, text, value in interpolated:
        if _ENVIRONMENT in text or any(secret and secret in str(value) for secret in named):
            yield place, text


def _interpolated(values: Any, resolved: Any, place: tuple[int | str, ...]) -> Iterator[tuple[Any, str, Any]]:
    if isinstance(values, str):
        if is_interpolated(values):
            yield place, values, resolved
    elif isinstance(values, dict | list):
        for key in values if isinstance(values, dict) else range(len(values)):
            yield from _interpolated(values[key], resolved[key], (*place, key))


def _has(values: Any, place: tuple[int | str, ...]) -> bool:
    try:
        _at(values, place)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _at(values: Any, place: tuple[int | str, ...]) -> Any:
    for part in place:
        values = values[part]
    return values


def _without(value: Any, hidden: Mapping[str, str]) -> Any:
    """Return `value` with the recipe's references in place of the values taken from the environment."""
    if isinstance(value, dict):
        return {key: _without(entry, hidden) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without(entry, hidden) for entry in value]
    return hidden.get(str(value), value) if isinstance(value, str | int | float) else value


def _with_default_types(place: Place, values: Any) -> Any:
    """Fill in the default `type` of sections, so that a change of one of their keys need not name it."""
    if isinstance(values, list) and place.entries:
        return [_with_default_types(place.below(number), entry) for number, entry in enumerate(values)]
    if not isinstance(values, dict):
        return values
    if place.variants:
        tag = values.get("type")
        return (
            _with_default_types(place.below(tag), values) if isinstance(tag, str) and tag in place.variants else values
        )
    if place.schema is None:
        return values
    result = dict(values)
    for key in place.keys:
        section = values.get(key)
        if isinstance(section, dict) and (variant := place.schema.default_type(key, values)) is not None:
            section = {"type": variant, **section}
        if section is not None:
            result[key] = _with_default_types(place.below(key), section)
    return result

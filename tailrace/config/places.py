"""Places in a configuration: the schema, variant or kind of value to which a location leads."""

import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union

from tailrace.config.base import Config


@dataclass(frozen=True, slots=True)
class Place:
    """The schema or values at a dotted key."""

    key: str = ""
    schema: type[Config] | None = None
    """The schema of the section there; None where there is no section, or one of several variants."""
    variants: Mapping[str, type[Config]] = field(default_factory=dict)
    """The sections that may be there, by their `type`."""
    chosen_from: Mapping[str, type[Config]] = field(default_factory=dict)
    """The variants of which `schema` is one."""
    entries: tuple[Any, ...] = ()
    """The kinds of the entries of a list or of a mapping."""
    an_entry: str | int = 0
    """The part that stands for any entry: 0 in a list, `name` in a mapping, whose keys are free."""

    @property
    def keys(self) -> Collection[str]:
        """The keys of the section."""
        return self.schema.model_fields if self.schema else ()

    def below(self, part: str | int) -> "Place":
        """Return the place to which one part of a pydantic location leads. The part may be a union's tag, which is no
        key."""
        if part in self.variants:
            return Place(self.key, self.variants[str(part)], chosen_from=self.variants)
        if part == "[key]":  # it is the key that is wrong, and not what is there
            return self
        key = f"{self.key}.{part}" if self.key else str(part)
        if part in self.keys:
            assert self.schema is not None
            return _place(key, [self.schema.model_fields[str(part)].annotation])
        if self.schema is not None:  # an unknown key
            return Place(key)
        if self.entries:
            return _place(key, self.entries)
        return self if self._tells_no_place(part) else Place(key)

    def _tells_no_place(self, part: str | int) -> bool:
        """Return whether a part names a member of a union without tags."""
        return isinstance(part, str) and ("[" in part or part in _KINDS)


_KINDS = ("int", "float", "str", "bool", "constrained-str", "constrained-int", "constrained-float")
"""Pydantic's names of members of unions."""


def at(root: type[Config], location: Sequence[int | str]) -> Place:
    """Return the place to which a pydantic location leads."""
    place = Place(schema=root)
    for part in location:
        place = place.below(part)
    return place


def places(place: Place) -> Iterator[Place]:
    """Yield `place` and all places below it, including those of each variant of each union. An entry of a list is 0, an
    entry of a mapping is `name`."""
    yield place
    for tag in place.variants:
        yield from places(place.below(tag))
    for key in place.keys:
        yield from places(place.below(key))
    if place.entries:
        yield from places(place.below(place.an_entry))


def named_places(place: Place) -> Iterator[Place]:
    """Yield those of `places` whose keys a schema names, so none of an entry of a list or of a mapping."""
    yield place
    for tag in place.variants:
        yield from named_places(place.below(tag))
    for key in place.keys:
        yield from named_places(place.below(key))


def schemas_in(annotation: Any) -> list[type[Config]]:
    """Return the schemas in an annotation, in order: one, or the members of a union; also those in a list or
    mapping."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [schema for argument in typing.get_args(annotation) for schema in schemas_in(argument)]


def _place(key: str, annotations: Sequence[Any]) -> Place:
    kinds = [kind for annotation in annotations for kind in _kinds(annotation)]
    schemas = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)]
    if len(schemas) > 1:
        return Place(key, variants={schema.model_fields["type"].default: schema for schema in schemas})
    if schemas:
        return Place(key, schemas[0])
    entries = tuple(entry for kind in kinds for entry in _entries(kind))
    return Place(key, entries=entries, an_entry="name" if any(map(_is_mapping, kinds)) else 0)


def _kinds(annotation: Any) -> list[Any]:
    """Return the members of a union, without None and without annotations."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for argument in typing.get_args(annotation) for kind in _kinds(argument)]
    return [] if annotation is NoneType else [annotation]


def _is_mapping(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _entries(kind: Any) -> tuple[Any, ...]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is None or origin is Literal:
        return ()
    if _is_mapping(kind):
        return arguments[1:]
    return tuple(argument for argument in arguments if argument is not ...)

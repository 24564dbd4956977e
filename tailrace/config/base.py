"""The base of every configuration schema."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from tailrace.cpu import multiplies_bfloat16

_IN_BFLOAT16 = ("native", "vllm")
"""Engines whose dtype is that by default."""


class Config(BaseModel):
    """Frozen, keyword-only; unknown keys are errors; the docstring under a field is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def default_type(cls, section: str, values: Mapping[str, Any]) -> str | None:
        """The `type` of a section that names none in `values`; None where it may be left out, or must name one."""
        field = cls.model_fields[section]
        return getattr(field.default, "type", None) if field.discriminator else None


class OnDevice(Config):
    """With an `engine` on a `device`: one that computes as fast as it can there, where its dtype is left open."""

    @model_validator(mode="before")
    @classmethod
    def _generates_as_the_device_can(cls, values: Any) -> Any:
        engine = values.get("engine", {}) if isinstance(values, dict) else None
        if isinstance(engine, dict) and is_slow_in_bfloat16(values) and engine.get("type", "native") in _IN_BFLOAT16:
            return {**values, "engine": {"type": "native", "dtype": "float32", **engine}}
        return values


def is_slow_in_bfloat16(values: Mapping[str, Any]) -> bool:
    """Whether what a configuration is made of names a device on which bfloat16 is no good default."""
    return values.get("device", "cpu") == "cpu" and not multiplies_bfloat16()

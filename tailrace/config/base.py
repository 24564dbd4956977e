"""The base of every configuration schema."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


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

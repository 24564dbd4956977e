"""The base of every configuration schema."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen, keyword-only; unknown keys are errors; the docstring under a field is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

"""How generation and training overlap."""

from dataclasses import dataclass
from typing import Literal

from tailrace.config.pipeline import PipelineConfig
from tailrace.config.run import RunConfig

_KEYS = {"placement", "max_staleness", "streaming"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The keys of `pipeline` that decide it."""

    placement: Literal["colocated", "separated"]
    max_staleness: int = 0
    streaming: bool = False

    @classmethod
    def of(cls, pipeline: PipelineConfig) -> "Mode":
        """That of a recipe."""
        return cls(placement=pipeline.placement, max_staleness=pipeline.max_staleness, streaming=pipeline.streaming)

    @property
    def colocated(self) -> bool:
        """Whether engines and trainer have the same devices, in turns."""
        return self.placement == "colocated"

    @property
    def values(self) -> dict[str, str | int | bool]:
        """As keys of `pipeline`."""
        return {"placement": self.placement, "max_staleness": self.max_staleness, "streaming": self.streaming}

    def __str__(self) -> str:
        streaming = ", streaming" if self.streaming else ""
        return f"{self.placement}{streaming}, staleness {self.max_staleness}"

    def applied(self, config: RunConfig) -> RunConfig:
        """A recipe with this mode. A colocated engine takes weights at once, so `weights.mode` is dropped."""
        pipeline = config.pipeline.model_copy(
            update={**self.values, "in_order": config.pipeline.in_order and self.streaming}
        )
        weights = config.weights.model_copy(update={"mode": None}) if self.colocated else config.weights
        return config.model_copy(update={"pipeline": pipeline, "weights": weights})


USUAL = (
    Mode(placement="colocated"),
    Mode(placement="separated", streaming=True),
    Mode(placement="separated", streaming=True, max_staleness=1),
    Mode(placement="separated", streaming=True, max_staleness=2),
)
"""Those that are tried where the recipe leaves the choice."""


def modes_of(config: RunConfig, *, search: bool) -> tuple[Mode, ...]:
    """The modes to choose from: the recipe's own, unless it gives none or `search` says otherwise."""
    own = Mode.of(config.pipeline)
    if search:
        return USUAL if own in USUAL else (own, *USUAL)
    return (own,) if config.pipeline.model_fields_set & _KEYS else USUAL

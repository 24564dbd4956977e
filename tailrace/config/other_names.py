"""What keys of other frameworks are called here."""

NAMES: dict[str, str] = {
    "pipeline.mode": (
        "a mode is a choice of pipeline.placement, pipeline.max_staleness, pipeline.streaming and weights.mode: see "
        "docs/async.md"
    )
}


def called_here(key: str) -> str | None:
    """What to use in place of a dotted key that is none."""
    return NAMES.get(key)

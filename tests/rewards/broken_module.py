"""A module that cannot be imported."""

undefined  # type: ignore[name-defined]  # noqa: B018, F821

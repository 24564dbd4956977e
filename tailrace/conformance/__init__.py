"""Contracts of engines, trainers and losses, as tests that the authors of others can run; see docs/adapters.md and
docs/algorithms.md.

    class TestMyEngine(EngineContract):
        config = AdapterEngineConfig(path="my_engine.make_engine")

Needs pytest and pytest-asyncio (`pip install tailrace[conformance]`); nothing else in Tailrace imports this package.
"""

import pytest

pytest.register_assert_rewrite(
    "tailrace.conformance.engine",
    "tailrace.conformance.loss",
    "tailrace.conformance.loss_cases",
    "tailrace.conformance.trainer",
)

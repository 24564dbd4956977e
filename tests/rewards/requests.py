"""Requests to graders, with defaults for all that a test does not name."""

from typing import Any

from tailrace.rewards.base import GradingRequest


def make_request(response: str, **fields: Any) -> GradingRequest:
    """A request for `response`."""
    rest: dict[str, Any] = {"prompt": "", "question": "", "answer": None, "metadata": {}, "tokens": []}
    return GradingRequest(**{**rest, "finish_reason": "stop", "response": response, **fields})

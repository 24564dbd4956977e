"""Reward functions of the rounds."""

import subprocess
from typing import Any

from tests.helpers.graders import digit_fraction as digit_fraction

_LINGER_S = 600
_has_child = False


def daemonizing(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """Grade as `digit_fraction`. The first call leaves a background process in a session of its own."""
    global _has_child
    if not _has_child:
        _has_child = True
        subprocess.Popen(["sh", "-c", f"sleep {_LINGER_S} &"], start_new_session=True).wait()
    return digit_fraction(response, answer, prompt, metadata)

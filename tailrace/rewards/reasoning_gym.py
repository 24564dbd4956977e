"""Rewards by the scorer of the reasoning-gym task that made the prompt. Scores may be partial; 1 means right."""

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.config.patterns import find
from tailrace.errors import RewardError
from tailrace.rewards.base import REWARD, Grader, GradingRequest, verdict

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # from a dependency, when it is compiled at first use
    import reasoning_gym  # type: ignore[import-untyped]
    from reasoning_gym.dataset import ProceduralDataset  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from tailrace.config.rewards import ReasoningGymReward


class ReasoningGymGrader(Grader):
    """Finds the task by `metadata["source_dataset"]`, with `metadata["parameters"]` if the prompt source kept them.

    Scorers compare tuples and integer keys, which JSON lacks. So the metadata writes a tuple as {"$tuple": [...]} and a
    mapping with keys other than strings as {"$map": [[key, value], ...]}.
    """

    def __init__(self, config: "ReasoningGymReward") -> None:
        self._pattern = re.compile(config.pattern) if config.pattern is not None else None
        self._tasks: dict[bytes, ProceduralDataset] = {}

    def grade(self, request: GradingRequest) -> Mapping[str, float | str]:
        """See `Grader`."""
        task = self._task(request.metadata)
        answer = find(self._pattern, request.response, "last") if self._pattern else request.response
        if answer is None:
            return verdict(False, None)
        metadata = restore(request.metadata)
        entry = {"question": _text(request.question), "answer": request.answer, "metadata": metadata}
        score = float(task.score_answer(answer.strip(), entry))
        return {**verdict(score >= 1.0, answer.strip()), REWARD: score}

    def can_be_right(self, request: GradingRequest) -> bool:
        """Whether a task of reasoning-gym made the prompt."""
        return bool(self._task(request.metadata))

    def _task(self, metadata: Mapping[str, Any]) -> ProceduralDataset:
        name, parameters = metadata.get("source_dataset"), metadata.get("parameters", {})
        if not isinstance(name, str):
            raise RewardError('metadata has no "source_dataset"; this reward needs prompts of reasoning-gym')
        key = msgspec.json.encode((name, parameters))
        if key not in self._tasks:
            self._tasks[key] = reasoning_gym.create_dataset(name, **parameters)
        return self._tasks[key]


def _text(question: str | list[dict[str, Any]]) -> str:
    """The text of the problem; in a conversation, that of the last message."""
    return question if isinstance(question, str) else str(question[-1].get("content", ""))


def restore(value: Any) -> Any:
    """The Python value that was written as JSON with the marks `$tuple` and `$map`."""
    if isinstance(value, list):
        return [restore(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"$tuple"}:
        return tuple(restore(item) for item in value["$tuple"])
    if value.keys() == {"$map"}:
        return {restore(key): restore(item) for key, item in value["$map"]}
    return {key: restore(item) for key, item in value.items()}

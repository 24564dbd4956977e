"""The results that a grader may return, and the grades that they become."""

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

from tailrace.host.user_code import describe, user_traceback
from tailrace.rewards.base import CORRECT, FINAL_ANSWER, REWARD, Grade

MAX_PARTS = 64
_LARGEST = 1e9
"""The largest number: metrics add up squares of rewards, and training computes with rewards in fp32."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""The allowed names of a part, since they become names of metrics."""


def all_graded(results: Any, count: int) -> list[Grade]:
    """The grades of a grader's results for `count` responses. A result that is none, or an error, is a failed grading.

    Raises:
        TypeError: there is not one result for each response.
    """
    _check_awaited(results)
    if isinstance(results, str | bytes | Mapping) or not isinstance(results, Iterable):
        raise TypeError(f"the grader must return a list, a result for each response, not {type(results).__name__}")
    listed = list(results)
    if len(listed) != count:
        raise TypeError(f"the grader returned {len(listed)} results for {count} responses; return one for each")
    return [_graded(result) for result in listed]


def failed(error: BaseException, count: int) -> list[Grade]:
    """The grades of `count` responses whose grading raised `error`."""
    return [Grade(reward=None, error=describe(error), traceback=user_traceback(error))] * count


def _graded(result: Any) -> Grade:
    try:
        if isinstance(result, Exception):
            raise result
        reward, parts, final_answer = read_result(result)
    except Exception as error:  # the code of a result's own type may raise anything
        (grade,) = failed(error, 1)
        return grade
    return Grade(reward=reward, parts=parts, final_answer=final_answer)


def read_result(result: Any) -> tuple[float, dict[str, float], str | None]:
    """The reward, the parts and the final answer in a grader's result.

    Raises:
        TypeError: the result is neither a number nor a mapping of numbers with a `reward`, or `final_answer` is no
            text.
        ValueError: a number is not finite, `correct` is neither 0 nor 1, the name of a part cannot be a metric's, or
            `final_answer` has half a surrogate pair.
    """
    _check_awaited(result)
    if not isinstance(result, Mapping):
        reward = _finite(result, "the grader must return a number or a mapping", "reward")
        return reward, {CORRECT: reward} if _is_truth(result) else {}, None
    if REWARD not in result:
        raise TypeError(f"the grader's mapping has no {REWARD!r}; it has {', '.join(map(str, result)) or 'nothing'}")
    if len(result) > MAX_PARTS:
        raise ValueError(
            f"the grader's mapping has {len(result)} entries; expected at most {MAX_PARTS}, the reward among them"
        )
    numbers = {name: value for name, value in result.items() if name != FINAL_ANSWER}
    parts = {_name(name): _finite(value, f"part {name!r} must be a number", name) for name, value in numbers.items()}
    if parts.get(CORRECT, 0.0) not in (0.0, 1.0):
        raise ValueError(f"part {CORRECT!r} must be true or false, not {parts[CORRECT]:g}")
    return parts.pop(REWARD), parts, _text(result.get(FINAL_ANSWER))


def _text(final_answer: Any) -> str | None:
    if final_answer is None:
        return None
    if not isinstance(final_answer, str):
        raise TypeError(f"{FINAL_ANSWER} must be a text, not {type(final_answer).__name__}")
    text = str.__str__(final_answer)  # a plain text, such as of NumPy's
    text.encode()
    return text


def _check_awaited(result: Any) -> None:
    if inspect.isawaitable(result):
        raise TypeError("the grader returned an awaitable; define it with async def")


def _is_truth(value: Any) -> bool:
    """Whether a value is a truth value of Python or NumPy."""
    return isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"


def _finite(value: Any, expected: str, name: Any) -> float:
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):  # NumPy's numbers and scalar tensors are
        raise TypeError(f"{expected}, not {type(value).__name__}")
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise TypeError(f"{expected}, not {type(value).__name__} of shape {shape}")
    number = float(value.item() if shape else value)  # type: ignore[attr-defined]
    if not abs(number) <= _LARGEST:  # NaN fails this, too
        raise ValueError(
            f"the grader returned {number:g}; a {name} must be a number from {-_LARGEST:g} to {_LARGEST:g}"
        )
    return number


def _name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"the name of part {str(name)[:80]!r} cannot be that of a metric: give letters, digits and _ . -"
        )
    return str.__str__(name)  # a subclass may have another `__str__`

"""A program's function grades in other processes, like a function that a recipe names."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.rewards import GivenReward
from tailrace.errors import ConfigError, UserError
from tailrace.rewards.base import AsyncGrader, Grader
from tailrace.rewards.factory import make_grader
from tailrace.rewards.given import reward_section
from tests.rewards.requests import make_request

PROGRAM = """
import asyncio, math
from dataclasses import dataclass
from tailrace.config.rewards import GivenReward, GradingConfig
from tailrace.rewards.base import GradingRequest
from tailrace.rewards.given import reward_section
from tailrace.rewards.pool import GraderPool
import beside

@dataclass
class Bonus:
    points: float

BONUS = Bonus(2.0)

def helper(text):
    return math.sqrt(len(text)) + beside.MORE

def score(response, answer):
    return helper(response) + BONUS.points

async def main():
    config = GradingConfig(grader=GivenReward.model_validate(reward_section(score)), workers=1)
    async with GraderPool(config) as pool:
        asked = GradingRequest(
            response="four", answer="4", question="q", prompt="p", metadata={}, tokens=[1], finish_reason="stop"
        )
        print((await pool.grade(asked)).reward)

asyncio.run(main())
"""


def given(function: Callable[..., Any]) -> GivenReward:
    return GivenReward.model_validate(reward_section(function))


def graded(function: Callable[..., Any], response: str) -> Any:
    """The grade of `function` after it has been pickled and restored."""
    grader = make_grader(given(function))
    assert isinstance(grader, Grader)
    return grader.grade(make_request(response))


class Scorer:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def method(self, response: str) -> float:
        return self.factor * len(response)

    __call__ = method


def weighted(weight: float, response: str) -> float:
    return weight * len(response)


def test_any_callable_is_called_with_what_it_asks_for() -> None:
    factor = 3.0
    assert graded(lambda response: factor * len(response), "ab") == 6.0
    assert graded(Scorer(2.0).method, "ab") == 4.0
    assert graded(Scorer(2.5), "ab") == 5.0
    assert graded(functools.partial(weighted, 4.0), "ab") == 8.0


async def test_an_asynchronous_function_is_awaited() -> None:
    async def score(response: str) -> float:
        return float(len(response))

    grader = make_grader(given(score))
    assert isinstance(grader, AsyncGrader)
    assert await grader.grade(make_request("abc")) == 3.0


def test_a_function_of_a_program_grades_with_all_that_it_uses(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("MORE = 10")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
    )
    assert (done.stdout, done.returncode) == ("14.0\n", 0), done.stderr


def test_what_cannot_go_to_a_grader_is_refused_in_one_line() -> None:
    waiting, large = (n for n in range(3)), bytes(2**20)

    def waits(response: str) -> float:
        return float(next(waiting))

    def heavy(response: str) -> float:
        return float(len(large))

    for function, says in (
        (
            waits,
            r"reward '.*waits' cannot go to graders, which are other processes: TypeError: cannot pickle 'gen",
        ),
        (heavy, r"takes 1\.3 MiB with all that it uses, and may take 0\.5; load what is large inside"),
        (5, r"reward is 5; expected a function"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            reward_section(function)  # type: ignore[arg-type]
        assert str(caught.value).isprintable()
    with pytest.raises(
        UserError, match=r"reward '.*' is called by name with .*; it cannot be: .*'reponse'.*'response'"
    ):
        reward_section(lambda reponse: 1.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"python": "3.1"}, r"was given by a program of Python 3\.1, and this is 3\.\d+: use that one"),
        ({"pickled": "AAAA"}, r"reward 'f' cannot be made: \w+"),
        ({"pickled": "é"}, r"reward 'f' cannot be made: \w+"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(change: dict[str, str], says: str) -> None:
    config = given(lambda response: 1.0).model_copy(update={"name": "f", **change})
    with pytest.raises(UserError, match=says):
        make_grader(config)

"""The examples of docs/rewards.md, graded in real processes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.config.load import load_config
from tailrace.config.places import schemas_in
from tailrace.config.rewards import MAX_REWARDS, FunctionReward, GradingConfig
from tailrace.rewards.arguments import GROUP_NAMES, NAMES
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.rewards.graders import Graders
from tailrace.rewards.pool import GraderPool
from tailrace.rewards.results import MAX_PARTS
from tests.helpers.judge_server import JudgeServer, said
from tests.rewards.requests import make_request

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text()
RECIPES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`my_rewards.py` of the page, in the working directory."""
    (tmp_path / "my_rewards.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def grades(grader: dict[str, Any], *requests: GradingRequest) -> list[Grade]:
    async with GraderPool(GradingConfig(grader=FunctionReward.model_validate(grader), workers=1)) as pool:
        return [await pool.grade(request) for request in requests]


def test_the_page_has_every_grader_and_the_limit_of_parts() -> None:
    types = [
        grader.model_fields["type"].default for grader in schemas_in(GradingConfig.model_fields["grader"].annotation)
    ]
    assert re.findall(r"^\| `(\w+)` \| .* \| .* \|$", PAGE.partition("## Answers")[0], re.MULTILINE) == ["type", *types]
    assert f"A mapping has at most {MAX_PARTS} entries" in " ".join(PAGE.split())


@pytest.mark.usefixtures("module")
async def test_the_function_of_the_page_says_what_is_right() -> None:
    requests = make_request("it is 7", answer="7"), make_request("", answer="7")
    assert await grades(RECIPES[1]["rewards"]["grader"], *requests) == [
        Grade(reward=1.0, parts={"correct": 1.0}),
        Grade(reward=0.0, parts={"correct": 0.0}),
    ]


@pytest.mark.usefixtures("module")
async def test_the_shaped_reward_of_the_page_has_parts() -> None:
    request = make_request("It is 7", answer="7", tokens=[1] * 64)
    cut_off = make_request("It is 7", answer="7", tokens=[1] * 256, finish_reason="length")
    assert await grades(RECIPES[2]["rewards"]["grader"], request, cut_off) == [
        Grade(reward=1.075, parts={"correct": 1.0, "brief": 0.75}),
        Grade(reward=0.0, parts={"correct": 1.0, "brief": 0.0}),
    ]


@pytest.mark.usefixtures("module")
async def test_the_function_of_a_group_on_the_page_compares_responses() -> None:
    config = load_config({**RECIPES[0], **RECIPES[3]}).rewards.each[""]
    async with GraderPool(config) as pool:
        found = await pool.grade_all([make_request(text) for text in "aab"])
    assert [grade.reward for grade in found] == [0.5, 0.5, 1.0]


@pytest.mark.usefixtures("module")
async def test_the_judge_of_the_page_is_awaited() -> None:
    (grade,) = await grades({"path": "my_rewards.judged"}, make_request("3", question="Is 3 odd?", prompt="<user>"))
    assert grade == Grade(reward=1.0, parts={"correct": 1.0})


@pytest.mark.usefixtures("module")
async def test_the_rewards_of_the_page_are_added_up() -> None:
    config = load_config({**RECIPES[0], **RECIPES[6]}).rewards
    async with Graders(config.with_one_worker) as graders:
        grade = await graders.grade(make_request("It is $7$.", answer="7", tokens=[1] * 100))
    parts = {"right": 1.0, "right.correct": 1.0, "brief": 0.5, "correct": 1.0}
    assert grade == Grade(reward=1.1, parts=parts, final_answer="7")
    assert f"there may be {MAX_REWARDS}" in PAGE


def test_the_recipes_of_the_page_are_some() -> None:
    assert load_config(RECIPES[0]).prompts.source.type == "hub"
    assert load_config({**RECIPES[0], **RECIPES[5]}).rewards.workers == 1


@pytest.mark.usefixtures("module")
async def test_the_judge_service_of_the_page_is_asked_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with JudgeServer(lambda _: said("Good. Score: 9")) as judge:
        monkeypatch.setenv("JUDGE_KEY", "k")
        grading = load_config({**RECIPES[0], **RECIPES[4]}, [f"rewards.grader.url={judge.url}"]).rewards.each[""]
        async with GraderPool(grading) as pool:
            grade = await pool.grade(make_request("4", question="2 + 2?", answer="four"))
    assert grade.reward == 0.9
    assert grade.spent["cost"] == pytest.approx((100 * 0.15 + 10 * 0.6) / 1e6)
    ((_, headers, body),) = judge.asked
    assert headers["authorization"] == "Bearer k"
    assert "Reference: four\nResponse: 4\n" in body["messages"][0]["content"]


def test_the_page_has_every_parameter() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.MULTILINE)))
    assert set(NAMES) <= set(rows)
    assert set(GROUP_NAMES) <= set(listed)

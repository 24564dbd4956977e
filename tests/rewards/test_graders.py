"""Each grader's right and wrong cases, graded in this process."""

import json
from typing import Any

import pytest
import reasoning_gym  # type: ignore[import-untyped]
from reasoning_gym.dataset import ProceduralDataset  # type: ignore[import-untyped]

from tailrace.config.prompts import ReasoningGymSource
from tailrace.config.rewards import ExactReward, IntegerReward, MathReward, ReasoningGymReward, RegexReward
from tailrace.errors import RewardError
from tailrace.prompts.sources.reasoning_gym import reasoning_gym_rows
from tailrace.rewards.base import AsyncGrader, Grader
from tailrace.rewards.factory import make_grader
from tailrace.rewards.reasoning_gym import ReasoningGymGrader
from tailrace.rewards.results import read_result
from tests.rewards.requests import make_request


def score(grader: Grader | AsyncGrader, response: str, answer: Any, metadata: dict[str, Any] | None = None) -> float:
    assert isinstance(grader, Grader)
    return read_result(grader.grade(make_request(response, answer=answer, metadata=metadata or {})))[0]


@pytest.mark.parametrize(
    ("response", "answer", "ignore_case", "reward"),
    [
        (" Paris \n", "Paris", False, 1.0),
        ("paris", "Paris", False, 0.0),
        ("paris", "Paris", True, 1.0),
        ("Paris.", "Paris", True, 0.0),
        ("42", 42, False, 1.0),
        ("", "x", False, 0.0),
    ],
)
def test_exact_compares_the_stripped_response(response: str, answer: Any, ignore_case: bool, reward: float) -> None:
    assert score(make_grader(ExactReward(ignore_case=ignore_case)), response, answer) == reward


@pytest.mark.parametrize(
    ("pattern", "which", "response", "reward"),
    [
        (r"-?\d+", "last", "3 + 4 is 7", 1.0),
        (r"-?\d+", "first", "3 + 4 is 7", 0.0),
        (r"-?\d+", "first", "7, since 3 + 4", 1.0),
        (r"-?\d+", "last", "it is -7", 0.0),
        (r"-?\d+", "last", "no number", 0.0),
        (r"answer: *(\d+)", "last", "answer:  7 (not 8)", 1.0),
        (r"a(\d+)|b", "last", "a7 b", 0.0),
        (r"answer:(.*)", "last", "answer: 7 ", 1.0),
    ],
)
def test_regex_compares_the_chosen_match(pattern: str, which: Any, response: str, reward: float) -> None:
    assert score(make_grader(RegexReward(pattern=pattern, match=which)), response, "7") == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("12 + 30 is 42", "42", 1.0),
        ("042", "42", 1.0),
        ("-7.", "-7", 1.0),
        ("41", 42, 0.6 * 2 / 3),
        ("-42", "42", 0.6 * 2 / 3),
        ("2", "42", 0.6 * 2 / 3),
        ("142", "42", 0.6 * 3 / 4),
        ("24", "42", 0.6 * 1 / 3),
        ("-24", "42", 0.0),
        ("0", "-1", 0.0),
        ("forty", "42", 0.0),
        ("the answer is \u22125", "-5", 1.0),
        ("the answer is \u22125", "5", 0.6 * 1 / 2),
        ("-0", "0", 1.0),
        ("1" * 5000, "11", 0.6 * 3 / 5001),
    ],
)
def test_an_integer_that_is_wrong_is_rewarded_for_its_sign_and_digits(
    response: str, answer: Any, reward: float
) -> None:
    assert score(make_grader(IntegerReward(partial=0.6)), response, answer) == pytest.approx(reward)


def test_the_chosen_integer_counts_and_is_right_or_wrong_as_a_whole() -> None:
    grader = make_grader(IntegerReward(match="first"))
    assert isinstance(grader, Grader)
    result = grader.grade(make_request("7, not 8", answer="7"))
    assert result == {"reward": 1.0, "correct": True, "final_answer": "7"}
    wrong = grader.grade(make_request("8, not 7", answer="7"))
    assert wrong == {"reward": 0.25, "correct": False, "final_answer": "8"}


def test_an_answer_that_is_no_integer_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"the answer '4\.2' is no integer; take another grader"):
        score(make_grader(IntegerReward()), "4.2", "4.2")


@pytest.mark.parametrize("grader", [ExactReward(), RegexReward(pattern="x*"), IntegerReward(), MathReward()])
@pytest.mark.parametrize(
    ("answer", "says"),
    [(None, "has no answer to"), ("", "has the empty answer '' to"), (" \n", "has the empty answer")],
)
def test_prompt_without_an_answer_is_an_error_that_names_the_setting(grader: Any, answer: Any, says: str) -> None:
    with pytest.raises(RewardError, match=f"the prompt {says}.*; set answer_column"):
        score(make_grader(grader), "", answer)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("1/2", "0.5", 1.0),
        ("0.5", r"The answer is $\frac{1}{2}$.", 1.0),
        (r"\frac{1}{2}", r"so \boxed{0.5}", 1.0),
        (r"$\frac{1}{2}$", "1/2", 1.0),
        ("42", r"First \boxed{41}. The final answer is $\boxed{42}$", 1.0),
        ("42", "I think it is 42.", 1.0),
        ("42", "I think it is 43.", 0.0),
        ("x^2+2x+1", "$(x+1)^2$", 1.0),
        ("2x+1", "2", 0.0),
        ("2**10", "1024", 1.0),
        (r"\sqrt{2}", "$2^{1/2}$", 1.0),
        (7, r"\boxed{7}", 1.0),
        ("7", "", 0.0),
        ("1,000", "1000", 1.0),
    ],
)
def test_math_accepts_what_is_equal(answer: Any, response: str, reward: float) -> None:
    assert score(make_grader(MathReward()), response, answer) == reward


def test_reasoning_gym_scores_with_the_tasks_own_scorer() -> None:
    grader = make_grader(ReasoningGymReward())
    metadata = {"source_dataset": "chain_sum"}
    assert score(grader, " 12 \n", "12", metadata) == 1.0
    assert score(grader, "it is 12", "12", metadata) == pytest.approx(2 / 8)
    assert score(grader, "13", "12", metadata) == 0.0


def test_reasoning_gym_scores_the_last_match_of_its_pattern() -> None:
    grader = make_grader(ReasoningGymReward(pattern=r"<answer>(.*?)</answer>"))
    metadata = {"source_dataset": "chain_sum"}
    assert score(grader, "<answer>1</answer> no, <answer> 12 </answer>!", "12", metadata) == 1.0
    assert score(grader, "12", "12", metadata) == 0.0


def test_reasoning_gym_scorer_has_the_parameters_that_made_the_problem() -> None:
    grader = make_grader(ReasoningGymReward())
    metadata = {"source_dataset": "puzzle24", "numbers": [8, 3, 1, 1]}
    assert score(grader, "8 * 3 * 1 * 1", None, metadata) == 1.0
    assert score(grader, "8 * 3 * 1 * 1", None, {**metadata, "parameters": {"max_value": 6}}) < 0.1


@pytest.mark.parametrize(
    "task", ["rearc", "graph_color", "knights_knaves", "futoshiki", "complex_arithmetic", "codeio"]
)
def test_scores_survive_the_way_through_json(task: str) -> None:
    """The metadata of these tasks holds tuples, integer keys or numpy strings."""
    source = ReasoningGymSource(task=task, size=3, seed=5)
    rows = list(reasoning_gym_rows(source, "prompts.source"))
    dataset = reasoning_gym.create_dataset(task, size=3, seed=5)
    grader = make_grader(ReasoningGymReward())
    for row, entry in zip(rows, dataset, strict=True):
        best = entry["answer"] or json.dumps(entry["metadata"]["possible_answer"])
        metadata = json.loads(json.dumps(row.metadata))
        assert score(grader, best, row.answer, metadata) == dataset.score_answer(best.strip(), entry) == 1.0


@pytest.mark.parametrize(
    "question", ["2 + 2 = ", [{"role": "user", "content": "Hello"}, {"role": "user", "content": "2 + 2 = "}]]
)
def test_reasoning_gym_scorer_is_given_the_problem_without_the_chat_template(
    question: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def score_answer(_: ProceduralDataset, answer: str, entry: dict[str, Any]) -> float:
        asked.append(entry["question"])
        return 0.25

    monkeypatch.setattr(ProceduralDataset, "score_answer", score_answer)
    grader = ReasoningGymGrader(ReasoningGymReward())
    metadata = {"source_dataset": "course_schedule"}
    request = make_request("5", prompt="<user>2 + 2 = <assistant>", question=question, answer="4", metadata=metadata)
    assert read_result(grader.grade(request))[0] == 0.25
    assert asked == ["2 + 2 = "]


@pytest.mark.parametrize(
    ("grader", "response", "final_answer"),
    [
        (ExactReward(), " Paris\n", "Paris"),
        (ExactReward(ignore_case=True), "PARIS", "paris"),
        (RegexReward(pattern=r"answer: *(\d+)"), "answer: 5 or answer: 7", "7"),
        (RegexReward(pattern=r"answer: *(\d+)", match="first"), "answer: 5 or answer: 7", "5"),
        (RegexReward(pattern=r"\d+"), "no number", ""),
        (IntegerReward(), "it is 007", "7"),
        (IntegerReward(), "-0", "0"),
        (MathReward(), "It is 0.5.", "1/2"),
        (MathReward(pattern=r"#(.*)"), "1/2", ""),
        (ReasoningGymReward(), " 7 ", "7"),
        (ReasoningGymReward(pattern=r"<a>(.*)</a>"), "<a> 7</a>", "7"),
        (ReasoningGymReward(pattern=r"<a>(.*)</a>"), "7", ""),
    ],
)
def test_graders_tell_the_final_answer(grader: Any, response: str, final_answer: str) -> None:
    made = make_grader(grader)
    assert isinstance(made, Grader)
    request = make_request(response, answer="7", metadata={"source_dataset": "chain_sum"})
    assert read_result(made.grade(request))[2] == final_answer


def test_reasoning_gym_needs_to_know_the_task() -> None:
    with pytest.raises(RewardError, match="source_dataset"):
        score(make_grader(ReasoningGymReward()), "1", "1")

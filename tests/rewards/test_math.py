"""What the math grader takes for right, beside what math-verify takes for right when it reads the answer as LaTeX."""

import pytest
from math_verify import parse, verify  # type: ignore[import-untyped]

from tailrace.config.rewards import MathReward
from tailrace.errors import RewardError
from tailrace.rewards.factory import make_grader
from tailrace.rewards.math import MathGrader
from tests.rewards.requests import make_request

CASES: list[tuple[str, list[str], list[str]]] = [
    # answer, responses that are right, responses that are wrong
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", [r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}"], ["4", "1"]),
    (r"\begin{pmatrix} -2 \\ 1 \end{pmatrix}", [r"$\begin{bmatrix} -2 \\ 1 \end{bmatrix}$"], ["1", r"\boxed{-2}"]),
    (r"\begin{bmatrix} 1 \\[2pt] 2 \end{bmatrix}", [], ["2", "1"]),
    (r"\left( \begin{array}{c} 1 \\ 2 \end{array} \right)", [r"$\begin{pmatrix} 1 \\ 2 \end{pmatrix}$"], ["2"]),
    (r"\begin{cases} x=1 \\ y=2 \end{cases}", [r"\boxed{\begin{cases} x=1 \\ y=2 \end{cases}}"], ["2", "x=1"]),
    (r"\{1, 2, 3\}", [r"$\{3, 2, 1\}$", r"\boxed{\left\{1,2,3\right\}}"], [r"$\{1,2\}$", "3"]),
    (r"\left\{1, 2\right\}", [r"\boxed{\{1,2\}}"], [r"\boxed{\{1,3\}}"]),
    (r"[0, 1)", [r"$[0,1)$", r"\boxed{\left[0,1\right)}"], ["$(0,1)$", "$[0,1]$", "1"]),
    (r"(-\infty, -1) \cup (1, \infty)", [r"$(1,\infty) \cup (-\infty,-1)$"], [r"$(1,\infty)$"]),
    (r"(1, -2)", ["$(1,-2)$"], ["$(-2,1)$", "-2"]),
    (r"(3, -4, 5)", [r"\boxed{(3,-4,5)}"], [r"\boxed{(3,4,5)}", "5"]),
    (r"1, 2", ["$2$ and $1$", r"\boxed{1,2}"], ["2", r"\boxed{1}"]),
    (r"\$5", ["The price is $5", r"\boxed{5}", r"\boxed{\$5.00}"], ["$6", r"\boxed{50}"]),
    (r"\$32,\!348", ["$32,348", r"\boxed{32348}"], ["32", "348"]),
    ("$12.50", ["12.5", r"\boxed{\$12.50}"], ["12", "50"]),
    ("$5 and $6", [r"\boxed{5, 6}"], ["5", "6"]),
    (r"50\%", ["50%", r"\boxed{50\%}", "50 percent", "0.5"], ["5", "40%"]),
    (r"12.5\%", [r"\boxed{12.5\%}", "12.5%"], ["12%", "125%"]),
    (r"5\text{ cm}^2", [r"\boxed{5}", "5 cm"], ["25", "2"]),
    (r"5\,\mathrm{cm}", [r"\boxed{5}"], ["6"]),
    (r"90^\circ", [r"\boxed{90}", r"$90^{\circ}$"], ["9"]),
    (r"3\frac{1}{2}", ["3.5", r"\boxed{\frac{7}{2}}", "3 1/2"], [r"\boxed{\frac{3}{2}}", "1/2"]),
    ("3 1/2", ["7/2", r"\boxed{3\frac12}", "3 1/2"], ["2", "3", "1/2"]),
    ("-1 3/4", ["-1.75", r"\boxed{-\frac74}"], ["-1", "1.25"]),
    ("1,234", ["1234", "1,234", r"\boxed{1{,}234}"], ["1", "234"]),
    ("1{,}234", ["1234"], ["1"]),
    ("1e5", ["100000", r"\boxed{10^5}", "1e5"], ["1", "5"]),
    ("1.5e-3", ["0.0015", r"\boxed{1.5\times10^{-3}}"], ["1.5", "3"]),
    (r"3 \times 10^8", [r"\boxed{300000000}"], ["3", "8"]),
    ("\u22127", ["-7", "The answer is \u22127.", r"\boxed{-7}"], ["7"]),
    ("\u20137", ["-7", "So it is \u20137"], ["7"]),
    ("-7", ["x = \u22127", "\u20137"], ["7"]),
    ("<answer>5</answer>", ["5", "<answer>5</answer>"], ["6"]),
    ("5", ["<think>6</think><answer>5</answer>", "<answer> 5 </answer>"], ["<answer>6</answer>"]),
    (r"\boxed{\frac{1}{2}}", ["0.5", r"\boxed{1/2}"], ["1", "2"]),
    (r"$\frac{1}{2}$", ["0.5"], ["2"]),
    (r"\(7\)", ["7"], ["8"]),
    (r"\[ 7 \]", ["7", r"\boxed{7}"], ["8"]),
    ("$$7$$", ["7"], ["8"]),
    ("The answer is $5$.", ["5"], ["6"]),
    ("The answer is 5", ["5"], ["6"]),
    ("#### 42", ["42"], ["41"]),
    ("42.", ["42", r"\boxed{42.}"], ["41"]),
    ("033", ["33", r"\boxed{033}"], ["3", "0"]),
    (r"\text{Evelyn}", [r"\boxed{\text{Evelyn}}", r"\boxed{Evelyn}"], [r"\boxed{\text{Carla}}"]),
    (r"\text{(C)}", [r"\boxed{C}", r"\boxed{\text{C}}", r"\boxed{(C)}"], [r"\boxed{B}"]),
    ("B", [r"\boxed{\textbf{(B)}}", "B"], [r"\boxed{A}"]),
    ("B.", [r"\boxed{B}", r"\boxed{B.}"], [r"\boxed{A}"]),
    ("x = 5", ["5", r"\boxed{x=5}"], ["x=6", "4"]),
    ("y = 2x + 3", [r"$y=2x+3$"], [r"$y=2x$", "3"]),
    ("2x+1", ["$1+2x$"], ["2", "1"]),
    (r"x \ge 3", [r"$x \geq 3$", r"$[3,\infty)$"], ["$x > 3$", "3"]),
    (r"1 + 2i", ["$2i+1$"], ["1", "$1-2i$"]),
    (r"\pm 2", [r"\boxed{\pm 2}", r"$2, -2$"], ["2"]),
    ("2**10", ["1024", "2**10"], ["10", "2"]),
    (r"0.\overline{3}", [r"\boxed{0.\overline{3}}"], ["0", "3"]),
]
OURS = {
    "3 1/2",
    "-1 3/4",
    "1e5",
    "1.5e-3",
    "\u20137",
    "<answer>5</answer>",
    "The answer is 5",
    "2**10",
    "$5 and $6",
    "42.",
    "B.",
}
"""Answers that math-verify does not read as they are meant within $…$.
"""


@pytest.fixture(scope="module")
def grader() -> MathGrader:
    made = make_grader(MathReward())
    assert isinstance(made, MathGrader)
    return made


@pytest.mark.parametrize(("answer", "right", "wrong"), CASES)
def test_answers_are_read_as_they_are_meant(
    grader: MathGrader, answer: str, right: list[str], wrong: list[str]
) -> None:
    given = {response: grader.grade(make_request(response, answer=answer)) for response in (*right, *wrong, answer)}
    assert given == {response: response in right or response == answer for response in given}


@pytest.mark.parametrize("answer", [answer for answer, *_ in CASES if answer not in OURS])
def test_answers_and_responses_are_compared_as_math_verify_compares_them(grader: MathGrader, answer: str) -> None:
    gold = parse(f"${answer}$", parsing_timeout=None)
    at = [case[0] for case in CASES].index(answer)
    for other, *_ in CASES[at % 8 :: 8]:
        response = rf"It is \boxed{{{other}}}"
        if other not in OURS and other != answer and "[ 7 ]" not in answer and "cases" not in answer + other:
            theirs = verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)
            assert grader.grade(make_request(response, answer=answer)) == theirs, other


@pytest.mark.parametrize("answer", ["", "   ", "$$"])
def test_an_answer_that_is_nothing_is_an_error_that_quotes_it(grader: MathGrader, answer: str) -> None:
    with pytest.raises(RewardError, match="is not a mathematical expression"):
        grader.grade(make_request("1", answer=answer))


@pytest.mark.parametrize(
    ("pattern", "response", "right"),
    [
        (r"<answer>(.*?)</answer>", r"<answer>\frac{1}{2}</answer> and 7", True),
        (r"<answer>(.*?)</answer>", r"<answer>7</answer> <answer>0.5</answer>", True),
        (r"<answer>(.*?)</answer>", r"\boxed{\frac{1}{2}}", False),
        (r"<answer>(.*?)</answer>", r"<answer></answer>", False),
        (r"####(.*)", "so 1/2\n#### 1/2", True),
    ],
)
def test_a_pattern_says_where_the_expression_stands(pattern: str, response: str, right: bool) -> None:
    grader = MathGrader(MathReward(pattern=pattern))
    assert grader.grade(make_request(response, answer=r"\frac{1}{2}")) is right


def test_the_first_match_counts_where_that_is_asked_for() -> None:
    grader = MathGrader(MathReward(pattern=r"\d+", match="first"))
    assert grader.grade(make_request("7 then 8", answer="7")) is True

"""Answers that the math grader takes for right, against math-verify on the answer as LaTeX."""

import pytest
from math_verify import parse, verify  # type: ignore[import-untyped]

from tailrace.config.rewards import MathReward
from tailrace.errors import RewardError
from tailrace.rewards.base import CORRECT
from tailrace.rewards.factory import make_grader
from tailrace.rewards.math import MathGrader
from tailrace.rewards.results import read_result
from tests.rewards.requests import make_request

CASES: list[tuple[str, list[str], list[str]]] = [
    # answer, right responses, wrong responses
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
    ("2-1 1/2", ["0.5", r"\boxed{\frac12}"], ["3.5", "2", "1"]),
    ("1,234 1/2", ["1234.5", r"\boxed{1{,}234.5}"], ["234.5", "1"]),
    ("10 3/4%", ["10.75%", "10 3/4 %", r"\boxed{\frac{43}{4}\%}", "It is 10 3/4 percent."], ["1075%", "3", "43%"]),
    ("33 1/3 percent", [r"\boxed{\frac{100}{3}\%}", r"$33\frac13\%$"], ["33%", r"\boxed{33\%}"]),
    (r"10\frac{3}{4}\%", ["10.75%", "10 3/4%"], ["0.75%", "10%", r"\boxed{\frac34\%}"]),
    (r"1 1/2 \pi", [r"\boxed{\frac{3\pi}{2}}", r"$1.5\pi$", r"$1\frac12\pi$"], [r"\boxed{\frac{3}{2\pi}}", "1.5"]),
    (r"1 1/2\pi", [r"\boxed{\frac{3\pi}{2}}"], [r"\boxed{\frac{3}{2\pi}}", r"\boxed{\frac{\pi}{2}}"]),
    ("2 1/2 x", [r"\boxed{\frac{5x}{2}}", "$2.5x$"], [r"\boxed{\frac{5}{2x}}", "2.5"]),
    ("2 1/2x", [r"\boxed{\frac{5x}{2}}"], [r"\boxed{\frac{5}{2x}}", r"\boxed{\frac{x}{2}}"]),
    (r"3 \dfrac{1}{2} x", [r"\boxed{\frac{7x}{2}}", "$3.5x$"], [r"\boxed{\frac{3x}{2}}"]),
    ("(1 1/2,3)", [r"$(\frac32, 3)$"], ["$(1,3)$", "3"]),
    ("1 1/2, 2 1/2", [r"\boxed{\frac52, \frac32}", "$1.5$ and $2.5$"], ["2.5", "1.5"]),
    (r"\sqrt{2 1/4}", ["1.5", r"\boxed{\frac32}"], ["2.25"]),
    (r"2^{1 1/2}", [r"\boxed{2\sqrt2}"], ["1.5", "2"]),
    ("<b>5</b>", ["5", "It is <B>5</B>.", "<p><b> 5 </b><br/></p>"], ["6", "<b>6</b>"]),
    ("1<b>2", [], ["1", "2"]),
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
MEANT = {
    "3 1/2": r"\frac{7}{2}",
    "-1 3/4": r"-\frac{7}{4}",
    "2-1 1/2": r"2-\frac{3}{2}",
    "1,234 1/2": r"\frac{2469}{2}",
    "10 3/4%": r"10.75\%",
    "33 1/3 percent": r"\frac{100}{3}\%",
    r"10\frac{3}{4}\%": r"10.75\%",
    r"1 1/2 \pi": r"\frac{3}{2} \pi",
    r"1 1/2\pi": r"\frac{3}{2} \pi",
    "2 1/2 x": r"\frac{5}{2} x",
    "2 1/2x": r"\frac{5}{2} x",
    r"3 \dfrac{1}{2} x": r"\frac{7}{2} x",
    "(1 1/2,3)": r"(\frac{3}{2},3)",
    "1 1/2, 2 1/2": r"\frac{3}{2}, \frac{5}{2}",
    r"\sqrt{2 1/4}": r"\sqrt{\frac{9}{4}}",
    r"2^{1 1/2}": r"2^{\frac{3}{2}}",
    "1e5": "100000",
    "1.5e-3": "0.0015",
    "\u20137": "-7",
    "<answer>5</answer>": "5",
    "<b>5</b>": "5",
    "The answer is 5": "5",
    "2**10": "1024",
    "$5 and $6": "5, 6",
    "42.": "42",
    "B.": "B",
}
"""Answers that math-verify misreads within $…$, and LaTeX of the same meaning that it reads right."""


@pytest.fixture(scope="module")
def grader() -> MathGrader:
    made = make_grader(MathReward())
    assert isinstance(made, MathGrader)
    return made


def is_right(grader: MathGrader, response: str, answer: str) -> bool:
    """Whether the grader finds a response right."""
    return bool(read_result(grader.grade(make_request(response, answer=answer)))[1][CORRECT])


@pytest.mark.parametrize(("answer", "right", "wrong"), CASES)
def test_answers_are_read_as_they_are_meant(
    grader: MathGrader, answer: str, right: list[str], wrong: list[str]
) -> None:
    given = {response: is_right(grader, response, answer) for response in (*right, *wrong, answer)}
    assert given == {response: response in right or response == answer for response in given}


@pytest.mark.parametrize("answer", [answer for answer, *_ in CASES])
def test_answers_and_responses_are_compared_as_math_verify_compares_them(grader: MathGrader, answer: str) -> None:
    gold = parse(f"${MEANT.get(answer, answer)}$", parsing_timeout=None)
    at = [case[0] for case in CASES].index(answer)
    for other, *_ in CASES[at % 8 :: 8]:
        boxed = other != "The answer is 5"  # math-verify reads no number in a boxed sentence
        if boxed and other != answer and "[ 7 ]" not in answer and "cases" not in answer + other:
            response = parse(rf"It is \boxed{{{MEANT.get(other, other)}}}", parsing_timeout=None)
            theirs = verify(gold, response, timeout_seconds=None)
            assert is_right(grader, rf"It is \boxed{{{other}}}", answer) == theirs, other


def test_an_answer_that_is_nothing_is_an_error_that_quotes_it(grader: MathGrader) -> None:
    with pytest.raises(RewardError, match=r"the answer '\$\$' is not a mathematical expression"):
        grader.grade(make_request("1", answer="$$"))


@pytest.mark.parametrize("answer", [answer for answer, *_ in CASES])
def test_answers_that_are_read_as_they_are_meant_are_not_doubted(grader: MathGrader, answer: str) -> None:
    assert grader.can_be_right(make_request(answer, answer=answer))


@pytest.mark.parametrize(
    "answer",
    [
        "5 dogs",
        "5dogs",
        "x = 5 dogs",
        "dogs: 5",
        "5 red dogs.",
        "3 dogs and 4 cats",
        "about 5",
        r"\text{5 dogs}",
        "5 (dogs)",
    ],
)
def test_a_number_among_words_that_are_no_units_is_doubted(grader: MathGrader, answer: str) -> None:
    assert not grader.can_be_right(make_request(answer, answer=answer))
    assert not is_right(grader, "5", answer)


@pytest.mark.parametrize(
    "answer", ["5 apples", "x = 5 miles", r"5 \text{ dogs}", "yes", "no solution", "2abc", r"2 \sin x"]
)
def test_units_and_words_alone_are_not_doubted(grader: MathGrader, answer: str) -> None:
    assert grader.can_be_right(make_request(answer, answer=answer))


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
    assert is_right(grader, response, r"\frac{1}{2}") is right


def test_the_first_match_counts_where_that_is_asked_for() -> None:
    grader = MathGrader(MathReward(pattern=r"\d+", match="first"))
    assert is_right(grader, "7 then 8", "7")


@pytest.mark.parametrize(
    ("responses", "final_answer"),
    [
        (["so it is 0.5", r"\boxed{\frac{1}{2}}", "1/2", r"$\frac12$", r"\boxed{0.50}"], "1/2"),
        (["7", "3 and 4 make 7.", r"\boxed{7.0}", "1e1 - 3 = 7"], "7"),
        ([r"\boxed{1{,}234}", "1,234", "1234"], "1234"),
        (["no idea", ""], ""),
        ([r"$\{2, 1\}$", r"\boxed{\left\{1,2\right\}}"], "{1, 2}"),
    ],
)
def test_responses_that_come_to_the_same_have_the_same_final_answer(
    grader: MathGrader, responses: list[str], final_answer: str
) -> None:
    for response in responses:
        assert read_result(grader.grade(make_request(response, answer="12345")))[2] == final_answer, response
    equal = read_result(grader.grade(make_request(r"\frac{1}{2}", answer=r"\frac{1}{2}")))
    assert equal == (1.0, {"correct": 1.0}, "1/2"), "also where the texts are equal"


def test_a_number_of_very_many_digits_has_a_final_answer(grader: MathGrader) -> None:
    digits = "1" * 5000
    result = read_result(grader.grade(make_request(rf"\boxed{{{digits}}}", answer="1")))
    assert result[1:] == ({"correct": 0.0}, digits)

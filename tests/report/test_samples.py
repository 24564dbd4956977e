import html
import io
import json
import re
from pathlib import Path

import markdown  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tailrace.report import sample_list, sinks
from tailrace.report.page import write_report
from tailrace.report.sample_list import print_samples
from tailrace.report.sample_page import CHARACTERS, sample_pages
from tailrace.report.sample_text import grouped, visible
from tailrace.report.samples import SampleRecord
from tests.conftest import Command
from tests.helpers.sample_records import make_sample
from tests.report.synthetic import SyntheticRun, write_run

EVIL = (
    "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "user\u202egnp.exe \u2066x\u2069 \u200bzero\ufeff",
    "nul \x00 bell \x07 back \x08 return \r del \x7f",
    "<|im_end|>&lt;b&gt; {{ 7 * 7 }} {% raw %}",
)
RISKY = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def write_samples(run_dir: Path, records: list[SampleRecord]) -> Path:
    """Write a run with some events and these samples."""
    write_run(run_dir, SyntheticRun(total_steps=2, samples=8, evaluate_every=2).attempt(0, 2))
    (run_dir / "samples.jsonl").write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return run_dir


def rewarded(*rewards: float | None, step: int = 1, group: int = 0) -> list[SampleRecord]:
    return [make_sample(step, group, sample, reward=reward) for sample, reward in enumerate(rewards)]


def seen(page: str) -> str:
    """The text of the samples that a reader sees."""
    section = page[page.index('<section id="samples">') : page.index("</section>", page.index('id="samples"'))]
    return html.unescape(re.sub(r"<[^>]+>", " ", section))


@given(st.text(st.characters(exclude_categories=[])))
def test_nothing_that_is_shown_can_act_on_a_terminal_or_turn_its_text(text: str) -> None:
    shown = visible(text)
    assert not RISKY.search(shown)
    assert shown.count("\n") == text.count("\n")


def test_ordinary_text_of_any_script_is_shown_as_it_is() -> None:
    text = "naïve\tπ ≈ 3\nمرحبا שלום 数学 👩‍🚀 नमस्ते"
    assert visible(text) == text


def test_samples_stand_by_reward_and_those_that_were_not_graded_are_the_worst() -> None:
    records = rewarded(0.5, None, 1.0, -2.0)
    assert [sample.reward for sample in grouped(records)[0].samples] == [1.0, 0.5, -2.0, None]
    assert [sample.reward for sample in grouped(records, worst_first=True)[0].samples] == [None, -2.0, 0.5, 1.0]


def test_the_worst_prompt_comes_first_where_that_is_asked_for() -> None:
    records = [*rewarded(1.0, 0.0, group=3), *rewarded(0.0, 0.0, group=7)]
    assert [group.number for group in grouped(records)] == [3, 7]
    assert [group.number for group in grouped(records, worst_first=True)] == [7, 3]


def test_the_command_shows_the_best_and_the_worst_of_the_newest_step(tmp_path: Path, tailrace_here: Command) -> None:
    records = [*rewarded(1.0, 0.0, step=1), *rewarded(0.25, 1.0, 0.0, step=2)]
    done = tailrace_here("samples", str(write_samples(tmp_path / "run", records)))
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "run · step 2 · 1 prompt"
    assert "response 2.0.1" in done.stdout
    assert "response 2.0.2" in done.stdout
    assert "response 2.0.0" not in done.stdout
    assert "1 more" in done.stdout
    assert done.stdout.index("reward 1 ") < done.stdout.index("reward 0 ")
    assert "\x1b" not in done.stdout


def test_the_command_shows_what_it_is_asked_for(tmp_path: Path, tailrace_here: Command) -> None:
    records = [*rewarded(1.0, 0.0), make_sample(0, kind="evaluation", advantage=None, response="greedy")]
    run = str(write_samples(tmp_path / "run", records))
    worst = tailrace_here("samples", run, "--step", "1", "--worst", "--limit", "1").stdout
    assert "response 1.0.1" in worst
    assert "response 1.0.0" not in worst
    assert "greedy" in tailrace_here("samples", run, "--evaluation").stdout
    lines = tailrace_here("samples", run, "--json", "--worst").stdout.splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "7"], "no samples of step 7; near it are those of 1, 2"),
        (["--evaluation"], "no samples of an evaluation yet"),
    ],
)
def test_samples_that_there_are_not_are_told_of(
    tmp_path: Path, tailrace_here: Command, options: list[str], said: str
) -> None:
    run = write_samples(tmp_path / "run", [*rewarded(1.0), *rewarded(1.0, step=2)])
    done = tailrace_here("samples", str(run), *options)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_run_without_samples_and_what_is_no_run_are_told_apart(tmp_path: Path, tailrace_here: Command) -> None:
    run = write_run(tmp_path / "run", SyntheticRun(total_steps=1).attempt(0, 1))
    assert "observe.sample_groups is 0" in tailrace_here("samples", str(run)).stderr
    assert "is not the directory of a run" in tailrace_here("samples", str(tmp_path)).stderr


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_cannot_act_on_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    texts = [
        make_sample(sample=k, prompt=text, response=text, answer=text, failure=text) for k, text in enumerate(EVIL)
    ]
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, color_system=None, width=60, highlight=False)
    monkeypatch.setattr(sample_list, "Console", lambda **_: console)
    run = write_samples(tmp_path / "run", texts)
    print_samples(run, step=None, evaluation=False, worst=False, limit=0, full=False, json=False)
    assert not RISKY.search(output.getvalue())
    for word in ("</pre></script>", "␛[31mred", "⟨U+202E⟩", "nul ␀", "<|im_end|>&lt;b&gt;"):
        assert word in output.getvalue()


def test_a_long_text_is_shortened_unless_it_is_wanted_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(f"line {number}" for number in range(100))
    run = write_samples(tmp_path / "run", [make_sample(response=text)])
    options = {"step": None, "evaluation": False, "worst": False, "limit": 2, "json": False}
    print_samples(run, full=False, **options)  # type: ignore[arg-type]
    short = capsys.readouterr().out
    assert "line 17\n" in short
    assert "line 50" not in short
    assert "76 lines left out" in short
    print_samples(run, full=True, **options)  # type: ignore[arg-type]
    assert "line 50" in capsys.readouterr().out


def test_the_page_shows_texts_and_runs_none_of_them(tmp_path: Path) -> None:
    records = [make_sample(sample=k, prompt=EVIL[0], response=text, failure=text) for k, text in enumerate(EVIL)]
    page = write_report(write_samples(tmp_path / "run", records)).read_text(encoding="utf-8")
    section = page[page.index('<section id="samples">') :]
    assert "<script>alert" not in page
    assert "<img" not in section
    assert not RISKY.search(section)
    text = seen(page)
    for word in (
        "<script>alert(1)</script>",
        "␛[31mred",
        "user⟨U+202E⟩gnp.exe",
        "nul ␀",
        "<|im_end|>&lt;b&gt; {{ 7 * 7 }}",
    ):
        assert word in text


def test_the_page_folds_long_texts_and_bounds_them(tmp_path: Path) -> None:
    short, long = make_sample(response="short"), make_sample(sample=1, response="x" * 50_000)
    page = write_report(write_samples(tmp_path / "run", [short, long])).read_text(encoding="utf-8")
    assert page.count('<details class="long">') == 1
    assert page.count("x") > CHARACTERS
    assert "x" * (CHARACTERS + 1) not in page
    assert f"[… {50_000 - 2 * CHARACTERS // 3 - CHARACTERS // 3:,} characters left out …]" in page


def test_a_page_has_the_first_and_the_last_step_and_not_all_of_a_long_run() -> None:
    pages = sample_pages(make_sample(step, sample=sample) for step in range(1, 501) for sample in range(16))
    assert pages is not None
    assert (pages.kept, pages.newest.id) == (500, "training-500")
    ids = [place.id for place in pages.places]
    assert (ids[0], ids[-1], len(ids)) == ("training-1", "training-500", 50)


@pytest.mark.parametrize("steps", [1, 2, 3, 100, 1000])
def test_a_page_of_a_long_run_has_the_first_and_the_last_of_each_kind(steps: int) -> None:
    records = [make_sample(step, kind="evaluation") for step in range(0, steps + 1, steps)]
    pages = sample_pages(records + [make_sample(step) for step in range(1, steps + 1)])
    assert pages is not None
    ids = [place.id for place in pages.places]
    assert len(ids) == min(60, steps + 2)
    assert (ids[0], ids[1], ids[-2], ids[-1]) == (
        "evaluation-0",
        "training-1",
        f"training-{steps}",
        f"evaluation-{steps}",
    )
    assert pages.newest.id == f"training-{steps}"


def test_a_page_with_huge_groups_stays_bounded() -> None:
    records = [make_sample(step, group, sample) for step in (1, 2, 3) for group in range(20) for sample in range(100)]
    pages = sample_pages(records)
    assert pages is not None
    assert [len(place.groups) for place in pages.places] == [4, 4]


def test_a_page_of_a_run_without_samples_has_no_place_for_them(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path, SyntheticRun(total_steps=1).attempt(0, 1))).read_text(encoding="utf-8")
    assert '<section id="samples">' not in page


def test_tensorboard_shows_texts_as_code_in_which_nothing_has_a_meaning() -> None:
    records = [make_sample(sample=k, response=text, parts={"<b>*x*": 1.0}) for k, text in enumerate(EVIL[:2])]
    text = sinks.markdown(records)
    assert not RISKY.search(text)
    shown = markdown.markdown(text, extensions=["tables", "fenced_code"])  # in the way of TensorBoard
    assert "<script" not in shown
    assert "<img" not in shown
    assert "<b>" not in shown
    assert "&lt;script&gt;alert(1)" in shown

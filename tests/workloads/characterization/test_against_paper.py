"""The public part of PolyTrace's data has the figures that the paper prints, and docs/workloads.md tells them.

The paper prints means of one iteration (section 3.4, figure 16); the public part is of several. `TAILRACE_DATA` names
the folder of the data.
"""

import os
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import polars as pl
import pytest

from tailrace.report.text import number
from tailrace.workloads.characterization.description import Description
from tailrace.workloads.importers.factory import import_trace
from tailrace.workloads.trace import Provenance

DATA = Path(os.environ.get("TAILRACE_DATA", "/nonexistent"))
PAGE = Path(__file__).parents[3] / "docs" / "workloads.md"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="TAILRACE_DATA does not name the folder of public traces")


@cache
def described(folder: str) -> Description:
    files = [path for path in sorted((DATA / "polytrace" / folder).iterdir()) if ".jsonl" in path.name]
    return Description.of(import_trace(files, Provenance(source=folder)))


@cache
def printed(task: str, quantity: str) -> float:
    """What the paper prints about figure 16."""
    rows = pl.read_csv(DATA / "papers.csv", infer_schema=False)
    found = rows.filter(
        pl.col("paper") == "PolyTrace",
        pl.col("where") == "3.4, Fig. 16",
        pl.col("algorithm").str.starts_with(task),
        pl.col("quantity") == quantity,
    )
    return float(found["value"].item())


def tokens_of_turns(description: Description) -> tuple[float, float]:
    """The mean tokens that were generated in the first turn, and in any."""
    assert description.turns is not None
    first, every = description.turns.by_turn[0].generated_tokens, description.turns.turn_tokens
    assert first is not None
    assert every is not None
    return first.mean, every.mean


def compared() -> Iterator[tuple[str, float, float, float]]:
    """Yield what is compared, the paper's figure, ours, and by what share they may differ."""
    video, maths = described("video_7b"), described("dapo_math_32b")
    first, every = tokens_of_turns(described("search_r1_7b"))
    mean, spread = "output length, mean", "output length, standard deviation"
    inputs = printed("video", "input length, mean")
    yield "video understanding, prompt tokens, mean", inputs, video.prompt_tokens.mean, 0.01
    yield "video understanding, response tokens, mean", printed("video", mean), video.response_tokens.mean, 0.03
    yield "searching, tokens of the first turn, mean", printed("searching", mean), first, 0.03
    yield "searching, tokens of any turn, mean", printed("searching", mean), every, 0.6
    outputs = printed("mathematics", spread)
    yield "mathematics (DAPO), response tokens, deviation", outputs, maths.response_tokens.deviation, 0.1


def test_figures_are_close_to_those_of_the_paper_and_the_page_has_them() -> None:
    page = PAGE.read_text()
    for name, paper, ours, tolerance in compared():
        assert ours == pytest.approx(paper, rel=tolerance), name
        assert f"| {name} | {paper:,.1f} | {ours:,.1f} | {100 * (ours / paper - 1):+.1f} % |" in page


def test_single_steps_spread_around_the_iteration_of_the_paper() -> None:
    spreads = [step.response_tokens.deviation for step in described("dapo_math_32b").steps]
    assert min(spreads) < printed("mathematics", "output length, standard deviation") < max(spreads)
    means = [step.response_tokens.mean for step in described("video_7b").steps]
    assert min(means) < printed("video", "output length, mean") < max(means)


def shares(description: Description) -> tuple[str, str, str]:
    """The correlation, the share that the prompt explains, and the longest response over the 90th percentile."""
    assert description.correlation is not None
    assert description.prompt_share is not None
    tail = description.response_tokens.tail
    return f"{description.correlation.pearson:.2f}", f"{100 * description.prompt_share:.1f} %", f"{tail:.1f}"


def medians(description: Description) -> tuple[list[str], list[str]]:
    """By the number of turns: the medians of the tokens read in the last one, and of those generated in each."""
    assert description.turns is not None
    read, made = [], []
    for part in description.turns.by_count:
        assert part.context_tokens is not None
        assert part.turn_tokens is not None
        read.append(number(part.context_tokens.percentiles[50]))
        made.append(number(part.turn_tokens.percentiles[50]))
    return read, made


def typical(cells: list[list[float]]) -> str:
    return f"{statistics.median(cells[one][other] for one in range(len(cells)) for other in range(one)):.2f}"


def test_what_the_paper_says_holds_here_as_the_page_tells() -> None:
    page = PAGE.read_text()
    folders = [described(folder) for folder in ("dapo_math_32b", "video_7b", "search_r1_7b")]
    for line in zip(*map(shares, folders), strict=True):
        assert f"| {' | '.join(line)} |" in page
    read, made = medians(folders[2])
    assert f"| {', '.join(read)} |" in page
    assert f"| {', '.join(made)} |" in page
    for kind in ("response_tokens", "prompt_tokens"):
        distances = [typical(getattr(folder.distances, kind)) for folder in folders[:2]]
        assert f"| {' | '.join(distances)} |" in page

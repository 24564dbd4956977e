"""The page of traces shows every view that the traces have, and needs no network."""

import re
from typing import Any

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
import pytest

from tailrace.report.workload.page import render
from tailrace.report.workload.sections import workload_sections
from tests.report.test_page import embedded, words
from tests.report.workload.traces import conversations, requests

TITLES = [
    *("How long", "How varied", "By prompt", "Over steps", "Turns and tools"),
    "What length-aware scheduling can gain",
]
OF_EVERY_TRACE = ["prompts", "responses", "prompts-cumulative", "responses-cumulative", "tail", "joint-0"]
OF_CONVERSATIONS = [
    *("rewards", "prompt-map-0", "prompt-share-by-step", "prompts-by-step", "responses-by-step"),
    *("distances-responses-0", "distances-prompts-0", "turns-by-step", "rewards-by-step-0", "kept", "staleness"),
    *("turns", "by-turn", "context-by-count", "generated-by-count", "tool-seconds", "tool-tokens"),
    *("recall", "tail-by-step", "recall-by-step"),
]


@pytest.fixture(scope="module")
def page() -> str:
    return render({"search": conversations()})


@pytest.fixture(scope="module")
def figures(page: str) -> dict[str, Any]:
    found: dict[str, Any] = embedded(page, "figures-data")
    return found


def test_every_view_is_there_in_the_order_of_reading(page: str, figures: dict[str, Any]) -> None:
    assert re.findall("<h2>(.*?)</h2>", page) == TITLES
    assert set(figures) == {f"workload-{name}" for name in OF_EVERY_TRACE + OF_CONVERSATIONS}
    assert re.findall(r'<div class="chart" id="([^"]+)"', page) == list(figures)


def test_every_chart_is_valid_plotly_with_axes_and_a_caption(page: str, figures: dict[str, Any]) -> None:
    for figure in figures.values():
        go.Figure(figure)
        assert all(len(drawn["x"]) for drawn in figure["data"])
        assert all(figure["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
    assert all(re.findall('<p class="caption">(.*?)</p>', page))


def test_the_page_needs_no_network_and_is_small(page: str) -> None:
    own = page[: page.index("<script>")] + page[page.index("<body>") :]
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", own)
    assert len(page) < 6e6


def test_captions_tell_the_figures_of_the_trace(page: str) -> None:
    described, text = conversations(), words(page)
    assert described.prompt_share is not None
    assert f"The prompt explains {100 * described.prompt_share:.1f} % of the variance" in text
    assert described.response_trend is not None
    assert f"Drift of {100 * described.response_trend.drift:+.3g} % a step" in text
    assert f"Of the longest 20 %: {100 * described.longest_recall[20]:.1f} %" in text
    cached = 100 * (190 / 250 + 340 / 450) / 2
    assert f"After the first turn the cache holds {cached:.1f} % of what is read" in text


def test_the_charts_draw_the_figures_of_the_trace(figures: dict[str, Any]) -> None:
    described = conversations()
    *_, median = figures["workload-responses-by-step"]["data"]
    assert median["x"] == list(range(1, 13))  # people count steps from 1
    assert median["y"] == [step.response_tokens.percentiles[50] for step in described.steps]
    (cumulative,) = figures["workload-responses-cumulative"]["data"]
    assert (cumulative["y"][0], cumulative["y"][-1]) == (0.0, pytest.approx(1.0))
    (joint,) = figures["workload-joint-0"]["data"]
    assert sum(count or 0 for row in joint["customdata"] for count in row) == described.samples
    (turns,) = figures["workload-turns"]["data"]
    assert sum(turns["y"]) == pytest.approx(1)


def test_the_area_of_a_histogram_is_in_proportion_to_its_shares(figures: dict[str, Any]) -> None:
    (drawn,) = figures["workload-responses"]["data"]
    widths = np.diff(np.log2(drawn["x"][1:]))
    areas = np.array(drawn["y"][1:-1]) * widths
    assert areas / areas.sum() == pytest.approx(np.array(drawn["customdata"][1:-1]))
    assert max(drawn["y"]) == 1.0


def test_several_traces_share_the_axes_and_heat_maps_stand_side_by_side() -> None:
    sections = workload_sections({"search": conversations(), "code": conversations(steps=5)})
    found = {figure.id: figure for section in sections for figure in section.figures}
    responses = found["workload-responses"]
    assert [drawn["name"] for drawn in responses.data] == ["search", "code"]
    assert len({drawn["line"]["color"] for drawn in responses.data}) == 2
    assert responses.layout["showlegend"]
    assert [found[f"workload-joint-{number}"].title for number in (0, 1)] == [
        "Prompt and response: search",
        "Prompt and response: code",
    ]
    legend = [drawn["name"] for drawn in found["workload-prompts-by-step"].data if drawn["showlegend"]]
    assert legend == ["search", "code"]


def test_a_view_that_a_trace_lacks_is_absent_with_its_reason() -> None:
    page = render({"service": requests()})
    assert re.findall("<h2>(.*?)</h2>", page) == ["How long", "How varied", "By prompt"]
    assert set(embedded(page, "figures-data")) == {f"workload-{name}" for name in OF_EVERY_TRACE}
    assert "It is unknown what a prompt explains. One sample a group." in words(page)


def test_a_trace_with_more_views_stands_beside_one_with_fewer() -> None:
    page = render({"service": requests(), "search": conversations()})
    assert {f"workload-{name}" for name in OF_EVERY_TRACE} < set(embedded(page, "figures-data"))
    assert "service: one sample a group." in words(page)
    assert [len(figure["data"]) for figure in embedded(page, "figures-data").values() if figure["data"]]


def test_names_cannot_end_the_script_that_holds_them() -> None:
    assert "</script><b>" not in render({"</script><b>": requests()})


def test_one_sample_alone_has_a_page() -> None:
    assert re.findall("<h2>(.*?)</h2>", render({"one": requests(1)})) == ["How long", "How varied", "By prompt"]

"""How far the responses to a prompt are alike (PolyTrace, section 3.1, figure 5)."""

from collections.abc import Sequence

from tailrace.report.charts import Figure
from tailrace.report.text import percent
from tailrace.report.workload.base import TALL, Workload, caption, count_axis, heat, layout, share_axis, titled, told
from tailrace.report.workload.steps import value_figure
from tailrace.workloads.characterization.description import Description


def prompt_figures(shown: Sequence[Workload]) -> list[Figure | None]:
    """Return a map of lengths for each trace with groups of several samples, and what prompts explain over steps."""
    return [*(prompt_map_figure(shown, workload) for workload in shown), share_by_step_figure(shown)]


def prompt_map_figure(shown: Sequence[Workload], workload: Workload) -> Figure | None:
    """Draw the lengths of all responses to the prompts of one step; None for groups of one sample."""
    prompts = workload.description.prompt_map
    if prompts is None:
        return None
    samples = max(map(len, prompts.lengths))
    cells = [[*row, *[None] * (samples - len(row))] for row in prompts.lengths]
    places = {"x": list(range(1, samples + 1)), "y": list(range(1, len(cells) + 1))}
    return Figure(
        id=f"workload-prompt-map-{shown.index(workload)}",
        title=titled("Responses to each prompt", shown, workload),
        caption=caption(
            f"A row is a prompt of step {prompts.step + 1}, a cell one response.", _share(workload.description)
        ),
        data=[heat(cells, "tokens", "prompt %{y}, sample %{x}", **places)],
        layout=layout([], count_axis("Sample", samples), count_axis("Prompt, by mean length", len(cells))),
        height=TALL,
    )


def share_by_step_figure(shown: Sequence[Workload]) -> Figure | None:
    """Draw the share of the variance that the prompt explains in each step; None where no trace has it in two."""
    return value_figure(
        shown,
        lambda step: None if step.prompt_share is None else max(0.0, step.prompt_share),
        id="prompt-share-by-step",
        title="Variance that the prompt explains, over steps",
        words="Of log-length: at 100 % a prompt decides the length, at 0 % it tells nothing.",
        y=share_axis("Of the variance"),
        hover="%{y:.1%}",
        height=TALL,
    )


def unknown_prompts(shown: Sequence[Workload]) -> str:
    """Return a sentence on the traces for which it is unknown what a prompt explains, with the reason."""
    reasons = told(shown, lambda description: description.no_prompt_share)
    return caption("It is unknown what a prompt explains.", reasons) if reasons else ""


def _share(description: Description) -> str:
    if description.prompt_share is None:
        return ""
    share = max(0.0, description.prompt_share)
    pattern = "rows of one colour" if share >= 0.8 else "rows of similar colours" if share >= 0.3 else "mixed rows"
    return f"The prompt explains {percent(share)} of the variance of log-length: {pattern}."

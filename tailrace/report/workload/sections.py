"""All charts of workloads, in the order in which they are read."""

from collections.abc import Mapping

from tailrace.report.charts import Section, drawn
from tailrace.report.workload.base import workloads
from tailrace.report.workload.lengths import length_figures, length_table
from tailrace.report.workload.prompts import prompt_figures, unknown_prompts
from tailrace.report.workload.scheduling import scheduling_figures
from tailrace.report.workload.steps import step_figures
from tailrace.report.workload.turns import tool_table, turn_figures
from tailrace.report.workload.variety import variety_figures
from tailrace.workloads.characterization.description import Description


def workload_sections(descriptions: Mapping[str, Description]) -> list[Section]:
    """Return the charts of traces, side by side, by their names. Charts and sections without data are left out."""
    shown = workloads(descriptions)
    made = [
        Section("How long", drawn(length_figures(shown)), length_table(shown)),
        Section("How varied", drawn(variety_figures(shown))),
        Section("By prompt", drawn(prompt_figures(shown)), note=unknown_prompts(shown)),
        Section("Over steps", drawn(step_figures(shown))),
        Section("Turns and tools", drawn(turn_figures(shown)), tool_table(shown)),
        Section("What length-aware scheduling can gain", drawn(scheduling_figures(shown))),
    ]
    return [section for section in made if section.figures or section.note]

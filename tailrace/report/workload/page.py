"""The page of traces: one HTML file that needs no network."""

from collections.abc import Mapping

from tailrace.report.markup import charts_as_json, environment
from tailrace.report.workload.sections import workload_sections
from tailrace.workloads.characterization.description import Description


def render(descriptions: Mapping[str, Description]) -> str:
    """Render the page of traces, side by side, by their names."""
    sections = workload_sections(descriptions)
    return (
        environment()
        .get_template("workload.html.j2")
        .render(
            title=", ".join(descriptions),
            traces=[_facts(name, description) for name, description in descriptions.items()],
            sections=sections,
            figures=charts_as_json(sections),
        )
    )


def _facts(name: str, description: Description) -> dict[str, str]:
    """Return the row of a trace in the table at the head of the page."""
    provenance = description.provenance
    return {
        "Trace": name,
        "Source": provenance.source,
        "Model": provenance.model or "–",
        "Algorithm": provenance.algorithm or "–",
        "Samples": f"{description.samples:,}",
        "Groups": f"{description.groups:,}",
        "Steps": f"{len(description.steps):,}",
    }

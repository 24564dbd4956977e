"""The workload of a run, in its report."""

from dataclasses import replace

from tailrace.errors import TraceError, one_line
from tailrace.report.charts import Section
from tailrace.report.run_data import RunData
from tailrace.report.workload.sections import workload_sections
from tailrace.workloads.characterization.description import Description
from tailrace.workloads.run_trace import trace_of_events


def run_sections(run: RunData) -> list[Section]:
    """Return the charts of the workload of a run; none where no response is finished.

    Where its events make no trace, one section says why.
    """
    if not run.samples:
        return []
    try:
        trace = trace_of_events(run.name, run.events)
    except TraceError as error:
        return [Section("Workload", [], note=f"Not shown: {one_line(error)}.")]
    found = workload_sections({run.name: Description.of(trace)})
    return [replace(section, title=f"Workload: {section.title[0].lower()}{section.title[1:]}") for section in found]

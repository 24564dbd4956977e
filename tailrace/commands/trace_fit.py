"""`tailrace trace fit`: makes parameters of a workload from a trace, and says how near its samples come to it."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tailrace.commands.files import check_apart, check_new_file
from tailrace.commands.trace_import import summary
from tailrace.errors import TraceError
from tailrace.report.tables import figures_table
from tailrace.report.text import number
from tailrace.workloads.files import read_trace
from tailrace.workloads.fits.choice import check_family
from tailrace.workloads.fits.goodness import PERCENTILES, Goodness, goodness
from tailrace.workloads.fits.workload import fit_workload
from tailrace.workloads.parameter_files import write_parameters
from tailrace.workloads.samplers.fitted import Fitted


def trace_fit(trace: Path, output: Path, *, name: str | None, family: str, force: bool = False) -> None:
    """Fit a workload to a trace, write its parameters, and print how near its samples come to the trace.

    Args:
        name: of the workload; by default that of the output.
        family: see `fit_workload`.
        force: replace the output where it exists.

    Raises:
        UserError: the trace cannot be read or fitted, or the output cannot be made. Nothing is written.
    """
    if output.suffix != ".yaml":
        raise TraceError(f"--output {output} cannot be parameters; give a name that ends in .yaml")
    check_family(family)
    check_new_file("--output", output, force=force)
    if output.is_file():
        check_apart("--output", output, [trace])
    recorded = read_trace(trace)
    parameters = fit_workload(recorded, name or output.stem, family=family)
    found = goodness(recorded, Fitted(parameters))
    write_parameters(parameters, output)
    drift = "" if parameters.drift is None else f", with a {type(parameters.drift).__name__.lower()} over steps"
    print(f"{output}: {parameters.name}, fitted to {summary(recorded)}{drift}")
    Console().print(_table(found))


def _table(found: Iterable[Goodness]) -> Table:
    table = figures_table("samples against the trace", "KS", *(f"p{part}" for part in PERCENTILES), "most")
    for each in found:
        errors = [*(each.errors[part] for part in PERCENTILES), each.most_error]
        table.add_row(each.name, number(round(each.ks, 3)), *(f"{error:+.1f} %" for error in errors))
    return table

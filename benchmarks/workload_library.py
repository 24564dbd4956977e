"""Writes the workloads that ship, from public data and the figures of papers.

    python benchmarks/workload_library.py DATA

They are written over those of the repository. `workload_fits.py` says what DATA has, and how near they come.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import typer
from workload_fits import Data, programming, sources

from tailrace.workloads.fits.workload import fit_workload
from tailrace.workloads.marginals.lognormal import Lognormal
from tailrace.workloads.marginals.quantiles import Quantiles
from tailrace.workloads.parameter_files import write_parameters
from tailrace.workloads.parameters import FORMAT, Amount, Figures, Parameters, Single
from tailrace.workloads.trace import Provenance

LIBRARY = Path(__file__).parents[1] / "tailrace" / "workloads" / "library"


class Text(NamedTuple):
    """What a file says of its workload."""

    task: str
    about: str
    rests_on: str


TEXTS: Mapping[str, Text] = {
    "math-32b": Text(
        "mathematics",
        "mathematics, Qwen2.5-32B with DAPO: responses with a long tail",
        "Six steps of 96 groups of 8 samples, fitted. The share that the filter keeps is that of the first four steps.",
    ),
    "video-7b": Text(
        "video understanding",
        "video understanding, 7B: prompts of a few sizes, short responses",
        "Ten steps of 64 groups of 8 samples, fitted. One sample ended at 16,000 tokens, which is taken as the limit.",
    ),
    "search-7b": Text(
        "search",
        "search with a tool, Qwen2.5-7B: one to five short turns",
        "Two steps of 2,048 samples and 47 samples of a third one, fitted.",
    ),
    "math-235b": Text(
        "mathematics",
        "mathematics, 235B MoE: long responses",
        "The published mixture of four components, of which 50,000 samples were drawn and fitted. The paper (section "
        "3.2) prints a mean of 9,839, a median of 8,388, a p90 of 18,543, and a maximum of about 32,000, which is the "
        "limit here. Groups are not published: samples of a group are independent, but for their prompt's length.",
    ),
    "tool-use-235b": Text(
        "tool use",
        "tool use, 235B MoE: up to ten turns, of which the last is longest",
        "The published means and covariances for each number of turns, of which 50,000 lognormal sessions were drawn "
        "and fitted. Groups and the seconds of tools are not published: samples of a group are independent.",
    ),
    "code-14b": Text(
        "programming",
        "programming, DeepCoder-14B: long and uneven responses",
        "The paper (section 3.4) prints a mean and a standard deviation of responses, from which a lognormal "
        "distribution was made. Of prompts it says that their mean is below 1,000 tokens; 500 are assumed. It says "
        "nothing of limits and groups: no sample is cut, and samples of a group are independent.",
    ),
}


def code_14b(figures: Figures) -> Parameters:
    """Return the workload of which two moments alone are known."""
    assert figures.deviation is not None, "the paper prints it"
    text = TEXTS["code-14b"]
    responses = Amount(distribution=Lognormal.of_moments(figures.mean, figures.deviation))
    return Parameters(
        tailrace_workload=FORMAT,
        name="code-14b",
        about=text.about,
        rests_on=text.rests_on,
        provenance=Provenance(source="PolyTrace, section 3.4 and figure 16", model="DeepCoder-14B"),
        task=text.task,
        prompt_tokens=Quantiles(shares=[0.0, 1.0], values=[500.0, 500.0]),
        response=Single(tokens=responses),
        prompt_figures=Figures(mean=500.0),
        response_figures=figures,
    )


def main(data: Data) -> None:
    """Write all files."""
    write_parameters(code_14b(programming(data)), LIBRARY / "code-14b.yaml")
    for name, trace in sources(data).items():
        text = TEXTS[name]
        fitted = fit_workload(trace, name)
        said = msgspec.structs.replace(fitted, about=text.about, rests_on=text.rests_on, task=text.task)
        write_parameters(said, LIBRARY / f"{name}.yaml")
        print(LIBRARY / f"{name}.yaml")


if __name__ == "__main__":
    typer.run(main)

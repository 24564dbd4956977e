"""Simulates the set-ups of four papers, and writes what they published against what comes out: docs/papers.md.

    make reproduce-papers

It reads papers.csv, and lengths, from the folder that TAILRACE_DATA names. It takes some minutes on two cores. The last
line is JSON: of each paper, its ratios, and how many are within 10 %.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import papers_asyncflow
import papers_pat
import papers_polytrace
import papers_setup as setup
import papers_streamrl
from papers_setup import Published
from papers_table import WITHIN, Section

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"


def main() -> None:
    """Simulate, and write the page."""
    folder = Path(os.environ.get("TAILRACE_DATA", ""))
    table = folder / "papers.csv"
    if "TAILRACE_DATA" not in os.environ or not table.is_file():
        print(f"skipped: {table} is not there; set TAILRACE_DATA to a folder that has it")
        print(json.dumps({"skipped": True}))
        return
    sections = simulate(folder, table)
    PAGE.write_text(page(sections), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
    print(json.dumps({"skipped": False, **{each.title: summary(each) for each in sections}}))


def simulate(folder: Path, table: Path) -> list[Section]:
    """Simulate all papers."""
    pat = Published.read(table, "PAT")
    lengths = papers_pat.Lengths.of(pat)
    return [
        papers_streamrl.report(Published.read(table, "StreamRL"), folder),
        papers_asyncflow.report(Published.read(table, "AsyncFlow"), lengths),
        papers_pat.report(pat, lengths),
        papers_polytrace.report(Published.read(table, "PolyTrace"), folder),
    ]


def summary(section: Section) -> dict[str, object]:
    """The figures of a paper, as JSON has them."""
    rows = section.headlines
    return {
        "ratios": len(rows),
        "within_10_pct": sum(row.agrees for row in rows),
        "rows": {f"{row.where}: {row.what}": [row.published, round(row.simulated, 4)] for row in rows},
    }


def page(sections: Sequence[Section]) -> str:
    """The page, as Markdown."""
    rows = [row for section in sections for row in section.headlines]
    agreeing = sum(row.agrees for row in rows)
    return "\n".join(
        [
            "# Published and simulated",
            "",
            "`make reproduce-papers` wrote this page. It simulates the set-ups of four papers with the code that "
            "plans and runs Tailrace, and compares what comes out with what they printed. It needs a folder with "
            "their figures (`TAILRACE_DATA`).",
            "",
            f"{agreeing} of {len(rows)} published ratios are within {WITHIN:.0%}. Where one is not, its row gives the "
            "reason, or refers to the text below. Rows of seconds, of another baseline or of a variant do not count. "
            "No constant belongs to one row. What a paper does not say is assumed, in the same way for all of its "
            "rows.",
            "",
            "All set-ups have in common:",
            "",
            *(f"- {line}" for line in constants()),
            "",
            "\n\n".join(section.text() for section in sections),
            "",
        ]
    )


def constants() -> list[str]:
    """What holds for all papers."""
    host = setup.SERVER
    return [
        "Steps of engines are analytic (`planning.step_times.generation`), with rates that were fitted to H100's "
        "kernels. Those of trainers are analytic, too (`planning.step_times.training`). An FSDP trainer has the "
        f"constant of prime-rl's published runs. A Megatron trainer has {setup.MEGATRON}, the most that NeMo-RL's "
        "published steps allow (`benchmarks/megatron_fit.py`).",
        f"A replica decodes up to {setup.SLOTS} sequences together, and computes up to {setup.STEP_TOKENS:,} tokens "
        "of prompts in a step. Its cache has what memory is left. The TP degree is the quickest of 1, 2, 4 and 8.",
        f"vLLM's host takes {1e3 * host.step_s:.2f} ms of each step and {1e6 * host.sequence_s:.0f} µs for each "
        "sequence, as published measurements of serving say.",
        f"A rank of a trainer computes {setup.MICRO_BATCH_TOKENS:,} tokens at once. A streaming trainer takes a step "
        f"in {setup.PARTS} parts, or in fewer where a part would be less than that for each rank. Its arrangement is "
        "the quickest one that fits. A Megatron trainer has TP, PP and DP, whose ranks share out the moments. An "
        "FSDP trainer shards all, and has DP alone.",
        "A colocated step moves what the trainer keeps to the host and back (16 bytes a parameter), and gathers the "
        "weights for the engines. A separated one sends the weights along the broadcast tree. No running response "
        "moves.",
        f"A split of devices is searched in {setup.SPLITS} parts. {setup.STEPS} training steps are simulated, of "
        f"which {setup.WARM_UP} does not count, where no other number is given. All draws have the seed {setup.SEED}.",
    ]


if __name__ == "__main__":
    main()

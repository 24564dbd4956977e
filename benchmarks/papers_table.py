"""A table of published against simulated figures, in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

WITHIN = 0.1
"""The part of a published figure by which a simulated one may differ and still counts as the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure."""

    where: str
    """In the paper."""
    what: str
    published: float
    simulated: float
    unit: str = "x"
    why: str = ""
    """The reason of a difference; it is told where there is one."""
    headline: bool = True
    """Whether it is one of the paper's ratios, and counts."""

    @property
    def agrees(self) -> bool:
        """Whether the two are within `WITHIN`."""
        return abs(self.simulated - self.published) <= WITHIN * abs(self.published)

    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        difference = self.simulated / self.published - 1
        note = "" if self.agrees else self.why
        unit = "" if self.unit == "x" else f" {self.unit}"
        return (
            self.where,
            self.what,
            f"{figure(self.published)}{unit}",
            f"{figure(self.simulated)}{unit}",
            f"{difference:+.0%}",
            note,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A paper."""

    title: str
    assumptions: Sequence[str]
    """What is simulated, and what the paper does not say."""
    rows: Sequence[Row]
    experiments: Sequence[str] = ()
    """What a row becomes with something else instead."""
    findings: Sequence[str]
    """What agrees, what does not, and why."""

    @property
    def headlines(self) -> list[Row]:
        """The rows that count."""
        return [row for row in self.rows if row.headline]

    def text(self) -> str:
        """As Markdown."""
        agreeing = sum(row.agrees for row in self.headlines)
        lines = [f"## {self.title}", ""]
        lines += [f"- {each}" for each in self.assumptions]
        lines += ["", *table(("where", "what", "published", "simulated", "difference", "reason"), self.rows), ""]
        verb = "is" if agreeing == 1 else "are"
        lines += [f"{agreeing} of {len(self.headlines)} ratios {verb} within {WITHIN:.0%}.", ""]
        if self.experiments:
            lines += ["With other assumptions:", "", *(f"- {each}" for each in self.experiments), ""]
        lines += self.findings
        return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The lines of a table; figures stand to the right."""
    right = {"published", "simulated", "difference"}
    ruler = ["--:" if name in right else ":--" for name in header]
    return [_line(header), _line(ruler), *(_line(row.cells()) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figure(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"

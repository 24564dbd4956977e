"""The samples of a run on its page: those of some steps and evaluations, in bounded size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tailrace.report.sample_text import Group, grouped, place_title
from tailrace.report.samples import SampleRecord, shown_text

_SAMPLES = 800
"""Number of samples on a page, about: a browser shows them all at once."""
_PLACES = 60
"""Maximum number of steps and evaluations on a page."""
CHARACTERS = 4000
"""Characters of a text on a page; samples.jsonl has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A step or an evaluation."""

    id: str
    title: str
    groups: Sequence[Group]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePages:
    """The samples that a page shows."""

    places: Sequence[Place]
    """Steps and evaluations, in the order of training."""
    kept: int
    """Number of steps and evaluations that have samples; more than `places` where they would not fit."""

    @property
    def newest(self) -> Place:
        """The last training step, which a reader sees first."""
        return next((place for place in reversed(self.places) if place.id.startswith("training")), self.places[-1])


def sample_pages(records: Iterable[SampleRecord]) -> SamplePages | None:
    """Choose the first and the last step and evaluation, and between them as many as there is room for, evenly.

    Return None where no samples were kept.
    """
    by_place = {
        place: list(samples)
        for place, samples in groupby(sorted(records, key=_order), key=lambda record: (record.step, record.kind))
    }
    if not by_place:
        return None
    largest = max(map(len, by_place.values()))
    kinds = [[place for place in by_place if place[1] == kind] for kind in ("training", "evaluation")]
    ends = {end for of_kind in kinds for end in (*of_kind[:1], *of_kind[-1:])}
    between = [place for place in by_place if place not in ends]
    chosen = ends.union(_spread(between, min(_PLACES, _SAMPLES // largest) - len(ends)))
    places = [
        Place(id=f"{kind}-{step}", title=place_title(kind, step), groups=_groups(by_place[step, kind]))
        for step, kind in by_place
        if (step, kind) in chosen
    ]
    return SamplePages(places=places, kept=len(by_place))


def _order(record: SampleRecord) -> tuple[int, bool]:
    """The sort key of a record: an evaluation comes after the last step before it."""
    return record.step, record.kind == "evaluation"


def _spread(places: Sequence[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    count = min(count, len(places))
    return [places[(2 * index + 1) * len(places) // (2 * count)] for index in range(count)]


def _groups(samples: Sequence[SampleRecord]) -> list[Group]:
    """Return whole groups while there is room; the first one whatever its size."""
    groups: list[Group] = []
    room = _SAMPLES // 2
    for group in grouped(samples):
        if groups and room < len(group.samples):
            break
        room -= len(group.samples)
        groups.append(group)
    return groups


def page_text(text: str) -> str:
    """Return `text` as long as a page shows it."""
    return shown_text(text, CHARACTERS)

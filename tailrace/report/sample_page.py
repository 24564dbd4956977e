"""The samples of a run on its page: of some steps and evaluations, in bounded size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tailrace.report.sample_text import Group, grouped, place_title
from tailrace.report.samples import SampleRecord, shown_text

_SAMPLES = 800
"""On a page, about: a browser shows them at once."""
_PLACES = 60
"""Steps and evaluations on a page, at most."""
CHARACTERS = 4000
"""Of a text on a page; samples.jsonl has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One step or evaluation."""

    id: str
    title: str
    groups: Sequence[Group]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePages:
    """What a page shows of the samples."""

    places: Sequence[Place]
    """In the order of training."""
    kept: int
    """Steps and evaluations that have samples; more than `places` where they would not fit."""

    @property
    def newest(self) -> Place:
        """The last training step, which a reader sees first."""
        return next((place for place in reversed(self.places) if place.id.startswith("training")), self.places[-1])


def sample_pages(records: Iterable[SampleRecord]) -> SamplePages | None:
    """The first and the last step and evaluation, and as many between them, evenly, as there is room for.

    None where no samples were kept.
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
    """An evaluation after some steps comes after the last of them."""
    return record.step, record.kind == "evaluation"


def _spread(places: Sequence[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    count = min(count, len(places))
    return [places[(2 * index + 1) * len(places) // (2 * count)] for index in range(count)]


def _groups(samples: Sequence[SampleRecord]) -> list[Group]:
    """Whole groups, the first one whatever its size."""
    groups: list[Group] = []
    room = _SAMPLES // 2
    for group in grouped(samples):
        if groups and room < len(group.samples):
            break
        room -= len(group.samples)
        groups.append(group)
    return groups


def page_text(text: str) -> str:
    """`text` as long as a page shows it."""
    return shown_text(text, CHARACTERS)

"""The samples that a run keeps for people: a few groups of every step and of every evaluation, one line a sample.

    learner, evaluator ──event `samples`──▶ log ──▶ SampleFile ──▶ samples.jsonl ──▶ report, `tailrace samples`
                                             └────▶ TensorBoard

The event travels like any other, from a worker's process too, but `events.jsonl` leaves it out. Which groups are kept
depends on the seed and the step alone: never on which responses finish first, since those are short.
"""

import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tailrace.errors import UNREADABLE, UserError
from tailrace.events import Event, drop_cut_line, owner_only
from tailrace.registers.events import EventKind


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One response, as a person wants to see it."""

    kind: Literal["training", "evaluation"]
    step: int
    """The training step, counted from 1 as the display does; of an evaluation, the steps before it."""
    set: str = ""
    """Of an evaluation: the name of the prompt's set."""
    way: str = ""
    """Of an evaluation: greedy or sampled."""
    group: int
    """Place of its prompt among all prompts of the run, or of the evaluation; from 0."""
    sample: int
    """Place in its group, from 0."""
    prompt: str
    """What the model has read, after the chat template."""
    response: str
    """What was graded."""
    answer: str | None
    """Of the prompt; as JSON where it is no text."""
    reward: float | None
    """None where the grading failed and the recipe has no reward for that."""
    correct: bool | None = None
    """Whether the response is right; None where the grader does not say."""
    parts: dict[str, float] = {}
    """Further figures of the grader, by name."""
    failure: str = ""
    """Why the grading failed; empty where it did not."""
    advantage: float | None = None
    """Mean over the response's tokens; None in an evaluation."""
    prompt_tokens: int
    tokens: int
    """Of the response, the end-of-sequence token included."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    weight_versions: tuple[int, int]
    """The oldest and the newest weights that made its tokens."""

    @property
    def place(self) -> tuple[str, int]:
        """Of which step or evaluation it is."""
        return self.kind, self.step


def choose_groups(groups: Collection[int], count: int, *, seed: int, step: int) -> list[int]:
    """`count` of `groups`, in their order; all where there are no more. The same for the same seed, step and groups."""
    ordered = sorted(groups)
    if count >= len(ordered):
        return ordered
    return sorted(random.Random(f"samples {seed} {step}").sample(ordered, count))


def shown_text(text: str, limit: int) -> str:
    """`text` with at most about `limit` characters: of a longer one the middle is left out, which is said.

    What cannot be written as UTF-8 (half a surrogate pair) becomes its escape.
    """
    if len(text) > limit:
        head, tail = 2 * limit // 3, limit // 3
        left_out = len(text) - head - tail
        text = f"{text[:head]}\n[… {left_out:,} characters left out …]\n{text[len(text) - tail :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def samples_event(records: Sequence[SampleRecord], *, actor: str, time: float, step: int) -> Event:
    """What carries `records` to the sinks. `time`: seconds of the run."""
    return Event(
        task=EventKind.SAMPLES,
        actor=actor,
        start=time,
        end=time,
        step=step,
        samples=len(records),
        info={"samples": msgspec.to_builtins(records)},
    )


def samples_in(event: Event) -> list[SampleRecord]:
    """The records of an event that `samples_event` made."""
    return msgspec.convert(event.info["samples"], list[SampleRecord])


class SampleFile:
    """A sink that keeps `samples.jsonl`: no step and no evaluation stands in it twice.

    A resumed run forgets what is later than its checkpoint, which it makes again. Where an evaluation is made again,
    the newer one takes the place of the older.
    """

    def __init__(self, path: Path) -> None:
        """The file is made with the first sample.

        Raises:
            UserError: it is there, and a line of it is broken, or it cannot be written.
        """
        self._path = path
        try:
            drop_cut_line(path)
        except OSError as error:
            raise self._refused(error) from None
        self._places = {record.place for record in read_samples(path)} if path.exists() else set()

    def __call__(self, event: Event) -> None:
        """Take an event `samples`, or the `run` that begins an attempt; pass over others.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            if event.task == EventKind.RUN:
                trained = event.info.get("trained_steps", 0) if event.info.get("resumed_from") else -1
                self._keep(lambda place: place[1] <= trained)
            elif event.task == EventKind.SAMPLES:
                self._add(samples_in(event))
        except OSError as error:
            raise self._refused(error) from None

    def _add(self, records: Sequence[SampleRecord]) -> None:
        new = {record.place for record in records}
        self._keep(lambda place: place not in new)
        with open(self._path, "ab", opener=owner_only) as file:
            file.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        self._places |= new

    def _keep(self, wanted: Callable[[tuple[str, int]], bool]) -> None:
        """Take the lines of other steps and evaluations out, all at once or not at all."""
        kept = {place for place in self._places if wanted(place)}
        if kept == self._places:
            return
        partial = self._path.with_name(f".{self._path.name}.partial")
        try:
            with self._path.open("rb") as old, open(partial, "wb", opener=owner_only) as new:
                new.writelines(line for line in old if _PLACE.decode(line).place in kept)
            partial.replace(self._path)
        finally:
            partial.unlink(missing_ok=True)
        self._places = kept

    def _refused(self, error: OSError) -> UserError:
        return UserError(
            f"{self._path} cannot be written: {error.strerror}; mend that, then go on with --resume, or with "
            "observe.sample_groups=0, which keeps no samples"
        )


class _Place(msgspec.Struct):
    """The part of a line that says where it belongs."""

    kind: str
    step: int

    @property
    def place(self) -> tuple[str, int]:
        return self.kind, self.step


_PLACE = msgspec.json.Decoder(_Place)


def read_samples(path: Path) -> list[SampleRecord]:
    """What was kept. A last line cut short by a crash is left out.

    Raises:
        UserError: there is no such file, it cannot be read, or a line of it is broken.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            records.append(msgspec.json.decode(line, type=SampleRecord))
        except UNREADABLE as error:
            raise UserError(f"{path}, line {number}, is not a sample: {error}; remove that line") from None
    return records

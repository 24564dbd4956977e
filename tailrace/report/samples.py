"""The samples that a run keeps for people: a few groups of every step and of every evaluation, one line a sample.

    learner, evaluator ──event `samples`──▶ log ──▶ SampleFile ──▶ samples.jsonl ──▶ report, `tailrace samples`
                                             └────▶ TensorBoard, Weights & Biases

The event travels like any other, from a worker's process too, but `events.jsonl` leaves it out. The choice of groups
depends on the seed and the step alone. It never depends on which responses finish first, since those are short.
"""

import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tailrace.errors import UNREADABLE, UserError
from tailrace.events import Event, drop_cut_line, owner_only
from tailrace.host.whole_file import whole_file
from tailrace.registers.events import EventKind


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A response, as it is shown to people."""

    kind: Literal["training", "evaluation"]
    step: int
    """The training step, counted from 1 as the display does; of an evaluation, the steps before it."""
    set: str = ""
    """Name of the prompt's set, in an evaluation."""
    way: str = ""
    """In an evaluation: greedy or sampled."""
    group: int
    """Place of its prompt among all prompts of the run, or of the evaluation; from 0."""
    sample: int
    """Place in its group, from 0."""
    prompt: str
    """The text that the model has read, after the chat template."""
    response: str
    """The text that was graded."""
    answer: str | None
    """The prompt's answer; as JSON where it is no text."""
    reward: float | None
    """The reward; None where the grading failed and the recipe has no reward for that."""
    correct: bool | None = None
    """Whether the response is right; None where the grader does not say."""
    parts: dict[str, float] = {}
    """Further figures of the grader, by name."""
    failure: str = ""
    """The reason of a failed grading; empty where it did not fail."""
    advantage: float | None = None
    """Mean advantage over the response's tokens; None in an evaluation."""
    prompt_tokens: int
    tokens: int
    """Tokens of the response, including the end-of-sequence token."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    weight_versions: tuple[int, int]
    """The oldest and the newest weights that made its tokens."""

    @property
    def place(self) -> tuple[str, int]:
        """The step or evaluation that it belongs to."""
        return self.kind, self.step


def choose_groups(groups: Collection[int], count: int, *, seed: int, step: int) -> list[int]:
    """Choose `count` of `groups`, in their order; all where there are no more. Equal seed, step and groups give equal
    choices."""
    ordered = sorted(groups)
    if count >= len(ordered):
        return ordered
    return sorted(random.Random(f"samples {seed} {step}").sample(ordered, count))


def shown_text(text: str, limit: int) -> str:
    """Return `text` with at most about `limit` characters. The middle of a longer text is left out, and a note says so.

    Characters that UTF-8 cannot hold (half a surrogate pair) become their escapes.
    """
    if len(text) > limit:
        head, tail = 2 * limit // 3, limit // 3
        left_out = len(text) - head - tail
        text = f"{text[:head]}\n[… {left_out:,} characters left out …]\n{text[len(text) - tail :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def samples_event(records: Sequence[SampleRecord], *, actor: str, time: float, step: int) -> Event:
    """Return the event that carries `records` to the sinks. `time`: seconds of the run."""
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
    """Return the records of an event that `samples_event` made."""
    return msgspec.convert(event.info["samples"], list[SampleRecord])


class SampleFile:
    """A sink that keeps `samples.jsonl`, in which no step and no evaluation stands twice.

    A resumed run drops what is later than its checkpoint, since it makes it again. Where an evaluation is made again,
    the newer one replaces the older.
    """

    def __init__(self, path: Path) -> None:
        """Keep the samples at `path`; the file is made with the first sample.

        Raises:
            UserError: the file exists and a line of it is broken, or it cannot be written.
        """
        self._path = path
        try:
            drop_cut_line(path)
        except OSError as error:
            raise self._refused(error) from None
        self._places = {record.place for record in read_samples(path)} if path.exists() else set()

    def __call__(self, event: Event) -> None:
        """Take a `samples` event, or the `run` event that begins an attempt; ignore others.

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
        """Drop the lines of steps and evaluations that are not `wanted`, all at once or not at all."""
        kept = {place for place in self._places if wanted(place)}
        if kept == self._places:
            return
        with (
            whole_file(self._path) as partial,
            self._path.open("rb") as old,
            open(partial, "wb", opener=owner_only) as new,
        ):
            new.writelines(line for line in old if _PLACE.decode(line).place in kept)
        self._places = kept

    def _refused(self, error: OSError) -> UserError:
        return UserError(
            f"{self._path} cannot be written: {error.strerror}; mend that, then go on with --resume, or with "
            "observe.sample_groups=0, which keeps no samples"
        )


class _Place(msgspec.Struct):
    """The part of a line that names its step or evaluation."""

    kind: str
    step: int

    @property
    def place(self) -> tuple[str, int]:
        return self.kind, self.step


_PLACE = msgspec.json.Decoder(_Place)


def read_samples(path: Path) -> list[SampleRecord]:
    """Read the kept samples. A last line that was cut short by a crash is left out.

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

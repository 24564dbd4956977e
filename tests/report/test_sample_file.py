import random
import resource
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import UserError
from tailrace.events import Event, EventFile, EventLog, read_events
from tailrace.report.samples import SampleFile, choose_groups, read_samples, samples_event, samples_in, shown_text
from tests.helpers.sample_records import make_sample

Kind = Literal["training", "evaluation"]


def told(step: int, *responses: str, kind: Kind = "training") -> Event:
    """The event of a run about the samples of a step."""
    records = [make_sample(step, sample=k, response=text, kind=kind) for k, text in enumerate(responses)]
    return samples_event(records, actor="driver", time=float(step), step=step)


def attempt(trained_steps: int, *, resumed: bool = True) -> Event:
    info = {"resumed_from": "checkpoint" if resumed else None, "trained_steps": trained_steps}
    return Event(task="run", actor="driver", start=0, end=0, info=info)


def kept(path: Path) -> list[tuple[str, int, str]]:
    return [(record.kind, record.step, record.response) for record in read_samples(path)]


@given(st.sets(st.integers(0, 1000), max_size=40), st.integers(1, 50), st.integers(), st.integers(0, 500))
def test_the_choice_depends_on_nothing_but_groups_seed_and_step(
    groups: set[int], count: int, seed: int, step: int
) -> None:
    arrived = list(groups)
    random.Random(step).shuffle(arrived)
    chosen = choose_groups(arrived, count, seed=seed, step=step)
    assert chosen == choose_groups(groups, count, seed=seed, step=step) == sorted(set(chosen))
    assert set(chosen) <= groups
    assert len(chosen) == min(count, len(groups))


def test_the_choice_is_of_all_groups_alike() -> None:
    chosen = [choose_groups(range(10), 1, seed=0, step=step)[0] for step in range(2000)]
    assert all(130 < chosen.count(group) < 270 for group in range(10))


def test_a_longer_text_keeps_its_beginning_and_its_end() -> None:
    assert shown_text("x" * 300, 300) == "x" * 300
    assert shown_text("a" * 500 + "z" * 500, 300) == f"{'a' * 200}\n[… 700 characters left out …]\n{'z' * 100}"


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_be_written_and_read(text: str) -> None:
    record = make_sample(response=shown_text(text, 1000))
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


def test_records_travel_in_an_event_from_another_process() -> None:
    record = make_sample(parts={"format": 0.5}, reward=None, failure="timeout: 5 s", weight_versions=(3, 4))
    sent = msgspec.msgpack.encode(samples_event([record], actor="driver", time=1.0, step=0))
    assert samples_in(msgspec.msgpack.decode(sent, type=Event)) == [record]


def test_texts_are_in_a_file_of_their_own_and_not_among_the_events(tmp_path: Path) -> None:
    events = EventFile(tmp_path / "events.jsonl")
    log = EventLog(sinks=(events, SampleFile(tmp_path / "samples.jsonl")))
    log.emit(attempt(0, resumed=False))
    log.emit(told(1, "a", "b"))
    events.close()
    assert [event.task for event in read_events(tmp_path / "events.jsonl")] == ["run"]
    assert kept(tmp_path / "samples.jsonl") == [("training", 1, "a"), ("training", 1, "b")]
    assert (tmp_path / "samples.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_run_without_samples_leaves_no_file(tmp_path: Path) -> None:
    sink = SampleFile(tmp_path / "samples.jsonl")
    sink(attempt(0, resumed=False))
    assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.parametrize("other_process", [False, True])
def test_a_resumed_run_forgets_what_it_makes_again(tmp_path: Path, other_process: bool) -> None:
    path = tmp_path / "samples.jsonl"
    sink = SampleFile(path)
    sink(attempt(0, resumed=False))
    sink(told(0, "before", kind="evaluation"))
    for step in (1, 2, 3):
        sink(told(step, f"first {step}"))
    sink(told(2, "after two", kind="evaluation"))
    if other_process:
        sink = SampleFile(path)
    sink(attempt(2))
    first = [("evaluation", 0, "before"), ("training", 1, "first 1"), ("training", 2, "first 2")]
    assert kept(path) == [*first, ("evaluation", 2, "after two")]
    sink(told(2, "after two again", kind="evaluation"))
    sink(told(3, "second 3"))
    assert kept(path) == [*first, ("evaluation", 2, "after two again"), ("training", 3, "second 3")]


def test_a_run_that_begins_anew_after_its_trainers_death_has_nothing_of_before(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    sink = SampleFile(path)
    for event in (attempt(0, resumed=False), told(0, "x", kind="evaluation"), told(1, "lost"), told(2, "lost")):
        sink(event)
    sink(attempt(0, resumed=False))
    assert kept(path) == []
    sink(told(1, "again"))
    assert kept(path) == [("training", 1, "again")]


def test_a_last_line_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    SampleFile(path)(told(1, "a"))
    path.write_bytes(path.read_bytes() + b'{"kind":"trai')
    assert kept(path) == [("training", 1, "a")]
    SampleFile(path)(told(2, "b"))
    assert kept(path) == [("training", 1, "a"), ("training", 2, "b")]


@pytest.mark.parametrize(
    "line", [b'{"kind": "training"}', b'{"kind": "\xff"}', b'{"prompt": ' + b"[" * 5000], ids=["short", "bytes", "deep"]
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(UserError, match=r"samples\.jsonl, line 1, is not a sample: .*; remove that line"):
        SampleFile(path)


def test_a_file_that_cannot_be_written_is_a_user_error_that_names_the_ways_on(tmp_path: Path) -> None:
    sink = SampleFile(tmp_path / "samples.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(UserError, match=r"samples\.jsonl cannot be written: .*--resume.*sample_groups=0"):
            sink(told(1, "a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

"""Claims on the replicas of an engine that are arranged anew."""

from dataclasses import replace

import pytest

from tailrace.planning.lengths.base import Expectation
from tailrace.simulator.batch import Sequence
from tailrace.simulator.replicas import Replica, rearranged, replicas_of
from tailrace.simulator.samples import Response
from tailrace.workloads.replay import Script, Turn
from tests.simulator.test_tp import ENGINE


def given(replica: Replica, *lengths: int) -> None:
    """Have a replica decode sequences, each of a group of its own."""
    for length in lengths:
        sequence = Sequence(prompt=10, length=length)
        replica.batch.add(sequence)
        script = Script(prompt_tokens=10, turns=(Turn(generated_tokens=length),))
        replica.responses[sequence] = Response(
            step=0,
            group=length,
            number=0,
            prompt=length,
            script=script,
            tokens=length,
            needed=0,
            expected=Expectation(length, length, length),
            limit=100,
        )
    replica.batch.begin()
    replica.batch.end()


@pytest.fixture
def old() -> list[Replica]:
    replicas = replicas_of(ENGINE, 1)
    given(replicas[0], 50, 40, 30)
    given(replicas[1], 20)
    return replicas


def test_what_has_moved_decodes_at_once_and_computes_nothing_again(old: list[Replica]) -> None:
    (new,) = rearranged(old, ENGINE, source=1, target=2, move=True).replicas
    assert (new.batch.tp, new.batch.running, new.batch.waiting) == (2, 4, 0)
    assert sorted(response.group for response in new.responses.values()) == [20, 30, 40, 50]
    new.batch.begin()
    new.batch.end()
    assert (new.batch.computed, new.batch.generated) == (0, 4 * 19)


def test_what_has_not_moved_is_computed_again(old: list[Replica]) -> None:
    (new,) = rearranged(old, ENGINE, source=1, target=2, move=False).replicas
    assert (new.batch.running, new.batch.waiting) == (0, 4)
    new.batch.begin()
    assert new.batch.running == 4
    new.batch.end()
    assert new.batch.computed == 4 * (10 + 1)


def test_what_finds_no_room_waits_behind_what_runs(old: list[Replica]) -> None:
    small = replace(ENGINE, slots=3)
    (new,) = rearranged(old, small, source=1, target=2, move=True).replicas
    assert (new.batch.running, new.batch.waiting) == (3, 1)
    assert len(new.responses) == 4


def test_a_replica_that_becomes_several_deals_its_sequences_out(old: list[Replica]) -> None:
    (whole,) = rearranged(old, ENGINE, source=1, target=2, move=True).replicas
    parts = rearranged([whole], ENGINE, source=2, target=1, move=True).replicas
    assert [part.batch.running for part in parts] == [2, 2]

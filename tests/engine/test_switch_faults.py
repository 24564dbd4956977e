"""An engine after a switch that is refused or breaks off."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from tailrace.conformance.requests import make_request
from tailrace.conformance.tiny import write_tiny_model
from tailrace.engine import arrangement
from tailrace.engine.arrangement import MAX_FAILURES, SwitchFailed
from tailrace.engine.core import EngineCore
from tailrace.engine.ranks import switch as executor
from tailrace.engine.ranks.process import ProcessReplica
from tailrace.engine.ranks.switch import SwitchExecutor, SwitchRefused
from tailrace.engine.scheduling.migration import Migration
from tailrace.engine.scheduling.transplant import Transplant, plan_transplant
from tailrace.errors import EngineError
from tailrace.types import Sample
from tests.engine.helpers import make_core, run_core
from tests.engine.switching import is_alive, make_switching_core, pids, steps, switch
from tests.engine.test_process_replica import ended

REQUESTS = [make_request(i, group_id=i // 2, prompt=7 + i // 2, max_new_tokens=24, ignore_eos=True) for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("faults") / "llama", seed=0)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    return {i: sample.response_ids.tolist() for i, sample in run_core(make_core(model), REQUESTS).items()}


@pytest.fixture(scope="module")
def core(model: Path) -> Iterator[EngineCore]:
    """A core of two ranks that have had both arrangements."""
    with closing(make_switching_core(model, dp=2)) as made:
        switch(made, 2)
        switch(made, 1)
        yield made


@pytest.fixture
def begun(core: EngineCore) -> Iterator[EngineCore]:
    """A core in the middle of REQUESTS, at TP 1."""
    core.arrangement._failures = 0
    if core.arrangement.config.tp != 1:
        switch(core, 1)
    for request in REQUESTS:
        core.add(request)
    assert steps(core, 12) == []
    yield core
    run_core(core, [])


def finish(core: EngineCore) -> dict[int, list[int]]:
    """Finish all requests, with two successful switches on the way."""
    samples: list[Sample] = core.settle()
    samples += switch(core, 3 - core.arrangement.config.tp)[0] + steps(core, 4)
    samples += switch(core, 3 - core.arrangement.config.tp)[0]
    samples += run_core(core, []).values()
    return {sample.request_id: sample.response_ids.tolist() for sample in samples}


def when_waited_for(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[], None]) -> None:
    """Call `do` just before the executor waits for the `number`-th time, from 1. Ranks have their orders by then."""
    waits = iter(range(1, 1000))

    def wait_after_it(*arguments: Any) -> Any:
        if next(waits) == number:
            do()
        return wait(*arguments)

    monkeypatch.setattr(executor, "wait", wait_after_it)


def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwitchExecutor, "check", lambda *_: None)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_that_is_killed_in_the_middle_of_a_switch_loses_no_token(
    begun: EngineCore, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, tp: int, victim: int
) -> None:
    """The victim stands still, so that the other rank waits for it in an exchange, maybe of another replica."""
    begun.settle()
    if tp == 2:
        switch(begun, 2)
    old = pids(begun)
    with monkeypatch.context() as patch:
        unmeasured(patch)
        os.kill(old[victim], signal.SIGSTOP)
        when_waited_for(patch, 1, lambda: os.kill(old[victim], signal.SIGKILL))
        with pytest.raises(SwitchFailed, match=rf"^the switch from TP {tp} to TP {3 - tp} failed: rank {victim} \(pid"):
            begun.arrangement.switch(3 - tp, cache="move")
    assert begun.arrangement.config.tp == tp
    assert not set(pids(begun)) & set(old)
    assert not any(map(is_alive, old))
    assert finish(begun) == expected


def test_a_rank_that_has_died_before_a_switch_loses_no_token(begun: EngineCore, expected: dict[int, list[int]]) -> None:
    begun.settle()
    os.kill(pids(begun)[1], signal.SIGKILL)
    with pytest.raises(SwitchFailed, match=r"died while measuring its memory: SIGKILL"):
        begun.arrangement.switch(2, cache="move")
    assert finish(begun) == expected


def test_a_rank_that_stands_still_in_a_switch_is_killed(
    begun: EngineCore, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun.settle()
    os.kill(pids(begun)[1], signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(ProcessReplica, "patience_s", 0.0)
        with pytest.raises(SwitchFailed, match="while measuring its memory: killed after 600 s without an answer"):
            begun.arrangement.switch(2, cache="move")
    assert finish(begun) == expected


def test_a_switch_without_room_is_refused_and_changes_nothing(
    begun: EngineCore, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun.settle()
    before = pids(begun)
    with monkeypatch.context() as patch:
        patch.setattr(arrangement, "switch_bytes", lambda *_: 2**60)
        with pytest.raises(SwitchRefused, match=r"needs 1073741824\.000 GiB beside what rank 0 holds, and there are"):
            begun.arrangement.switch(2, cache="move")
    assert (pids(begun), begun.arrangement.config.tp, begun.arrangement.can_switch) == (before, 1, True)
    assert finish(begun) == expected
    assert pids(begun) == before


def bad_plan(patch: pytest.MonkeyPatch) -> None:
    """Let the last replica's migration name a block that no cache has."""

    def plan(*arguments: Any, **settings: Any) -> Transplant:
        made = plan_transplant(*arguments, **settings)
        near, *across = made.migrations[-1]
        made.migrations[-1] = [Migration([[10**6], *near.sources[1:]], []), *across]
        return made

    patch.setattr(arrangement, "plan_transplant", plan)


def test_a_switch_that_fails_on_one_rank_of_two_loses_no_token_and_is_not_tried_forever(
    begun: EngineCore, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch(begun, 2)  # so that one rank alone fails: the last new replica is one of two
    with monkeypatch.context() as patch:
        bad_plan(patch)
        for failures in range(1, MAX_FAILURES + 1):
            with pytest.raises(SwitchFailed, match="names block 1000000"):
                begun.arrangement.switch(1, cache="move")
            assert begun.arrangement.can_switch == (failures < MAX_FAILURES)
            assert begun.step() == begun.settle() == []
    assert finish(begun) == expected
    assert begun.arrangement.can_switch, "it has succeeded since"


def test_ranks_that_die_after_a_switch_are_replaced_in_the_new_arrangement_and_groups_made_anew(
    begun: EngineCore, expected: dict[int, list[int]]
) -> None:
    switch(begun, 2)
    for tp, made in ((2, ()), (1, (2,))):
        if tp == 1:
            switch(begun, 1)
        victim = pids(begun)[1]
        os.kill(victim, signal.SIGKILL)
        assert ended(victim)  # other ranks make many steps meanwhile
        restarts = begun.stats().restarts
        while begun.stats().restarts == restarts:
            assert steps(begun, 1) == []
        assert begun.arrangement.config.tp == tp
        assert (2 in begun.arrangement.groups) == (not made)
        begun.settle()
        assert switch(begun, 3 - tp)[1].made_groups == made
        switch(begun, tp)
    assert finish(begun) == expected


@pytest.mark.parametrize("stage", [1, 2])
def test_interrupting_ends_a_switch_and_leaves_no_process(
    model: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Stage 1 interrupts while memory is measured, stage 2 while the groups are made."""
    core = make_switching_core(model, dp=2)
    core.add(make_request(0))
    core.step()
    core.settle()
    old = pids(core)
    if stage == 2:
        unmeasured(monkeypatch)
    os.kill(old[1], signal.SIGSTOP)
    when_waited_for(monkeypatch, 1, core.interrupt)
    with pytest.raises(EngineError, match="the engine is being closed") as raised:
        core.arrangement.switch(2, cache="move")
    assert not isinstance(raised.value, SwitchFailed)
    core.close()
    assert not any(map(is_alive, old))
    assert pids(core) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_that_is_interrupted_between_two_arrangements_leaves_no_process(
    model: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """The old replicas have given up their processes, and the last new one has not yet taken its own."""
    core = make_switching_core(model, dp=2 // tp, tp=tp)
    started = pids(core)
    make = ProcessReplica.__init__

    def interrupted(replica: ProcessReplica, config: Any, architecture: Any, number: int, **others: Any) -> None:
        if number == config.dp - 1:
            raise KeyboardInterrupt
        make(replica, config, architecture, number, **others)

    with monkeypatch.context() as patch:
        patch.setattr(ProcessReplica, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            core.arrangement.switch(3 - tp, cache="move")
    assert pids(core) == [], "they belong to no replica"
    assert is_alive(started[-1])
    core.close()
    assert len(started) == 2
    assert not any(map(is_alive, started))

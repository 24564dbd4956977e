"""The process that ranks are forked from. It passes on the driver's state, and its own end costs nothing."""

import errno
import gc
import os
import signal
import socket
import weakref
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from tailrace.engine.ranks import rank_process as worker_process
from tailrace.engine.ranks import template_process
from tailrace.engine.ranks.base import RankDied
from tailrace.engine.ranks.process import ProcessReplica
from tailrace.engine.ranks.rank_process import RankProcess, end
from tailrace.engine.ranks.template import Template
from tailrace.engine.ranks.template_process import ForkedProcess, TemplateProcess
from tailrace.models.architecture import Architecture, read_architecture
from tests.conftest import TinyModel
from tests.engine.test_process_replica import CPU, END_LIMIT_S, driver, ended, numbers, settings


@pytest.fixture(scope="module")
def architecture(tiny_model: TinyModel) -> Architecture:
    return read_architecture(tiny_model("qwen2"))


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    """The template process of this process from now on."""
    with closing(TemplateProcess()) as template:
        monkeypatch.setattr(template_process, "_template", template)
        yield template
        assert template_process._template is not None
        template_process._template.close()


def test_ranks_are_children_of_one_process(template: TemplateProcess) -> None:
    workers = [RankProcess(rank) for rank in range(3)]
    try:
        parents = {int(Path(f"/proc/{worker.pid}/stat").read_text().split()[3]) for worker in workers}
        assert parents == {template.pid}
    finally:
        end(workers)
    assert not any(Path(f"/proc/{worker.pid}").exists() for worker in workers)


def test_a_rank_works_where_and_on_the_cores_that_the_driver_does_now(
    template: TemplateProcess, architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end([RankProcess(0)])  # the template has begun elsewhere
    cores = os.sched_getaffinity(0)
    monkeypatch.chdir(tmp_path)
    os.sched_setaffinity(0, {max(cores)})
    try:
        replica = ProcessReplica(settings(1), architecture, 0, device=CPU)
    finally:
        os.sched_setaffinity(0, cores)
    with closing(replica):
        replica.settle()
        [pid] = replica.pids
        assert os.sched_getaffinity(pid) == {max(cores)}
        assert Path(f"/proc/{pid}/cwd").readlink() == tmp_path


def test_the_template_has_one_thread_and_has_not_touched_a_gpu() -> None:
    """This is so that it can be forked safely."""
    script = """
        from unittest.mock import patch

        with (
            patch("torch._C._cuda_init", create=True) as begun,
            patch("torch._C._cuda_getDeviceCount", create=True) as asked,
        ):
            import tailrace.engine.ranks.template
        print(int(begun.called or asked.called), flush=True)
    """
    with driver(script) as process:
        assert numbers(process) == [0]


def test_the_template_has_no_threads(template: TemplateProcess) -> None:
    worker = RankProcess(0)
    assert worker.pid
    assert len(list(Path(f"/proc/{template.pid}/task").iterdir())) == 1
    end([worker])


def test_a_fork_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", no_more)
    heard, told = Pipe(duplex=False)
    with socket.socket() as requests:
        serving = Template(os.getppid(), requests)
    assert not serving._fork([*(os.dup(told.fileno()) for _ in range(3)), os.dup(told.fileno())])
    told.close()
    forked = ForkedProcess(TemplateProcess.__new__(TemplateProcess), heard)
    assert forked.wait(END_LIMIT_S)
    assert (forked.pid, forked.how()) == (0, "it could not be forked: Resource temporarily unavailable")


def test_a_template_that_was_killed_is_replaced_and_its_ranks_end(template: TemplateProcess) -> None:
    before = RankProcess(0)
    assert before.pid
    os.kill(template.pid, signal.SIGKILL)
    assert ended(template.pid)
    after = RankProcess(1)
    assert ended(before.pid)
    assert before.cause_of_death() == "the process that it was forked from has died: SIGKILL, out of memory?"
    assert after.pid
    end([after])


def test_a_template_that_stands_still_is_killed_and_replaced(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "KILL_LIMIT_S", 0.1)
    before = RankProcess(0)
    assert before.pid
    os.kill(template.pid, signal.SIGSTOP)
    end([RankProcess(1)])
    assert template.dead
    later = RankProcess(2)
    assert later.pid
    end([before, later])


def test_a_template_that_cannot_start_is_quoted(
    architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho Traceback\necho 'ImportError: no torch' >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(broken))
    monkeypatch.setattr(template_process, "_template", None)
    says = (
        r"died while starting: the process that it was forked from has died: exit code 3; its last output: Traceback "
    )
    try:
        with pytest.raises(RankDied, match=says + "ImportError: no torch$"):
            ProcessReplica(settings(1), architecture, 0, device=CPU).settle()
    finally:
        template_process._close()


def test_how_a_rank_ended_is_told_however_often_it_is_asked(template: TemplateProcess) -> None:
    first, second = RankProcess(0), RankProcess(1)
    os.kill(first.pid, signal.SIGTERM)
    assert [first.cause_of_death(), first.cause_of_death()] == ["SIGTERM", "SIGTERM"]
    end([first])
    os.kill(second.pid, 0)  # it is still there
    end([second])
    assert not Path(f"/proc/{second.pid}").exists()


def test_ranks_are_ended_by_a_collection_in_the_middle_of_a_start(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer runs wherever memory is allocated, so it must not wait for what its own thread is doing."""

    class Owner:
        itself: object

    def forget() -> int:
        owner = Owner()
        owner.itself = owner
        worker = RankProcess(0)
        weakref.finalize(owner, end, [worker])
        return worker.pid

    gc.disable()
    try:
        forgotten = forget()
        send_fds = socket.send_fds

        def collects(*arguments: Any) -> int:
            gc.collect()
            return send_fds(*arguments)

        monkeypatch.setattr(socket, "send_fds", collects)
        worker = RankProcess(1)
    finally:
        gc.enable()
    assert ended(forgotten)
    assert worker.pid
    end([worker])


def test_a_driver_that_is_killed_leaves_no_template_behind() -> None:
    script = """
        from tailrace.engine.ranks import template_process
        from tailrace.engine.ranks.rank_process import RankProcess

        worker = RankProcess(0)
        child = os.fork()  # which holds the driver's end of the template's socket
        if child:
            print(template_process._template.pid, worker.pid, child, flush=True)
        sys.stdin.read()
    """
    with driver(script) as process:
        template, worker, child = numbers(process)
        process.kill()
        assert ended(template)
        assert ended(worker)
        os.kill(child, signal.SIGKILL)


def test_a_forked_process_has_a_template_of_its_own(template: TemplateProcess) -> None:
    script = """
        from tailrace.engine.ranks import template_process
        from tailrace.engine.ranks.rank_process import RankProcess, end

        first = RankProcess(0)
        before = template_process._template.pid
        child = os.fork()
        if not child:
            second = RankProcess(1)
            print(before, template_process._template.pid, flush=True)
            end([second])
            sys.exit()
        os.waitpid(child, 0)
        os.kill(first.pid, 0)
    """
    with driver(script) as process:
        before, after = numbers(process)
        assert before != after
        assert process.wait(60) == 0

"""The process that those of ranks are forked from: it passes on what the driver is, and its own end costs nothing."""

import errno
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.engine.ranks import template_process
from tailrace.engine.ranks.template import _forked
from tailrace.engine.ranks.template_process import TemplateProcess
from tailrace.engine.ranks.wire import Channel, Fork, Forked
from tailrace.engine.ranks.worker_process import WorkerProcess, end
from tailrace.errors import EngineError
from tests.engine.test_process_replica import END_LIMIT_S, driver, ended, numbers


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    """The one that this process has from now on."""
    with closing(TemplateProcess()) as template:
        monkeypatch.setattr(template_process, "_template", template)
        yield template
        assert template_process._template is not None
        template_process._template.close()


def pid_of(template: TemplateProcess) -> int:
    return template._process.pid


def test_ranks_are_children_of_one_process(template: TemplateProcess) -> None:
    workers = [WorkerProcess(rank) for rank in range(3)]
    try:
        parents = {int(Path(f"/proc/{worker.pid}/stat").read_text().split()[3]) for worker in workers}
        assert parents == {pid_of(template)}
    finally:
        end(workers)
    assert not any(Path(f"/proc/{worker.pid}").exists() for worker in workers)


def test_what_was_forked_is_as_if_the_driver_had_started_it(tmp_path: Path) -> None:
    """With the environment, directory and cores of the driver at that moment."""
    script = """
        from array import array
        from tailrace.engine.ranks.template import become
        from tailrace.engine.ranks.wire import Fork

        core = min(os.sched_getaffinity(0))
        request = Fork(environment={b"BYTES": b"\\xff"}, cores=[core])
        become(request, array("i", [0, os.dup(1), os.open(sys.argv[1], os.O_RDONLY)]))
        right = [os.environb == {b"BYTES": b"\\xff"}, os.getcwd() == sys.argv[1], os.sched_getaffinity(0) == {core}]
        print(*map(int, right), flush=True)
    """
    with driver(script, tmp_path) as process:
        assert numbers(process) == [1, 1, 1]


def test_a_template_that_was_killed_is_replaced_and_its_ranks_end(template: TemplateProcess) -> None:
    before = WorkerProcess(0)
    os.kill(pid_of(template), signal.SIGKILL)
    after = WorkerProcess(1)
    assert ended(before.pid)
    assert before.obituary() == "exit code None"  # only the template could know
    end([after])


def test_a_template_that_stands_still_is_killed_and_replaced(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "_ANSWER_LIMIT_S", 0.1)
    end([WorkerProcess(0)])  # the first answer has a longer limit
    os.kill(pid_of(template), signal.SIGSTOP)
    monkeypatch.setattr(template_process, "_ANSWER_LIMIT_S", 10.0)
    end([WorkerProcess(1)])
    assert ended(pid_of(template))


def test_a_template_that_cannot_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho Traceback\necho 'ImportError: no torch' >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(broken))
    monkeypatch.setattr(template_process, "_template", None)
    says = r"^no process can be started for rank 0: the one to fork has died: exit code 3; its last output: Traceback "
    with pytest.raises(EngineError, match=says + "ImportError: no torch$"):
        WorkerProcess(0)


def test_a_fork_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", no_more)
    ours, theirs = map(Channel, socket.socketpair())
    with theirs, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(_forked, os.getppid(), theirs)
        with ours:
            ours.send(Fork(environment={}, cores=[]))
            assert ours.receive_reply(limit_s=END_LIMIT_S) == Forked(error=errno.EAGAIN)
        with pytest.raises(ConnectionError):
            serving.result(END_LIMIT_S)


def test_where_a_fork_is_refused_there_is_no_rank(template: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_ask", lambda *_: Forked(error=errno.EAGAIN))
    with pytest.raises(EngineError, match=r"^no process can be started for rank 0: Resource temporarily unavailable$"):
        WorkerProcess(0)


def test_a_driver_that_is_killed_leaves_no_template_behind() -> None:
    script = """
        from tailrace.engine.ranks import template_process
        from tailrace.engine.ranks.worker_process import WorkerProcess

        worker = WorkerProcess(0)
        child = os.fork()  # which holds the driver's end of the template's socket
        if child:
            print(template_process._template._process.pid, worker.pid, child, flush=True)
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
        from tailrace.engine.ranks.worker_process import WorkerProcess, end

        first = WorkerProcess(0)
        before = template_process._template._process.pid
        child = os.fork()
        if not child:
            second = WorkerProcess(1)
            print(before, template_process._template._process.pid, flush=True)
            end([second])
            sys.exit()
        os.waitpid(child, 0)
        os.kill(first.pid, 0)
    """
    with driver(script) as process:
        before, after = numbers(process)
        assert before != after
        assert process.wait(60) == 0

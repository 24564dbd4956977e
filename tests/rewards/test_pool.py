"""Real worker processes with graders that do their worst."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from tailrace.config.rewards import FunctionReward, GradingConfig, RegexReward
from tailrace.errors import RewardError, UserError
from tailrace.host.frames import frame
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.rewards.pool import GraderPool
from tailrace.rewards.wire import Call, Setup
from tests.rewards.requests import make_request

GRADERS = "tests.rewards.graders_for_tests"
ROOT = Path(__file__).parents[2]
RIGHT = Grade(reward=1.0, parts={"correct": 1.0})


def request(response: str, prompt: str = "") -> GradingRequest:
    return make_request(response, prompt=prompt)


def pool(function: str = "act", *, workers: int = 1, timeout_s: float = 60.0, retries: int = 0) -> GraderPool:
    grader = FunctionReward(path=f"{GRADERS}.{function}")
    return GraderPool(GradingConfig(grader=grader, workers=workers, timeout_s=timeout_s, retries=retries))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until another process makes `condition` true. Fail after 30 s."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether the process `pid` has not ended. A zombie has ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it may end while its state is read
        return False


def all_ended(pids: Path) -> bool:
    """Whether all processes listed in the file `pids` have ended."""
    return not any(is_running(int(pid)) for pid in pids.read_text().split())


def worker_pids() -> set[int]:
    """The pids of this process's children that are grading workers."""
    workers = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "tailrace.rewards.serve" in child.cmdline():
                workers.add(child.pid)
    return workers


async def test_endless_loop_is_killed_and_its_slot_grades_on() -> None:
    async with pool(timeout_s=0.3) as graders:
        (first,) = worker_pids()
        late = await graders.grade(request("loop"))
        assert not is_running(first)
        assert late == Grade(reward=None, error="timeout: grading took longer than 0.3 s")
        assert await graders.grade(request("fine")) == Grade(reward=0.5)
        assert worker_pids().isdisjoint({first})


@pytest.mark.parametrize(
    ("what", "how"),
    [("exit", "exit code 3"), ("crash", "SIGSEGV"), ("close all", "exit code 1"), ("signal its group", "SIGTERM")],
)
async def test_death_of_a_worker_is_a_grade_that_says_how(what: str, how: str) -> None:
    async with pool() as graders:
        grade = await graders.grade(request(what))
        assert grade.reward is None
        assert grade.error is not None
        assert grade.error.startswith(f"died: {how}")
        assert (await graders.grade(request("fine"))).reward == 0.5


async def test_death_quotes_the_last_output() -> None:
    async with pool() as graders:
        assert (await graders.grade(request("last words"))).error == (
            "died: exit code 5; its last output: the disk is full"
        )


async def test_worker_that_died_while_idle_costs_no_grading() -> None:
    async with pool() as graders:
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGKILL)
        (slot,) = graders._slots
        await until(lambda: slot.worker is not None and not slot.worker.alive)
        assert (await graders.grade(request("fine"))).reward == 0.5


async def test_programs_of_a_worker_that_died_go_with_it(tmp_path: Path) -> None:
    started = tmp_path / "pids"
    async with pool("announce") as graders:
        grade = await graders.grade(request(str(started), prompt="exit"))
        assert grade.error == "died: exit code 3"
        await until(lambda: all_ended(started))


async def test_printing_megabytes_leaves_the_protocol_intact() -> None:
    async with pool() as graders:
        assert await graders.grade(request("print")) == Grade(reward=1.0)
        assert await graders.grade(request("fine")) == Grade(reward=0.5)


async def test_standard_input_of_a_grader_is_empty() -> None:
    async with pool() as graders:
        assert await graders.grade(request("read")) == Grade(reward=0.0)


FAILURES = {
    "divide": r"ZeroDivisionError: division by zero \(tests/rewards/graders_for_tests.py, line \d+\)",
    "nan": r"ValueError: the grader returned nan; a reward must be a number from -1e\+09 to 1e\+09",
    "too large": r"ValueError: the grader returned 1e\+308; a reward must be a number from -1e\+09 to 1e\+09",
    "text": "TypeError: the grader must return a number or a mapping, not str",
    "text of its own kind": "TypeError: the grader must return a number or a mapping, not Text",
    "none": "TypeError: the grader must return a number or a mapping, not NoneType",
    "list": "TypeError: the grader must return a number or a mapping, not list",
    "tensor": r"TypeError: the grader must return a number or a mapping, not Tensor of shape \(3,\)",
    "no numbers": r"TypeError: the grader must return a number or a mapping, not ndarray of shape \(0, 2\)",
    "awaitable": "TypeError: the grader returned an awaitable; define it with async def",
    "a number that raises": r"KeyError: 'no number' \(.*\)",
    "a huge number": "OverflowError: int too large to convert to float",
    "no reward": "TypeError: the grader's mapping has no 'reward'; it has correct",
    "a part of text": "TypeError: part 'why' must be a number, not str",
    "a strange name": "ValueError: the name of part 'a b' cannot be that of a metric: .*",
    "half correct": "ValueError: part 'correct' must be true or false, not 0.5",
    "final number": "TypeError: final_answer must be a text, not int",
    "many parts": "ValueError: the grader's mapping has 1001 entries; expected at most 64, the reward among them",
    "sys.exit": r"SystemExit: 4 \(.*\)",
    "interrupt": r"KeyboardInterrupt \(.*\)",
    "generator exit": r"GeneratorExit \(.*\)",
    "cancelled": r"CancelledError \(.*\)",
    "no text": r"Mute: its text cannot be had \(ZeroDivisionError\) \(.*\)",
    "half a character": r"ValueError: \\ud800 \(.*\)",
    "recursion": r"RecursionError: maximum recursion depth exceeded.* \(.*\)",
    "memory": r"MemoryError \(.*\)",
}
"""The deeds of graders, and the error of the grade for each."""


async def test_each_failure_of_a_grader_is_one_grade_and_keeps_the_worker() -> None:
    async with pool() as graders:
        before = worker_pids()
        for what, error in FAILURES.items():
            grade = await graders.grade(request(what))
            assert grade.reward is None
            assert re.fullmatch(error, grade.error or ""), grade.error
            assert await graders.grade(request("fine")) == Grade(reward=0.5), what
        assert worker_pids() == before


async def test_a_traceback_has_the_lines_of_the_user_alone() -> None:
    async with pool() as graders:
        trace = (await graders.grade(request("divide"))).traceback
        assert trace is not None
        assert '"divide": lambda: 1 / 0' in trace
        assert trace.endswith("ZeroDivisionError: division by zero\n")
        assert "tailrace/" not in trace
        assert len((await graders.grade(request("recursion"))).traceback or "") < 4100


async def test_a_mapping_has_the_reward_and_parts() -> None:
    async with pool() as graders:
        assert await graders.grade(request("parts")) == Grade(
            reward=0.75, parts={"format": 1.0, "length": -2.0, "correct": 0.0}
        )
        assert await graders.grade(request("final answer")) == Grade(reward=1.0, final_answer="7")
        assert await graders.grade(request("a text of NumPy")) == Grade(reward=1.0, final_answer="7")
        assert (await graders.grade(request("half a pair"))).error.startswith("UnicodeEncodeError: ")  # type: ignore[union-attr]


@pytest.mark.parametrize("correct_at", [0.5, 0.6])
async def test_the_recipe_may_say_what_reward_is_right(correct_at: float) -> None:
    grader = FunctionReward(path=f"{GRADERS}.act")
    async with GraderPool(GradingConfig(grader=grader, workers=1, correct_at=correct_at)) as graders:
        assert (await graders.grade(request("fine"))).correct is (correct_at == 0.5)
        assert (await graders.grade(request("divide"))).correct is None


async def test_a_child_that_comes_back_from_a_fork_answers_nothing() -> None:
    async with pool() as graders:
        for number in range(3):
            assert await graders.grade(request("fork")) == Grade(reward=0.25)
            assert (await graders.grade(request("divide"))).reward is None, number


async def test_a_grader_may_start_processes_that_start_others() -> None:
    async with pool(timeout_s=60.0) as graders:
        assert await graders.grade(request("nested")) == Grade(reward=0.75)


async def test_what_became_a_daemon_ends_with_its_worker(tmp_path: Path) -> None:
    started = tmp_path / "pids"
    async with pool("daemonize", timeout_s=30.0) as graders:
        assert (await graders.grade(request(str(started)))).reward == 1.0
        assert not all_ended(started)
        assert (await graders.grade(request(str(tmp_path / "others"), prompt="exit"))).error == "died: exit code 3"
        assert all_ended(started)
        assert all_ended(tmp_path / "others")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_became_a_daemon_ends_although_its_guard_cannot_see_to_it(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.rewards.process._REAP_LIMIT_S", 0.2)
    started = tmp_path / "pids"
    async with pool("daemonize", timeout_s=30.0) as graders:
        assert (await graders.grade(request(str(started)))).reward == 1.0
        (guard,) = worker_pids()
        os.kill(guard, number)
    assert all_ended(started)
    assert not is_running(guard)


async def test_what_graders_print_is_shown_behind_their_name(capfd: pytest.CaptureFixture[str]) -> None:
    async with pool() as graders:
        await graders.grade(request("say"))
        await graders.grade(request("exit"))
    assert capfd.readouterr().err.splitlines() == ["grader-0: first", "grader-0: \\x1b[31mred", "grader-0: no end"]


@pytest.mark.parametrize("what", ["scalar", "tensor of one"])
async def test_a_tensor_of_one_number_is_that_number(what: str) -> None:
    async with pool() as graders:
        assert await graders.grade(request(what)) == Grade(reward=0.25)


@pytest.mark.parametrize("what", ["true", "numpy's true"])
async def test_truth_values_are_rewards_that_say_what_is_right(what: str) -> None:
    async with pool() as graders:
        assert await graders.grade(request(what)) == RIGHT


async def test_large_responses_pass() -> None:
    config = GradingConfig(grader=RegexReward(pattern=r"\d+"), workers=1)
    async with GraderPool(config) as graders:
        big = make_request("x" * 20_000_000 + " 7", answer="7")
        assert (await graders.grade(big)).correct


async def test_retry_gives_a_second_chance(tmp_path: Path) -> None:
    async with pool("once", retries=1) as graders:
        assert await graders.grade(request(str(tmp_path / "seen"))) == Grade(reward=1.0)


async def test_replies_go_to_their_own_requests() -> None:
    numbers = GradingConfig(grader=FunctionReward(path=f"{GRADERS}.number"), workers=2)
    async with GraderPool(numbers) as graders:
        grades = await asyncio.gather(*(graders.grade(request(str(number))) for number in range(200)))
    assert [grade.reward for grade in grades] == list(range(200))


async def test_cancelled_grading_kills_its_worker_and_the_next_gets_its_own_reply(tmp_path: Path) -> None:
    started = tmp_path / "pids"
    async with pool("announce_or_act") as graders:
        grading = asyncio.create_task(graders.grade(request(str(started), prompt="announce")))
        await until(started.exists)
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        await until(lambda: all_ended(started))
        assert await graders.grade(request("fine")) == Grade(reward=0.5)


async def test_close_ends_gradings_that_run_and_gradings_that_wait(tmp_path: Path) -> None:
    started = tmp_path / "pids"
    graders = pool("announce")
    async with graders:
        gradings = [asyncio.create_task(graders.grade(request(str(started), prompt="loop"))) for _ in range(3)]
        await until(started.exists)
    async with asyncio.timeout(10):
        results = await asyncio.gather(*gradings, return_exceptions=True)
    assert [str(result) for result in results] == ["the grader pool is closed"] * 3
    assert all(isinstance(result, RewardError) for result in results)
    await until(lambda: all_ended(started))
    assert not worker_pids()
    with pytest.raises(RewardError, match="closed"):
        await graders.grade(request("fine"))
    await graders.close()


async def test_error_in_the_body_leaves_no_worker() -> None:
    async def fail() -> None:
        async with pool(workers=2):
            assert len(worker_pids()) == 2
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert not worker_pids()


async def test_cancelled_start_leaves_no_worker() -> None:
    sleepy = GradingConfig(grader=FunctionReward(path="tests.rewards.sleepy_module.score"), workers=2)
    starting = asyncio.create_task(GraderPool(sleepy).__aenter__())
    await until(lambda: len(worker_pids()) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not worker_pids()


@pytest.mark.parametrize("deed", ["loop", "hold the lock", "sleep"])
def test_killed_pool_leaves_no_worker_whatever_it_grades(deed: str, tmp_path: Path) -> None:
    started = tmp_path / "pids"
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(f"""
            import asyncio
            from tests.rewards.test_pool import pool, request

            async def main():
                async with pool("announce") as graders:
                    await graders.grade(request({str(started)!r}, prompt={deed!r}))

            asyncio.run(main())
        """)
    )
    with subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)}) as owner:
        try:
            asyncio.run(until(started.exists))
        finally:
            owner.kill()
    asyncio.run(until(lambda: all_ended(started)))


def test_worker_whose_input_closes_dies_with_the_programs_that_its_grader_started(tmp_path: Path) -> None:
    started = tmp_path / "pids"
    config = FunctionReward(path=f"{GRADERS}.announce").model_dump()
    command = [sys.executable, "-m", "tailrace.rewards.serve"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True) as worker:
        assert worker.stdin is not None
        try:
            setup, call = (
                Setup(config, "rewards.grader", timeout_s=60.0),
                Call(0, [request(str(started), prompt="loop")]),
            )
            worker.stdin.write(frame(setup) + frame(call))
            worker.stdin.flush()
            asyncio.run(until(started.exists))
            worker.stdin.close()
            assert worker.wait(30) == -signal.SIGTERM
            asyncio.run(until(lambda: all_ended(started)))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("score", "must be a dotted path"),
        ("no_such_package.score", "no module 'no_such_package'"),
        (f"{GRADERS}.acts", "has no 'acts'; did you mean 'act'"),
        (f"{GRADERS}.NOT_CALLABLE", "is of type int, not a function"),
        (
            f"{GRADERS}.weighted",
            r"called by name with prompt, question, .*; it cannot be: missing a required argument: 'weight'",
        ),
        (
            "tests.rewards.broken_module.score",
            r"cannot be imported: NameError: name 'undefined' is not defined \(tests/.*/broken_module.py, line 3\)$",
        ),
        ("tests.rewards.deadly_module.score", "at the start its process died: exit code 9"),
    ],
)
async def test_grader_that_cannot_be_made_is_one_line_at_the_start(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        async with GraderPool(GradingConfig(grader=FunctionReward(path=path), workers=2)):
            pass
    assert "\n" not in str(caught.value)
    assert not worker_pids()


async def test_machine_without_room_for_a_process_is_a_grade_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*command: str, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    async with pool() as graders:
        await graders.grade(request("exit"))
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
        assert (await graders.grade(request("fine"))).error == (
            "died: no process could be started: Resource temporarily unavailable"
        )
        monkeypatch.undo()
        assert await graders.grade(request("fine")) == Grade(reward=0.5)


async def test_file_named_like_a_module_of_python_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ctypes.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    async with GraderPool(GradingConfig(grader=RegexReward(pattern=r"\d+"), workers=1)) as graders:
        seven = make_request("7", answer="7")
        assert (await graders.grade(seven)).correct


async def test_working_directory_is_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(response, answer, prompt, metadata, bonus):\n    return bonus\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = GradingConfig(grader=FunctionReward(path="my_rewards.score", arguments={"bonus": 0.25}), workers=1)
    async with GraderPool(config) as graders:
        assert await graders.grade(request("")) == Grade(reward=0.25)

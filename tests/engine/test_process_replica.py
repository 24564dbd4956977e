"""Replicas of real worker processes that are stopped, killed or orphaned."""

import errno
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine import memory as memory_module
from tailrace.engine.collectives.base import Alone
from tailrace.engine.model.shard import WHOLE
from tailrace.engine.model.weights import read_weights
from tailrace.engine.ranks import process
from tailrace.engine.ranks import rank_process as worker_process
from tailrace.engine.ranks.base import RankDied, Replica
from tailrace.engine.ranks.local import LocalReplica
from tailrace.engine.ranks.process import ProcessReplica, rank_device
from tailrace.engine.ranks.rank import Rank
from tailrace.engine.ranks.rank_process import RankProcess, RankProcesses
from tailrace.engine.ranks.staging import StagedWeights
from tailrace.engine.ranks.wire import Measure, Switch
from tailrace.engine.scheduling.migration import Migration
from tailrace.engine.scheduling.step import Chunk, Draw, StepInput
from tailrace.errors import ConfigError, EngineError
from tailrace.models.architecture import Architecture, read_architecture
from tests.conftest import TinyModel

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
END_LIMIT_S = 30
STEP_LIMIT_S = 3.0
"""The step limit of a replica whose ranks are stopped. A tiny model's step takes milliseconds."""
PROMPTS = [[7, 100, 42, 9, 200], [11, 12, 13]]
STEP = StepInput([], [Chunk(0, PROMPTS[0], [0, 1], Draw(5, 0, 0.0, 0, 1.0, 0.0))])

Named = Mapping[str, torch.Tensor]


def settings(tp: int, **others: object) -> NativeEngineConfig:
    fixed = {"dtype": "float32", "block_size": 4, "kv_cache_gib": 0.001, "threads_per_rank": 1}
    return NativeEngineConfig.model_validate({**fixed, "tp": tp, **others})


def generate(replica: Replica, count: int = 6) -> tuple[list[int], list[float]]:
    """Sample `count` tokens after each of PROMPTS, step by step. Return the tokens and their log-probabilities."""
    prompts, tokens, log_probs = [list(prompt) for prompt in PROMPTS], [], []
    for position in range(count):
        chunks = []
        for index, prompt in enumerate(prompts):
            start = 0 if position == 0 else len(prompt) - 1
            blocks = list(range(index * 4, index * 4 + 4))
            chunks.append(Chunk(start, prompt[start:], blocks, Draw(index, position, 1.0, 0, 1.0, 0.0)))
        replica.start(StepInput([], chunks))
        output = replica.finish()
        for prompt, token in zip(prompts, output.tokens, strict=True):
            prompt.append(token)
        tokens += output.tokens
        log_probs += output.log_probs
    return tokens, log_probs


def ended(pid: int) -> bool:
    """Whether the process ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], END_LIMIT_S)[0])
    finally:
        os.close(handle)


@contextmanager
def driver(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a process that runs `script` with `arguments`, and kill it at the end."""
    prelude = "import os, sys\nfrom tests.engine.test_process_replica import *\n"
    command = (sys.executable, "-c", prelude + textwrap.dedent(script), *map(str, arguments))
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def numbers(process: subprocess.Popen[str]) -> list[int]:
    """The numbers on the next line that `process` prints."""
    assert process.stdout is not None
    return list(map(int, process.stdout.readline().split()))


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in the place of /dev/shm."""
    directory = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "MEMORY_BACKED", directory)
        yield directory


@pytest.fixture(scope="module")
def model_dir(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def architecture(model_dir: Path) -> Architecture:
    return read_architecture(model_dir)


@pytest.fixture(scope="module")
def weights(model_dir: Path) -> Named:
    return dict(read_weights(model_dir))


@pytest.fixture(scope="module")
def newer(weights: Named) -> Named:
    generator = torch.Generator().manual_seed(1)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def local(architecture: Architecture) -> LocalReplica:
    return LocalReplica(Rank(settings(1), architecture, WHOLE, device=CPU, collective=Alone()))


@pytest.fixture(scope="module")
def _made(architecture: Architecture, memory: Path) -> Iterator[ProcessReplica]:
    made = ProcessReplica(settings(2), architecture, 0, device=CPU)
    yield made
    left = made.pids
    made.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)


@pytest.fixture(scope="module")
def single(architecture: Architecture, memory: Path) -> Iterator[ProcessReplica]:
    """The second of two replicas, with one rank each."""
    made = ProcessReplica(settings(1, dp=2), architecture, 1, device=CPU)
    yield made
    made.close()


@pytest.fixture
def replica(_made: ProcessReplica, weights: Named) -> ProcessReplica:
    """A replica of two ranks, restarted if an earlier test has killed one."""
    try:
        _made.load(weights)
    except RankDied:
        _made.restart()
    return _made


def test_two_ranks_give_the_tokens_of_one(replica: ProcessReplica, local: LocalReplica, weights: Named) -> None:
    local.load(weights)
    tokens, log_probs = generate(local)
    their_tokens, their_log_probs = generate(replica)
    assert their_tokens == tokens
    assert their_log_probs == pytest.approx(log_probs, abs=1e-4)


def test_one_rank_in_a_process_of_its_own_gives_the_same_numbers(
    single: ProcessReplica, local: LocalReplica, weights: Named
) -> None:
    local.load(weights)
    single.load(StagedWeights.write(weights))
    assert generate(single) == generate(local)


def test_ranks_are_numbered_across_replicas(single: ProcessReplica) -> None:
    assert [str(worker) for worker in single._processes] == [f"rank 1 (pid {single.pids[0]})"]


def test_newer_weights_change_what_is_generated(
    replica: ProcessReplica, local: LocalReplica, weights: Named, newer: Named
) -> None:
    before = generate(replica)
    replica.load(newer)
    local.load(newer)
    after = generate(replica)
    assert after[0] == generate(local)[0]
    assert after != before


def test_nothing_of_ours_has_a_name_while_ranks_run(replica: ProcessReplica, memory: Path) -> None:
    replica.settle()
    assert list(memory.iterdir()) == []


def test_a_rank_killed_in_a_step_is_named_and_restarting_brings_the_newest_weights(
    replica: ProcessReplica, local: LocalReplica, newer: Named
) -> None:
    replica.load(newer)
    replica.settle()
    first, second = replica.pids
    os.kill(second, signal.SIGSTOP)  # so that the step does not end before the kill
    replica.start(STEP)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(RankDied, match=rf"^rank 1 \(pid {second}\) died while computing a step: SIGKILL, out of mem"):
        replica.finish()
    assert ended(first)
    with pytest.raises(RankDied, match=r"^the ranks of replica 0 have ended$"):
        replica.start(STEP)
    replica.restart()
    local.load(newer)
    assert generate(replica)[0] == generate(local)[0]


def test_an_error_of_a_rank_that_lives_comes_with_its_words(replica: ProcessReplica, weights: Named) -> None:
    before = replica.pids
    replica.load({name: torch.full_like(tensor, float("nan")) for name, tensor in weights.items()})
    replica.start(STEP)
    with pytest.raises(EngineError, match="finite") as raised:
        replica.finish()
    assert type(raised.value) is EngineError
    replica.load(weights)
    replica.start(STEP)
    replica.finish()
    assert replica.pids == before


def test_a_rank_that_stands_still_is_killed(architecture: Architecture, memory: Path, weights: Named) -> None:
    replica = ProcessReplica(settings(2, step_timeout_s=STEP_LIMIT_S), architecture, 0, device=CPU)
    replica.load(weights)
    replica.settle()
    first, second = replica.pids
    os.kill(second, signal.SIGSTOP)
    replica.start(STEP)
    with pytest.raises(
        RankDied, match=rf"rank 1 \(pid {second}\) .*: killed after {STEP_LIMIT_S:g} s without an answer"
    ):
        replica.finish()
    assert ended(first)
    assert ended(second)


def test_a_replica_closes_in_the_middle_of_a_step_and_twice(architecture: Architecture, weights: Named) -> None:
    replica = ProcessReplica(settings(1), architecture, 0, device=CPU)
    replica.load(weights)
    replica.settle()
    (pid,) = replica.pids
    os.kill(pid, signal.SIGSTOP)
    replica.start(STEP)
    replica.close()
    assert not Path(f"/proc/{pid}").exists()
    replica.close()


def test_a_replica_that_is_forgotten_takes_its_processes_along(architecture: Architecture, memory: Path) -> None:
    replica = ProcessReplica(settings(1), architecture, 0, device=CPU)
    (pid,) = replica.pids
    del replica
    gc.collect()
    assert ended(pid)
    assert list(memory.iterdir()) == []


def test_a_driver_that_is_killed_leaves_no_rank_behind(model_dir: Path) -> None:
    """Rank 0 waits in a collective for the stopped rank 1."""
    script = """
        directory = Path(sys.argv[1])
        replica = ProcessReplica(settings(2), read_architecture(directory), 0, device=CPU)
        replica.load(dict(read_weights(directory)))
        replica.settle()
        os.kill(replica.pids[1], signal.SIGSTOP)
        replica.start(STEP)
        print(*replica.pids, flush=True)
        sys.stdin.read()
    """
    with driver(script, model_dir) as process:
        first, second = numbers(process)
        process.kill()
    assert ended(first)
    os.kill(second, signal.SIGCONT)
    assert ended(second)


def test_a_forked_process_that_ends_leaves_the_ranks_alone(model_dir: Path) -> None:
    script = """
        directory = Path(sys.argv[1])
        replica = ProcessReplica(settings(1), read_architecture(directory), 0, device=CPU)
        child = os.fork()
        if not child:
            sys.exit()
        os.waitpid(child, 0)
        replica.load(dict(read_weights(directory)))
        replica.start(STEP)
        print(len(replica.finish().tokens), flush=True)
    """
    with driver(script, model_dir) as process:
        assert numbers(process) == [1]


def test_a_forked_process_that_lives_on_does_not_keep_the_ranks_of_a_driver_that_is_killed(model_dir: Path) -> None:
    script = """
        replica = ProcessReplica(settings(1), read_architecture(Path(sys.argv[1])), 0, device=CPU)
        replica.settle()
        child = os.fork()
        if child:
            print(*replica.pids, child, flush=True)
        sys.stdin.read()
    """
    with driver(script, model_dir) as process:
        rank, child = numbers(process)
        process.kill()
        assert ended(rank)
        os.kill(child, 0)  # it is still there
        os.kill(child, signal.SIGKILL)


def test_a_driver_that_is_killed_while_ranks_start_leaves_no_directory_behind(model_dir: Path, tmp_path: Path) -> None:
    """Rank 0 waits for the stopped rank 1."""
    script = """
        memory_module.MEMORY_BACKED = Path(sys.argv[2])
        replica = ProcessReplica(settings(2), read_architecture(Path(sys.argv[1])), 0, device=CPU)
        os.kill(replica.pids[1], signal.SIGSTOP)
        print(*replica.pids, flush=True)
        sys.stdin.read()
    """
    with driver(script, model_dir, tmp_path) as process:
        first, second = numbers(process)
        assert len(list(tmp_path.iterdir())) == 1
        process.kill()
    assert ended(first)
    os.kill(second, signal.SIGCONT)
    assert ended(second)
    assert list(tmp_path.iterdir()) == []


def test_a_driver_that_is_killed_while_ranks_meet_again_leaves_no_directory_behind(
    model_dir: Path, tmp_path: Path
) -> None:
    """Rank 0 waits for the stopped rank 1. The file that rank 0 opens shows that it has its order."""
    script = """
        from tailrace.engine.collectives.rendezvous import rendezvous
        from tailrace.engine.ranks.wire import Meet
        from tests.helpers.waiting import until
        memory_module.MEMORY_BACKED = Path(sys.argv[2])
        replica = ProcessReplica(settings(2), read_architecture(Path(sys.argv[1])), 0, device=CPU)
        replica.settle()
        os.kill(replica.pids[1], signal.SIGSTOP)
        with rendezvous() as place:
            replica.tell([Meet({2: place.directory})] * 2, doing="meeting")
            until(lambda: os.listdir(place.directory))
            print(*replica.pids, flush=True)
            sys.stdin.read()
    """
    with driver(script, model_dir, tmp_path) as process:
        first, second = numbers(process)
        (directory,) = tmp_path.iterdir()
        assert list(directory.iterdir()), "rank 0 has come"
        process.kill()
    assert ended(first)
    assert list(tmp_path.iterdir()) == []
    os.kill(second, signal.SIGCONT)
    assert ended(second)


def test_a_rank_alone_needs_no_directory(architecture: Architecture, memory: Path) -> None:
    replica = ProcessReplica(settings(1), architecture, 0, device=CPU)
    assert list(memory.iterdir()) == []
    replica.close()


def test_where_no_thread_can_be_started_there_is_no_rank(
    architecture: Architecture, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    with pytest.raises(EngineError, match=r"^no thread can be started for rank 0: can't start new thread$"):
        ProcessReplica(settings(1), architecture, 0, device=CPU)


def test_a_rank_that_cannot_be_made_says_why_and_ends(architecture: Architecture, memory: Path) -> None:
    replica = ProcessReplica(settings(1, kv_cache_gib=1e-9), architecture, 0, device=CPU)
    (pid,) = replica.pids
    with pytest.raises(ConfigError, match=r"kv_cache_gib 1e-09 holds no block"):
        replica.settle()
    assert ended(pid)


def test_a_process_that_dies_while_starting_is_quoted() -> None:
    worker = RankProcess(0)
    worker.channel.send(Measure())
    with pytest.raises(ConnectionError):
        worker.channel.receive_answer(limit_s=END_LIMIT_S)
    last = worker.cause_of_death()
    assert last.startswith("exit code 1; its last output: ")
    assert last.endswith("AssertionError: the first order makes the rank")


def test_ranks_that_die_while_they_are_made_again_can_be_made_once_more(
    architecture: Architecture, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doomed(RankProcess):
        def __init__(self, rank: int) -> None:
            super().__init__(rank)
            os.kill(self.pid, signal.SIGKILL)

    replica = ProcessReplica(settings(1), architecture, 0, device=CPU)
    with monkeypatch.context() as patch:
        patch.setattr(worker_process, "RankProcess", Doomed)
        with pytest.raises(RankDied, match=r"^rank 0 .* died while starting: SIGKILL"):
            replica.restart()
    replica.restart()
    replica.close()


def test_ranks_that_cannot_be_made_again_are_not_a_death_to_restart_after(
    architecture: Architecture, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_files() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    replica = ProcessReplica(settings(1), architecture, 0, device=CPU)
    monkeypatch.setattr(socket, "socketpair", no_more_files)
    says = r"^the ranks of replica 0 cannot be made again: no process can be started for rank 0: Too many open files$"
    with pytest.raises(EngineError, match=says) as raised:
        replica.restart()
    assert not isinstance(raised.value, RankDied)


def test_where_one_process_cannot_be_started_the_others_end(
    architecture: Architecture, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Second(RankProcess):
        def __init__(self, rank: int) -> None:
            if rank == 1:
                raise KeyboardInterrupt
            super().__init__(rank)
            started.append(self.pid)

    monkeypatch.setattr(worker_process, "RankProcess", Second)
    with pytest.raises(KeyboardInterrupt):
        ProcessReplica(settings(2), architecture, 0, device=CPU)
    assert [Path(f"/proc/{pid}").exists() for pid in started] == [False]


def test_interrupting_ends_the_wait_for_a_rank_that_stands_still(
    architecture: Architecture, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(RankProcess):
        def __init__(self, rank: int) -> None:
            super().__init__(rank)
            if rank == 1:
                os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(worker_process, "RankProcess", Stopped)
    all_processes = RankProcesses()
    replica = ProcessReplica(settings(2), architecture, 0, device=CPU, all_processes=all_processes)
    interruption = threading.Thread(target=all_processes.interrupt)
    interruption.start()
    with pytest.raises(RankDied, match="died while starting: SIGKILL"):
        replica.settle()
    interruption.join()
    with pytest.raises(EngineError, match="being closed"):
        replica.restart()
    assert replica.pids == []


def test_the_error_of_one_rank_does_not_wait_for_ranks_that_hang(
    architecture: Architecture, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_REST_LIMIT_S", 0.1)
    replica = ProcessReplica(settings(2), architecture, 0, device=CPU)
    replica.settle()
    first, second = replica.pids
    os.kill(second, signal.SIGSTOP)
    replica.tell([Switch(4, [Migration([], [])]), Measure()], doing="changing")
    with pytest.raises(EngineError, match=r"^rank 0 has no communication group of degree 4"):
        replica.answers()
    assert ended(first)
    assert ended(second)


def test_starting_has_a_limit(architecture: Architecture, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(RankProcess):
        def __init__(self, rank: int) -> None:
            super().__init__(rank)
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(worker_process, "RankProcess", Stopped)
    monkeypatch.setattr(process, "START_LIMIT_S", 0.01)
    replica = ProcessReplica(settings(1), architecture, 0, device=CPU)
    with pytest.raises(RankDied, match=r"died while starting: killed after 0\.01 s without an answer"):
        replica.settle()


def test_staged_weights_are_the_tensors_that_were_written() -> None:
    named = {
        "a": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
        "b": torch.arange(12.0).view(3, 4).T,
        "c": torch.tensor([1.5], requires_grad=True),
    }
    written = StagedWeights.write(named)
    staged = StagedWeights(os.dup(written.descriptor), written.places)
    assert list(staged) == list(named)
    for name, tensor in named.items():
        assert staged[name].dtype == tensor.dtype
        assert torch.equal(staged[name], tensor)


def test_weights_without_room_say_where_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "MEMORY_BACKED", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match=r"cannot be written to .*/nowhere: No such file .* set TMPDIR$"):
        StagedWeights.write({"a": torch.zeros(4)})


def test_weights_without_a_descriptor_do_not_ask_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_files(**_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tempfile, "TemporaryFile", no_more_files)
    with pytest.raises(EngineError, match=r"cannot be written to .*: Too many open files$"):
        StagedWeights.write({"a": torch.zeros(4)})


def test_each_rank_has_a_cuda_device_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    cuda = torch.device("cuda")
    assert rank_device(CPU, 3, 4) == CPU
    assert [rank_device(cuda, rank, 4).index for rank in range(4)] == [0, 1, 2, 3]
    assert rank_device(torch.device("cuda:2"), 0, 1).index == 2
    with pytest.raises(ConfigError, match=r"2 ranks .* cannot share cuda:1; use the device cuda"):
        rank_device(torch.device("cuda:1"), 0, 2)
    with pytest.raises(ConfigError, match=r"8 ranks .* need as many CUDA devices, and there are 4"):
        rank_device(cuda, 0, 8)

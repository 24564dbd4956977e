"""A changed checkpoint is used, or refused in one line: no byte of it leads to a traceback.

Each file is changed as bytes. If it is JSON or MessagePack, or has a JSON header, its values are changed, too. The
manifest agrees with the changed file, as a forger's would.
"""

import asyncio
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tailrace.errors import CheckpointError
from tailrace.run.checkpoint import QUEUE_FILE, RUN_FILE, RunState, read_run_state, restore_queue
from tailrace.trainer import checkpoint, state
from tailrace.trainer.checkpoint import MANIFEST, CheckpointStore, find_damage
from tests.transfer.test_snapshot import fresh, half_done

CHANGES = 12
"""The number of changes of each kind to each file."""
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**62,
    2**63,
    -(2**63),
    1e308,
    0.5,
    "",
    "x",
    "../x",
    "é\x1b[31m",
    [],
    {},
    [[]],
]


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


async def snapshot_of_a_queue() -> bytes:
    queue, _ = await half_done()
    return await queue.snapshot()


@pytest.fixture
def right(tmp_path: Path) -> Path:
    """A correct checkpoint of a run."""
    model, optimizer = model_and_optimizer()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    snapshot = asyncio.run(snapshot_of_a_queue())
    run = RunState(trained_steps=1, next_step=2, elapsed_s=1.5, prompts="abc", unacked=[1])

    def write(directory: Path) -> None:
        state.save(directory, model, optimizer, state.Counters(updates=1))
        (directory / QUEUE_FILE).write_bytes(snapshot)
        (directory / RUN_FILE).write_bytes(msgspec.json.encode(run))

    return CheckpointStore(tmp_path / "right", keep=1).save(1, write)


async def read(directory: Path) -> None:
    """Read a checkpoint as a resumed run does."""
    CheckpointStore(directory.parent, keep=1).verify(directory)
    read_run_state(directory)
    model, optimizer = model_and_optimizer()
    state.load(directory, model, optimizer)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    queue = fresh()
    await restore_queue(directory, queue)
    await queue.snapshot()


def as_bytes(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    match rng.randrange(6):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + rng.randbytes(rng.choice([1, 8, 100])) + content[place:]
        case 2:
            return content[:place] + b"\xff" * 8 + content[place + 8 :]
        case 3:
            return rng.randbytes(rng.choice([0, 1, 9, 1000]))
        case _:
            changed = bytearray(content)
            for _ in range(rng.choice([1, 2, 8])):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)


def as_value(value: Any, rng: random.Random) -> Any:
    """A copy of `value` in which one item is changed, left out or put twice."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        copy: Any = value.copy()
        place = rng.choice(sorted(copy, key=str)) if isinstance(copy, dict) else rng.randrange(len(copy))
        kind = rng.random()
        if kind < 0.1:
            del copy[place]
        elif kind < 0.2:
            odd = rng.choice(["x", "é", "", "exp_avg/x", "cuda:x"])
            copy = {**copy, odd: copy[place]} if isinstance(copy, dict) else [*copy, copy[place]]
        else:
            copy[place] = as_value(copy[place], rng)
        return copy
    if isinstance(value, bytes) and rng.random() < 0.8:
        return as_bytes(value, rng)
    if isinstance(value, int) and rng.random() < 0.3:
        return value + rng.choice([-1, 1])
    return rng.choice(ODD) if rng.random() < 0.95 else deep(20_000)


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def as_text(content: bytes, change: Callable[[Any], Any]) -> bytes:
    changed = change(json.loads(content))
    return json.dumps(changed).encode("utf-8", "surrogatepass")


def as_what_it_says(name: str, content: bytes, rng: random.Random) -> bytes:
    def change(value: Any) -> Any:
        return as_value(value, rng)

    try:
        if name.endswith(".json"):
            return as_text(content, change)
        if name.endswith(".msgpack"):
            return msgspec.msgpack.encode(change(msgspec.msgpack.decode(content)))
        (length,) = struct.unpack("<Q", content[:8])
        header = as_text(content[8 : 8 + length], change)
        return struct.pack("<Q", len(header)) + header + content[8 + length :]
    except RecursionError:  # the test's own encoder has a limit, too
        return nested(20_000) if name.endswith(".json") else b"\x91" * 20_000
    except OverflowError:  # MessagePack cannot hold such a number
        return content


def forged(right: Path, directory: Path) -> Iterator[tuple[str, str]]:
    """Yield forged checkpoints at `directory`, one after the other, as the changed file and the change's number."""
    files = sorted(path.name for path in right.iterdir() if path.name != MANIFEST)
    for name in [*files, MANIFEST]:
        content = (right / name).read_bytes()
        for number in range(2 * CHANGES):
            rng = random.Random(f"{name} {number}")
            said = number % 2 == 0
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(right, directory)
            (directory / name).write_bytes(as_what_it_says(name, content, rng) if said else as_bytes(content, rng))
            if name != MANIFEST:
                (directory / MANIFEST).unlink()
                checkpoint._write_manifest(directory)
            yield name, f"{number}"


def test_a_forged_checkpoint_is_used_or_refused_in_one_line(right: Path, tmp_path: Path) -> None:
    asyncio.run(read(right))
    random_state = random.getstate()
    wrong, refused = [], 0
    for name, how in forged(right, tmp_path / "step_000001"):
        try:
            asyncio.run(read(tmp_path / "step_000001"))
        except CheckpointError as error:
            refused += 1
            text = str(error)
            if "\n" in text or len(text) > 1500:
                wrong.append(f"{name} {how}: {len(text)} characters: {text[:500]!r}")
        except Exception as error:  # so that all faults are shown at once
            wrong.append(f"{name} {how}: {type(error).__name__}: {str(error)[:300]}")
    random.setstate(random_state)
    assert wrong == [], f"{len(wrong)}\n" + "\n".join(wrong)
    assert refused > CHANGES


def test_a_manifest_names_files_of_its_checkpoint_alone(right: Path, tmp_path: Path) -> None:
    directory = tmp_path / "step_000001"
    shutil.copytree(right, directory)
    (tmp_path / "other").write_bytes(b"")
    (directory / MANIFEST).write_bytes(b'{"../other": {"size": 0, "crc32": 0}}')
    assert "names '../other', which is not in the checkpoint" in str(find_damage(directory))
    (directory / MANIFEST).write_bytes(b'{"/dev/null": {"size": 0, "crc32": 0}}')
    assert "names '/dev/null', which is not" in str(find_damage(directory))

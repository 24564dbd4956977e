"""Models of a given architecture with random weights, for measurements of speed."""

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from tailrace.errors import ModelError, one_line
from tailrace.host.cache import cache_directory, locked, make_private
from tailrace.models.architecture import CONFIG, Shape, parameter_shapes, read_architecture
from tailrace.models.info import SINGLE_FILE
from tailrace.models.loading import check_config

_BYTES = 2
"""Of a weight, in bf16."""


def random_model(architecture: Path) -> Path:
    """Return the directory of a model with random weights, and a tokenizer whose words are numbers.

    It is made once in Tailrace's cache, in bf16, and appears there in one step. Of several processes, one makes it and
    the others wait for it.

    `architecture`: a Hugging Face `config.json`, or a directory that has one.

    Raises:
        ModelError: there is no such file, or it is not of a model that can be run.
    """
    source = _checked(architecture)
    digest = hashlib.blake2b((source / CONFIG).read_bytes(), digest_size=8).hexdigest()
    directory = cache_directory() / "models" / f"random-{digest}"
    make_private(directory.parent)
    with locked(directory.parent / f".{directory.name}.lock"):
        if not directory.is_dir():
            _write(source, directory)
    return directory


def weightless_model(architecture: Path, directory: Path) -> Path:
    """Write what stands for `random_model` in checks, which read no weights, and return its directory.

    Its weights are one file of the right size with nothing but a header. It takes no room on the disk.

    `directory`: exists, and is empty.

    Raises:
        ModelError: see `random_model`.
    """
    source = _checked(architecture)
    shape = read_architecture(source)
    shutil.copyfile(source / CONFIG, directory / CONFIG)
    _write_tokenizer(shape.vocab_size, directory)
    _write_header(parameter_shapes(shape), directory / SINGLE_FILE)
    return directory


def _checked(architecture: Path) -> Path:
    """The directory of the `config.json`, which engine and trainer can read."""
    source = architecture.parent if architecture.name == CONFIG else architecture
    read_architecture(source)
    check_config(source)
    return source


def _write_header(shapes: Mapping[str, Shape], file: Path) -> None:
    """Write a safetensors file of bf16 weights without their data, which is a hole in the file."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + _BYTES * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    header = json.dumps(entries).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)


def _write(source: Path, directory: Path) -> None:
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that died
    try:
        _make(source, partial)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make(source: Path, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source, local_files_only=True)
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise ModelError(f"no model can be made of {source / CONFIG}: {one_line(error)}") from None
    model.save_pretrained(directory)
    _write_tokenizer(config.vocab_size, directory)


def _write_tokenizer(tokens: int, directory: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {str(token): token for token in range(tokens)}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0"))
    )
    tokenizer.save_pretrained(directory)

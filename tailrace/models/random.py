"""Models of a given architecture with random weights, for measurements of speed."""

import hashlib
import json
import shutil
from pathlib import Path

from tailrace.errors import ModelError, one_line
from tailrace.host.cache import cache_directory, locked, make_private


def random_model(architecture: Path) -> Path:
    """Return the directory of a model with random weights, and a tokenizer whose words are numbers.

    It is made once in Tailrace's cache, in bf16, and appears there in one step. Of several processes, one makes it and
    the others wait for it.

    `architecture`: a Hugging Face `config.json`, or a directory that has one.

    Raises:
        ModelError: there is no such file, or transformers knows no such architecture.
    """
    file = architecture / "config.json" if architecture.is_dir() else architecture
    try:
        content = file.read_bytes()
        json.loads(content)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is not the config.json of a model: {one_line(error)}") from None
    directory = cache_directory() / "models" / f"random-{hashlib.blake2b(content, digest_size=8).hexdigest()}"
    make_private(directory.parent)
    with locked(directory.parent / f".{directory.name}.lock"):
        if not directory.is_dir():
            _write(file, directory)
    return directory


def _write(config_file: Path, directory: Path) -> None:
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that died
    try:
        _make(config_file, partial)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make(config_file: Path, directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    try:
        config = AutoConfig.from_pretrained(config_file, local_files_only=True)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no model can be made of {config_file}: {one_line(error)}") from None
    model.save_pretrained(directory)
    words = {str(token): token for token in range(config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0"))
    )
    tokenizer.save_pretrained(directory)

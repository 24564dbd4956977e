"""Tokenizers of model directories."""

from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import ModelError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in `directory`, with its chat template where it has one.

    Raises:
        ModelError: it is missing, corrupt or without a vocabulary.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ModelError(f"cannot load the tokenizer in {directory}: {one_line(error)}") from None
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # its class fills in for the files: all text would be no token
        raise ModelError(f"the tokenizer in {directory} has special tokens only; tokenizer.json is missing there")
    return tokenizer


def decode_text(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    """The text of `token_ids`, without special tokens."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text

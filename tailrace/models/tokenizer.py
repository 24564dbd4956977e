"""Tokenizers of model directories."""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.config.engine import SamplingConfig
from tailrace.errors import ModelError, TailraceWarning, one_line
from tailrace.models.architecture import read_eos_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in `directory`, with its chat template where it has one.

    Raises:
        ModelError: the tokenizer is missing, corrupt or without a vocabulary.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ModelError(f"cannot load the tokenizer in {directory}: {one_line(error)}") from None
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # its class fills in for the files: all text would be no token
        raise ModelError(f"the tokenizer in {directory} has special tokens only; tokenizer.json is missing there")
    return tokenizer


class ResponseText:
    """Makes text of the tokens of responses. It warns once where that loses more than marks of ends."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", model_dir: Path, sampling: SamplingConfig) -> None:
        """Read which tokens are special, and which of them end a response.

        Raises:
            ModelError: the model's end-of-sequence tokens cannot be read.
        """
        self._tokenizer = tokenizer
        self._keep = sampling.keep_special_tokens
        ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *read_eos_ids(model_dir, vocab_size=sys.maxsize)}
        special = _special_ids(tokenizer)
        self._ends = (ends - {None}) | special.intersection(sampling.stop_token_ids)
        self._words = special - {tokenizer.bos_token_id, tokenizer.unk_token_id, *self._ends}
        """Special tokens that mean something in the middle of a response."""

    def __call__(self, token_ids: list[int]) -> str:
        """Return the text of a response, without special tokens unless they are to be kept."""
        if self._keep:
            while token_ids and token_ids[-1] in self._ends:
                token_ids = token_ids[:-1]
        elif lost := self._words.intersection(token_ids):
            self._warn(sorted(lost))
        text = self._tokenizer.decode(token_ids, skip_special_tokens=not self._keep)
        assert isinstance(text, str)
        return text

    def _warn(self, lost: list[int]) -> None:
        tokens = " ".join(self._tokenizer.convert_ids_to_tokens(lost))
        warnings.warn(
            f"responses have special tokens that are left out of their text, such as {tokens}: graders do not see "
            "them; with sampling.keep_special_tokens=true they do",
            TailraceWarning,
            stacklevel=3,
        )
        self._words = set()  # it is said once


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """All tokens that decoding can skip: those with a name, such as eos_token, and those only marked as special."""
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)

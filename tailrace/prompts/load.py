"""Prompts for a run: read from their source, presented to the model, split.

source rows ──▶ present (chat template or raw) ──▶ tokenize ──▶ held-out | train, without a common text
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING

import jinja2
import msgspec
import numpy as np

from tailrace.config.prompts import Presentation, PromptsConfig
from tailrace.errors import PromptError, one_line
from tailrace.prompts.order import permutation
from tailrace.prompts.sources.base import Row
from tailrace.prompts.sources.factory import source_rows
from tailrace.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPLIT_EPOCH = -1
"""The split's permutation is none of an epoch of training."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptSet:
    """Disjoint in their texts; each in the order of the source."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    """Without two equal texts."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal prompts in equal order, with equal answers."""
        digest = blake2b(digest_size=16)
        for prompt in (*self.train, *self.held_out):
            digest.update(repr((prompt.text, prompt.answer)).encode())
        digest.update(str(len(self.train)).encode())
        return digest.hexdigest()


def load_prompts(
    config: PromptsConfig, tokenizer: "PreTrainedTokenizerBase", *, seed: int, max_tokens: int
) -> PromptSet:
    """Read, present, tokenize and split the prompts of a run. `seed` chooses the held-out ones.

    Raises:
        PromptError: the source cannot be read or is empty, a prompt is longer than `max_tokens`, the tokenizer has no
            chat template where one is asked for, or nothing is left to train on.
    """
    prompts = present(source_rows(config.source), config, tokenizer)
    if not prompts:
        raise PromptError(f"prompts.source of type {config.source.type} has no prompts")
    check_lengths(prompts, max_tokens, "remove them, raise prompts.max_prompt_tokens, or lower sampling.max_new_tokens")
    return _split(prompts, config.held_out, seed)


def present(rows: Iterable[Row], config: Presentation, tokenizer: "PreTrainedTokenizerBase") -> list[Prompt]:
    """Prompts as the model reads them, tokenized, in the order of `rows`.

    Raises:
        PromptError: the rows cannot be read, one cannot be presented or has no tokens, or the tokenizer has no chat
            template where one is asked for.
    """
    _check_presentation(config, tokenizer)
    rows = list(rows)
    _check_metadata(rows)
    prompts = _tokenize(rows, config, tokenizer) if rows else []
    for prompt in prompts:
        if not len(prompt.prompt_ids):
            raise PromptError(f"prompt {prompt.prompt_id} has no tokens")
    return prompts


def _check_presentation(config: Presentation, tokenizer: "PreTrainedTokenizerBase") -> None:
    if config.chat_template and not tokenizer.chat_template:
        raise PromptError(
            "prompts.chat_template is true, but the model's tokenizer has no chat template; "
            "set prompts.chat_template: false, or use an instruct model"
        )
    if config.system_prompt is not None and not config.chat_template:
        raise PromptError("prompts.system_prompt needs prompts.chat_template: true; raw text has no system message")


def _check_metadata(rows: Sequence[Row]) -> None:
    """Refuse now what the queue would refuse in the middle of the run: integers beyond 64 bits."""
    for row in rows:
        try:
            msgspec.msgpack.encode(row.metadata)
        except OverflowError as error:
            raise PromptError(f"the metadata of {row.prompt_id} cannot be kept: {error}; drop the column") from None


def _tokenize(rows: Sequence[Row], config: Presentation, tokenizer: "PreTrainedTokenizerBase") -> list[Prompt]:
    texts = [_present(row, config, tokenizer) for row in rows]
    # A chat template writes the special tokens itself.
    ids = tokenizer(texts, add_special_tokens=not config.chat_template, return_attention_mask=False)["input_ids"]
    return [
        Prompt(
            prompt_id=row.prompt_id,
            text=text,
            question=row.prompt,
            prompt_ids=np.asarray(prompt_ids, dtype=np.int64),
            answer=row.answer,
            metadata=row.metadata,
        )
        for row, text, prompt_ids in zip(rows, texts, ids, strict=True)
    ]


def _present(row: Row, config: Presentation, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text that the model reads."""
    if not config.chat_template:
        if not isinstance(row.prompt, str):
            raise PromptError(f"{row.prompt_id} is a list of chat messages; set prompts.chat_template: true")
        return row.prompt
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except jinja2.TemplateError as error:
        raise PromptError(f"the model's chat template refuses {row.prompt_id}: {one_line(error)}") from None


def check_lengths(prompts: Sequence[Prompt], max_tokens: int, remedy: str) -> None:
    """Whether no prompt is longer than `max_tokens`; `remedy` ends the message.

    Raises:
        PromptError: one is.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    if len(longest.prompt_ids) > max_tokens:
        count = sum(len(prompt.prompt_ids) > max_tokens for prompt in prompts)
        raise PromptError(
            f"prompt {longest.prompt_id} has {len(longest.prompt_ids)} tokens, more than the limit of {max_tokens} "
            f"({count} of {len(prompts)} prompts are too long); {remedy}"
        )


def _split(prompts: Sequence[Prompt], held_out: int, seed: int) -> PromptSet:
    """Hold out the first `held_out` different texts of a seeded order; train on every prompt with another text."""
    distinct: dict[str, int] = {}
    for index in permutation(len(prompts), seed, _SPLIT_EPOCH):
        distinct.setdefault(prompts[index].text, int(index))
    if held_out >= len(distinct):
        raise PromptError(
            f"prompts.held_out {held_out} leaves nothing to train on: the source has {len(distinct)} different "
            f"prompts; set it to {len(distinct) - 1} or less"
        )
    chosen = sorted(islice(distinct.values(), held_out))
    texts = {prompts[index].text for index in chosen}
    return PromptSet(
        train=tuple(prompt for prompt in prompts if prompt.text not in texts),
        held_out=tuple(prompts[index] for index in chosen),
    )

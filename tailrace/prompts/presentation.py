"""Presents a row of a source as the text that a model reads, and as its tokens."""

import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tailrace.config.prompts import Presentation
from tailrace.errors import PromptError, TailraceWarning, did_you_mean, one_line, quoted
from tailrace.prompts.sources.base import Row
from tailrace.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ALSO_OF_TEMPLATES = ("tools", "documents")
"""Arguments of the tokenizer's renderer that it passes on to the template."""


def present(rows: Iterable[Row], config: Presentation, tokenizer: "PreTrainedTokenizerBase") -> list[Prompt]:
    """Present and tokenize prompts as the model reads them, in the order of `rows`.

    Warns of arguments that the template does not read.

    Raises:
        PromptError: the rows cannot be read, one cannot be presented or has no tokens, or the tokenizer lacks the chat
            template that is asked for.
    """
    rows = list(rows)
    if rows and all(row.tokens is not None for row in rows):
        return _dummies(rows, tokenizer)
    _check_presentation(config, tokenizer)
    _check_metadata(rows)
    prompts = _tokenize(rows, config, tokenizer) if rows else []
    for prompt in prompts:
        if not len(prompt.prompt_ids):
            raise PromptError(f"prompt {prompt.prompt_id} has no tokens")
    return prompts


def _dummies(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Prompt]:
    """Prompts of random tokens that are not special. The place of a row is its seed."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    plain = np.array([token for token in range(len(tokenizer)) if token not in special], np.int64)
    return [
        Prompt(
            prompt_id=row.prompt_id,
            text=f"{row.prompt_id}: {row.tokens} random tokens",
            question="",
            prompt_ids=np.random.default_rng(place).choice(plain, row.tokens),
        )
        for place, row in enumerate(rows)
    ]


def _check_presentation(config: Presentation, tokenizer: "PreTrainedTokenizerBase") -> None:
    if config.chat_template and not tokenizer.chat_template:
        raise PromptError(
            "prompts.chat_template is true, but the model's tokenizer has no chat template; "
            "set prompts.chat_template: false, or use an instruct model"
        )
    without = {
        "system_prompt": config.system_prompt is not None,
        "chat_template_arguments": bool(config.chat_template_arguments),
        "continue_final_message": config.continue_final_message,
    }
    if not config.chat_template and any(without.values()):
        key = next(key for key, given in without.items() if given)
        raise PromptError(f"prompts.{key} needs prompts.chat_template: true; raw text has no messages")
    if config.chat_template_arguments:
        _check_arguments(config.chat_template_arguments, tokenizer)


def _check_arguments(arguments: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> None:
    own = set(inspect.signature(type(tokenizer).apply_chat_template).parameters) | {"messages"}
    if taken := sorted(own & set(arguments) - set(_ALSO_OF_TEMPLATES)):
        raise PromptError(
            f"prompts.chat_template_arguments has {taken[0]}, which is not for a recipe to set; remove it"
        )
    template = tokenizer.get_chat_template(tools=arguments.get("tools"))
    names = set(re.findall(r"[A-Za-z_]\w*", template))
    for name in arguments:
        if name not in names:
            warnings.warn(
                f"prompts.chat_template_arguments has {quoted(name, 60)}, which the model's chat template never reads"
                f"{did_you_mean(name, names)}",
                TailraceWarning,
                stacklevel=2,
            )


def _check_metadata(rows: Sequence[Row]) -> None:
    """Refuse integers beyond 64 bits now, which the queue would refuse in the middle of the run."""
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
    """The text of a row that the model reads."""
    if not config.chat_template:
        if not isinstance(row.prompt, str):
            raise PromptError(f"{row.prompt_id} is a list of chat messages; set prompts.chat_template: true")
        return row.prompt
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    if config.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    prefilled = messages[-1]["role"] == "assistant"
    if prefilled and not config.continue_final_message:
        raise PromptError(
            f"{row.prompt_id}: the conversation ends with a message of the assistant, which may be the answer; remove "
            "that message, or have responses continue it with prompts.continue_final_message: true"
        )
    return _rendered(messages, config, tokenizer, row.prompt_id, prefilled=prefilled)


def _rendered(
    messages: Sequence[Any],
    config: Presentation,
    tokenizer: "PreTrainedTokenizerBase",
    prompt_id: str,
    *,
    prefilled: bool,
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            tokenize=False,
            **config.chat_template_arguments,
        )
        return str(text)
    except Exception as error:  # a template is a program of the model's authors, which may raise anything
        problem = one_line(error) if str(error) else type(error).__name__
        raise PromptError(f"the model's chat template refuses {prompt_id}: {quoted(problem, 300)[1:-1]}") from None

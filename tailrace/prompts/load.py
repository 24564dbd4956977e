"""Prompts for a run: read from their sources, presented to the model, split.

source ──▶ present ──▶ check or drop the overlong ──▶ held-out | train, without a text that is evaluated
validation sources ──▶ present ──▶ the same ──▶ their sets
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from tailrace.config.prompts import EvaluatedPromptsConfig, PromptsConfig, PromptSets, PromptSource
from tailrace.errors import PromptError
from tailrace.prompts.presentation import present
from tailrace.prompts.sources.factory import source_rows
from tailrace.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

HELD_OUT = "held_out"
WHOLE_SOURCE = "source"
SOURCE = "prompts.source"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptSet:
    """Prompts by use, in the order of their source. No training prompt has the text of an evaluated one."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    """The held-out prompts; no two have the same text."""
    validation: Mapping[str, tuple[Prompt, ...]] = field(default_factory=dict)
    """The validation sets by name."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """The number of prompts that are in no set, by reason."""

    @property
    def evaluated(self) -> dict[str, tuple[Prompt, ...]]:
        """The sets that are evaluated and not trained on, by name; none is empty."""
        return ({HELD_OUT: self.held_out} if self.held_out else {}) | dict(self.validation)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        sets = (self.train, *self.evaluated.values())
        return max(len(prompt.prompt_ids) for prompts in sets for prompt in prompts)

    @property
    def by_source(self) -> dict[str, Sequence[Prompt]]:
        """All prompts, by the key of their source in the recipe."""
        validation = {source_key(name): prompts for name, prompts in self.validation.items()}
        return {SOURCE: (*self.train, *self.held_out), **validation}

    @property
    def fingerprint(self) -> str:
        """A digest that is equal for the same prompts and answers of the source, in the same order."""
        digest = blake2b(digest_size=16)
        for prompt in (*self.train, *self.held_out):
            digest.update(repr((prompt.text, prompt.answer)).encode())
        digest.update(str(len(self.train)).encode())
        return digest.hexdigest()


def load_prompts(config: PromptsConfig, tokenizer: "PreTrainedTokenizerBase", *, max_tokens: int) -> PromptSet:
    """Read, present, tokenize and split the prompts of a run.

    Raises:
        PromptError: a source cannot be read or is empty, a prompt is longer than `max_tokens` and is not to be dropped,
            the tokenizer lacks the chat template that is asked for, or nothing is left to train on, or of what is held
            out.
    """
    reader = _Reader(config, tokenizer, max_tokens)
    validation = reader.validation()
    train, held_out, equal = reader.split(config.source, config.held_out, config.split_seed, validation)
    dropped = reader.dropped | ({"equal to one that is evaluated": equal} if equal else {})
    return PromptSet(train=train, held_out=held_out, validation=validation, dropped=dropped)


def load_evaluated(
    config: EvaluatedPromptsConfig, tokenizer: "PreTrainedTokenizerBase", *, max_tokens: int
) -> dict[str, tuple[Prompt, ...]]:
    """The sets of prompts to evaluate, by name: those of a run with the same `prompts`, or the whole source.

    Raises:
        PromptError: see `load_prompts`.
    """
    reader = _Reader(config, tokenizer, max_tokens)
    validation = reader.validation()
    own = {}
    if config.source is not None and config.held_out != 0:
        if config.held_out is None:
            own = {WHOLE_SOURCE: reader.read(config.source, SOURCE)}
        else:
            _, held_out, _ = reader.split(config.source, config.held_out, config.split_seed, validation)
            own = {HELD_OUT: held_out}
    tell_dropped(reader.dropped)
    return own | validation


def source_key(evaluated: str) -> str:
    """The key in the recipe of the source of an evaluated set."""
    return SOURCE if evaluated in (HELD_OUT, WHOLE_SOURCE) else f"prompts.validation.{evaluated}"


def tell_dropped(dropped: Mapping[str, int]) -> None:
    """Log the number of dropped prompts, by reason."""
    for why, count in dropped.items():
        _log.info("%d prompts are dropped: %s", count, why)


class _Reader:
    """Reads sources, and presents them as the recipe says."""

    def __init__(self, config: PromptSets, tokenizer: "PreTrainedTokenizerBase", max_tokens: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self.dropped: dict[str, int] = {}
        """The number of prompts that were too long, by reason for the log."""

    def validation(self) -> dict[str, tuple[Prompt, ...]]:
        """Read the sets of `prompts.validation`, by name.

        Raises:
            PromptError: see `load_prompts`.
        """
        sources = self._config.validation
        return {name: self.read(source, source_key(name)) for name, source in sources.items()}

    def read(self, source: PromptSource, key: str) -> tuple[Prompt, ...]:
        """Read the prompts of the source at `key` of the recipe.

        Raises:
            PromptError: see `load_prompts`.
        """
        return self._that_fit(self._present(source, key), key)

    def split(
        self, source: PromptSource, held_out: int, seed: int, validation: Mapping[str, Sequence[Prompt]]
    ) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...], int]:
        """Read the prompts to train on, and those of `held_out` different texts, from `prompts.source`.

        What is held out depends on the source and the seed alone. Prompts that are too long, or in a validation set,
        are left out of both.

        Returns:
            Both, and the number of prompts that are left out since they equal an evaluated one.

        Raises:
            PromptError: see `load_prompts`.
        """
        prompts = self._present(source, SOURCE)
        chosen = _held_out(prompts, held_out, seed)
        left = self._that_fit(prompts, SOURCE)
        evaluated = {prompt.text for of_set in validation.values() for prompt in of_set}
        own: dict[str, Prompt] = {}
        train: list[Prompt] = []
        for prompt in left:
            if prompt.text in chosen:
                own.setdefault(prompt.text, prompt)
            elif prompt.text not in evaluated:
                train.append(prompt)
        own = {text: prompt for text, prompt in own.items() if text not in evaluated}
        if not train:
            raise PromptError(
                "prompts.source leaves nothing to train on: each of its prompts is held out, or is in "
                "prompts.validation, too"
            )
        if chosen and not own:
            raise PromptError(
                f"prompts.held_out {held_out} leaves nothing to evaluate: each of these prompts is too long, or is in "
                "prompts.validation, too; raise it, or set it to 0"
            )
        return tuple(train), tuple(own.values()), len(left) - len(train) - len(own)

    def _present(self, source: PromptSource, key: str) -> list[Prompt]:
        prompts = present(source_rows(source, key), self._config, self._tokenizer)
        if not prompts:
            raise PromptError(f"{key} of type {source.type} has no prompts")
        return prompts

    def _that_fit(self, prompts: Sequence[Prompt], key: str) -> tuple[Prompt, ...]:
        if self._config.overlong == "error":
            remedy = "remove them, drop them with prompts.overlong: drop, raise prompts.max_prompt_tokens, or lower"
            check_lengths(prompts, self._max_tokens, f"{remedy} sampling.max_new_tokens")
            return tuple(prompts)
        kept = tuple(prompt for prompt in prompts if len(prompt.prompt_ids) <= self._max_tokens)
        if not kept:
            raise PromptError(
                f"prompts.overlong: drop leaves nothing of {key}: each of its {len(prompts)} prompts has more than "
                f"{self._max_tokens} tokens"
            )
        if len(kept) < len(prompts):
            self.dropped[f"of {key}, longer than {self._max_tokens} tokens"] = len(prompts) - len(kept)
        return kept


def check_lengths(prompts: Sequence[Prompt], max_tokens: int, remedy: str) -> None:
    """Check that no prompt is longer than `max_tokens`; `remedy` ends the message.

    Raises:
        PromptError: a prompt is longer.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    if len(longest.prompt_ids) > max_tokens:
        count = sum(len(prompt.prompt_ids) > max_tokens for prompt in prompts)
        raise PromptError(
            f"prompt {longest.prompt_id} has {len(longest.prompt_ids)} tokens, more than the limit of {max_tokens} "
            f"({count} of {len(prompts)} prompts are too long); {remedy}"
        )


def _held_out(prompts: Sequence[Prompt], count: int, seed: int) -> set[str]:
    """The first `count` different texts of a seeded order, in which each has its place by its question in the source.

    So a text stays on its side of the split where others are left out, or are presented in another way.
    """
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.text, prompt)
    if count >= len(distinct):
        raise PromptError(
            f"prompts.held_out {count} leaves nothing to train on: the source has {len(distinct)} different prompts; "
            f"set it to {len(distinct) - 1} or less"
        )

    def place(text: str) -> bytes:
        return blake2b(repr((seed, distinct[text].question or text)).encode(), digest_size=16).digest()

    return set(sorted(distinct, key=place)[:count])

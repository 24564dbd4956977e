"""Sequence classifiers with one label: models that give a text one score, such as reward models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tailrace.errors import ModelError, one_line
from tailrace.models.tokenizer import load_tokenizer

Encoding = dict[str, list[int]]
"""A tokenized text: `input_ids`, `attention_mask`, and what else the model takes, [T] each."""


def check_classifier(directory: Path, key: str) -> Any:
    """Return the configuration of the model in `directory`, which is a classifier with one label.

    `key`: the section of the recipe that names the model.

    Raises:
        ModelError: it is none, has another number of labels, or its configuration cannot be read.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each architecture checks its fields in its own way
        raise ModelError(f"{key}.path {directory} cannot be read: {one_line(error)[:300]}") from None
    kinds = config.architectures or []
    named = kinds if isinstance(kinds, str) else ", ".join(map(str, kinds))
    if named and "SequenceClassification" not in named:
        raise ModelError(
            f"{key}.path {directory} is a {named}, and a reward model is a sequence classifier of Hugging Face, "
            "such as LlamaForSequenceClassification; give one of these"
        )
    if config.num_labels != 1:
        labels = ", ".join(map(str, list((config.id2label or {}).values())[:5]))
        raise ModelError(
            f"{key}.path {directory} has {config.num_labels} labels ({labels}), and a reward model has one, whose "
            "score is the reward; give such a model, or use a classifier of several labels in a function of your own"
        )
    return config


class Classifier:
    """A classifier on a device."""

    def __init__(self, directory: Path, *, device: str, dtype: str, key: str) -> None:
        """Load it. `dtype`: `float32` or `bfloat16`. `key`: see `check_classifier`.

        Raises:
            ModelError: see `check_classifier`; or its weights or its tokenizer cannot be read, some weights are
                missing, or the tokenizer is of a larger model.
        """
        config = check_classifier(directory, key).get_text_config()
        self.tokenizer = load_tokenizer(directory)
        self._device = torch.device(device)
        self._model = _load(directory, getattr(torch, dtype), key).to(self._device).eval()
        self.vocab_size = int(self._model.get_input_embeddings().weight.shape[0])
        """Number of tokens that the model knows; the tokenizer may have more of those that were added to it."""
        if self.tokenizer.vocab_size > self.vocab_size:
            raise ModelError(
                f"{key}.path {directory} has a tokenizer of {self.tokenizer.vocab_size} tokens, and the model knows "
                f"{self.vocab_size}; give the tokenizer that it was trained with"
            )
        self._pad_like_the_model(config.pad_token_id)
        positions = getattr(config, "max_position_embeddings", None)
        limits = (positions and positions - _positions_of_padding(self._model), self.tokenizer.model_max_length)
        self.longest = min(limit for limit in limits if limit)
        """Tokens of the longest text; very many where the model has no limit."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model reads conversations; otherwise it reads pairs of texts."""
        return self.tokenizer.chat_template is not None

    def encode_conversation(self, messages: list[dict[str, Any]]) -> Encoding:
        """Tokenize a conversation with the chat template. It raises whatever the template raises."""
        encoding: Any = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        return dict(encoding)

    def encode_pair(self, first: str, second: str) -> Encoding:
        """Tokenize two texts as a pair."""
        return dict(self.tokenizer(first, second))

    def score(self, encodings: Sequence[Encoding]) -> list[float]:
        """Score texts in one batch; one by one where the model has no token to pad with.

        Each text has a token, at most `longest` of them, and none outside of the vocabulary.
        """
        if self.tokenizer.pad_token is None and len(encodings) > 1:
            return [score for encoding in encodings for score in self.score([encoding])]
        inputs = self.tokenizer.pad(list(encodings), padding=len(encodings) > 1, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            scores: list[float] = self._model(**inputs).logits.float().squeeze(-1).tolist()
        return scores

    def _pad_like_the_model(self, pad_token_id: int | None) -> None:
        """Pad with the token of the model's configuration, and not with one that the tokenizer alone has.

        A decoder's score is that of the last token that is not this one.
        """
        self.tokenizer.padding_side = "right"
        self.tokenizer.pad_token = None
        if pad_token_id is not None and 0 <= pad_token_id < min(len(self.tokenizer), self.vocab_size):
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(pad_token_id)


def _positions_of_padding(model: torch.nn.Module) -> int:
    """The positions that no text can have: RoBERTa and its like count from the one after the padding token's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


def _load(directory: Path, dtype: torch.dtype, key: str) -> Any:
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what is missing is an error here
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are an error here
        )
    except Exception as error:  # as for its configuration; safetensors and pickle have errors of their own
        raise ModelError(f"{key}.path {directory} cannot be loaded: {one_line(error)[:300]}") from None
    if missing := sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]):
        raise ModelError(
            f"{key}.path {directory} has no weights of the right shape for {missing[0]}, which would be random; give a "
            "trained reward model"
        )
    return model

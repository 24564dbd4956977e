"""The text of responses: the special tokens in it, and the warning when some are left out."""

import json
import warnings
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tailrace.config.engine import SamplingConfig
from tailrace.errors import TailraceWarning
from tailrace.models.tokenizer import ResponseText

WORDS = ["<pad>", "<s>", "</s>", "<|eot|>", "<think>", "</think>", "▁a", "▁b", "c"]
PAD, BOS, EOS, EOT, THINK, UNTHINK, A, B, C = range(len(WORDS))


def text(directory: Path, **sampling: object) -> ResponseText:
    """The response text of a tokenizer with special tokens for thoughts, and a model with two end tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="c"))
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|eot|>", "<think>", "</think>"],
    )
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [EOS, EOT]}))
    return ResponseText(fast, directory, SamplingConfig.model_validate(sampling))


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([THINK, A, UNTHINK, B, EOS], "<think> a</think> b"),
        ([THINK, A, UNTHINK, EOT], "<think> a</think>"),
        ([A, EOS, PAD, PAD], "a"),
        ([A, EOS, B, C], "a</s> bc"),
        ([EOS], ""),
    ],
)
def test_kept_special_tokens_are_all_but_the_ends(tmp_path: Path, tokens: list[int], kept: str) -> None:
    assert text(tmp_path, keep_special_tokens=True)(tokens).strip() == kept


def test_a_special_token_that_the_recipe_ends_responses_with_is_no_text(tmp_path: Path) -> None:
    decode = text(tmp_path, keep_special_tokens=True, stop_token_ids=[UNTHINK, B])
    assert decode([THINK, A, UNTHINK]).strip() == "<think> a"
    assert decode([THINK, A, B]).strip() == "<think> a b", "a word stays"


def test_special_tokens_that_mean_something_are_left_out_with_one_warning(tmp_path: Path) -> None:
    decode = text(tmp_path)
    with pytest.warns(
        TailraceWarning, match=r"such as <think> </think>: .* sampling\.keep_special_tokens=true"
    ) as said:
        texts = [decode([THINK, A, UNTHINK, B, EOS]) for _ in range(2)]
    assert texts == ["a b"] * 2
    assert len(said) == 1


def test_a_special_token_without_a_name_is_one_that_is_left_out(tmp_path: Path) -> None:
    """The token has `special: true` in tokenizer.json, but is in no list of tokenizer_config.json."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="c"))
    tokenizer.add_special_tokens([AddedToken("<think>")])
    tokenizer.add_tokens([AddedToken("</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")  # type: ignore[no-untyped-call]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    decode = ResponseText(fast, tmp_path, SamplingConfig())
    with pytest.warns(TailraceWarning, match=r"such as <think>: "):
        assert decode([THINK, C, UNTHINK, EOS]) == "c </think>"


def test_nothing_is_said_of_ends_and_stops(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text(tmp_path, stop_token_ids=[UNTHINK])([BOS, A, B, UNTHINK, EOT, EOS, PAD]) == "a b"

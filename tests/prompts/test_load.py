"""Presentation, length limits and the split."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tailrace.config.prompts import JsonlSource, PromptsConfig
from tailrace.conformance.tiny import make_tokenizer
from tailrace.errors import PromptError
from tailrace.prompts.load import PromptSet, load_prompts

TOKENIZER = make_tokenizer()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZER


def load(
    tmp_path: Path, tokenizer: Any, prompts: list[Any], *, seed: int = 0, max_tokens: int = 100, **options: Any
) -> PromptSet:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": prompt, "answer": str(n)}) + "\n" for n, prompt in enumerate(prompts))
    )
    config = PromptsConfig(source=JsonlSource(path=str(path)), **{"held_out": 0, **options})
    return load_prompts(config, tokenizer, seed=seed, max_tokens=max_tokens)


def test_prompt_is_a_user_message_of_the_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = load(tmp_path, tokenizer, ["hi"]).train
    assert prompt.text == "<user>hi<eos><assistant>"
    assert tokenizer.convert_ids_to_tokens(prompt.prompt_ids.tolist()) == ["<user>", "h", "i", "<eos>", "<assistant>"]
    assert (prompt.prompt_id, prompt.answer, str(prompt.prompt_ids.dtype)) == ("data.jsonl:1", "0", "int64")


def test_system_prompt_goes_before_conversations_that_have_none(tmp_path: Path, tokenizer: Any) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]
    texts = [prompt.text for prompt in load(tmp_path, tokenizer, [own, "b"], system_prompt="S").train]
    assert texts == ["<system>own<eos><user>a<eos><assistant>", "<system>S<eos><user>b<eos><assistant>"]


def test_special_tokens_are_not_doubled(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    starting = make_tokenizer()  # puts <pad> in front, as others put their beginning of sequence
    starting.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    starting.chat_template = "<pad>" + starting.chat_template
    (chat,) = load(tmp_path, starting, ["a"]).train
    (raw,) = load(tmp_path, starting, ["a"], chat_template=False).train
    assert chat.prompt_ids.tolist().count(0) == 1
    assert starting.convert_ids_to_tokens(raw.prompt_ids.tolist()) == ["<pad>", "a"]
    assert raw.text == "a"


def test_held_out_and_training_prompts_share_no_text(tmp_path: Path, tokenizer: Any) -> None:
    prompts = [f"p{n % 7}" for n in range(30)]
    found = load(tmp_path, tokenizer, prompts, held_out=3)
    held_out = [prompt.text for prompt in found.held_out]
    assert len(set(held_out)) == len(held_out) == 3
    assert {prompt.text for prompt in found.train}.isdisjoint(held_out)
    assert len(found.train) == sum(f"<user>{prompt}<eos><assistant>" not in held_out for prompt in prompts)


@settings(max_examples=30)
@given(st.lists(st.sampled_from("abcdef"), min_size=2, max_size=20), st.integers(0, 5), st.integers(0, 99))
def test_split_loses_only_repeats_of_held_out_texts(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], held_out: int, seed: int
) -> None:
    def split() -> PromptSet:
        directory = tmp_path_factory.mktemp("split")
        return load(directory, TOKENIZER, prompts, held_out=held_out, seed=seed, chat_template=False)

    if held_out >= len(set(prompts)):
        with pytest.raises(PromptError, match=f"{len(set(prompts))} different"):
            split()
        return
    found = split()
    assert len({prompt.text for prompt in found.held_out}) == held_out
    kept = {prompt.prompt_id for prompt in (*found.train, *found.held_out)}
    lost = [text for n, text in enumerate(prompts, 1) if f"data.jsonl:{n}" not in kept]
    assert set(lost) <= {prompt.text for prompt in found.held_out}
    assert [p.prompt_id for p in split().held_out] == [p.prompt_id for p in found.held_out]


def test_seed_chooses_the_held_out_prompts(tmp_path: Path, tokenizer: Any) -> None:
    prompts = [f"p{n}" for n in range(100)]
    choices = {
        tuple(prompt.text for prompt in load(tmp_path, tokenizer, prompts, held_out=5, seed=seed).held_out)
        for seed in range(4)
    }
    assert len(choices) == 4


def test_prompt_that_is_too_long_is_named_with_its_length_and_the_fix(tmp_path: Path, tokenizer: Any) -> None:
    assert len(load(tmp_path, tokenizer, ["a" * 97]).train) == 1
    with pytest.raises(PromptError) as caught:
        load(tmp_path, tokenizer, ["a", "b" * 98, "c" * 97])
    assert str(caught.value) == (
        "prompt data.jsonl:2 has 101 tokens, more than the limit of 100 (1 of 3 prompts are too long); "
        "remove them, raise prompts.max_prompt_tokens, or lower sampling.max_new_tokens"
    )


def test_integers_that_the_queue_cannot_hold_are_refused_before_the_run(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "big.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b", "n": 2**70}) + "\n")
    config = PromptsConfig(source=JsonlSource(path=str(path)), held_out=0)
    with pytest.raises(PromptError, match=r"the metadata of big.jsonl:1 cannot be kept"):
        load_prompts(config, tokenizer, seed=0, max_tokens=100)


def test_empty_source_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="of type jsonl has no prompts"):
        load(tmp_path, tokenizer, [])


def test_model_without_a_chat_template_is_told_the_fix(tmp_path: Path) -> None:
    base = make_tokenizer()
    base.chat_template = None
    with pytest.raises(PromptError, match=r"set prompts.chat_template: false"):
        load(tmp_path, base, ["a"])
    assert len(load(tmp_path, base, ["a"], chat_template=False).train) == 1


def test_template_that_refuses_a_conversation_is_quoted(tmp_path: Path) -> None:
    strict = make_tokenizer()
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(PromptError, match=r"refuses data.jsonl:1: no system role"):
        load(tmp_path, strict, ["a"])


def test_options_that_need_the_chat_template_are_refused_without_it(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="system_prompt needs"):
        load(tmp_path, tokenizer, ["a"], chat_template=False, system_prompt="S")
    with pytest.raises(PromptError, match=r"data.jsonl:1 is a list of chat messages"):
        load(tmp_path, tokenizer, [[{"role": "user", "content": "a"}]], chat_template=False)


def test_prompts_and_rewards_import_no_torch() -> None:
    modules = "tailrace.prompts.load, tailrace.prompts.sources.reasoning_gym, tailrace.rewards.pool, "
    modules += "tailrace.rewards.worker, tailrace.rewards.math, tailrace.rewards.reasoning_gym, tailrace.models.resolve"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0

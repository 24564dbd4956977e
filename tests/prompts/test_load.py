"""The presentation of prompts, their length limits, and the split."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tailrace.config.prompts import JsonlSource, PromptsConfig
from tailrace.conformance.tiny import make_tokenizer
from tailrace.errors import PromptError, TailraceWarning
from tailrace.prompts.load import PromptSet, load_prompts

TOKENIZER = make_tokenizer()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZER


def load(tmp_path: Path, tokenizer: Any, prompts: list[Any], *, max_tokens: int = 100, **options: Any) -> PromptSet:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": prompt, "answer": str(n)}) + "\n" for n, prompt in enumerate(prompts))
    )
    config = PromptsConfig(source=JsonlSource(path=str(path)), **{"held_out": 0, **options})
    return load_prompts(config, tokenizer, max_tokens=max_tokens)


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

    starting = make_tokenizer()  # it begins texts with <pad>, as other tokenizers do with their beginning of sequence
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
        return load(directory, TOKENIZER, prompts, held_out=held_out, split_seed=seed, chat_template=False)

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


@settings(max_examples=30)
@given(st.integers(1, 30), st.booleans(), st.integers(0, 99))
def test_what_is_held_out_stays_so_where_other_prompts_are_left_out_or_presented_in_another_way(
    tmp_path_factory: pytest.TempPathFactory, longest: int, chat_template: bool, seed: int
) -> None:
    def questions(**options: Any) -> tuple[set[str], set[str]]:
        found = load(tmp_path_factory.mktemp("split"), TOKENIZER, prompts, held_out=5, split_seed=seed, **options)
        return {str(prompt.question) for prompt in found.train}, {str(prompt.question) for prompt in found.held_out}

    prompts = [number * "x" for number in range(1, 31)]
    train, held_out = questions()
    assert len(held_out) == 5
    assume(all(min(map(len, side)) <= longest for side in (train, held_out)))
    fewer, left = questions(overlong="drop", max_tokens=longest + 5, chat_template=chat_template)
    assert fewer <= train
    assert left <= held_out


def test_seed_chooses_the_held_out_prompts(tmp_path: Path, tokenizer: Any) -> None:
    prompts = [f"p{n}" for n in range(100)]
    choices = {
        tuple(prompt.text for prompt in load(tmp_path, tokenizer, prompts, held_out=5, split_seed=seed).held_out)
        for seed in range(4)
    }
    assert len(choices) == 4


def test_prompt_that_is_too_long_is_named_with_its_length_and_the_fix(tmp_path: Path, tokenizer: Any) -> None:
    assert len(load(tmp_path, tokenizer, ["a" * 97]).train) == 1
    with pytest.raises(PromptError) as caught:
        load(tmp_path, tokenizer, ["a", "b" * 98, "c" * 97])
    assert str(caught.value) == (
        "prompt data.jsonl:2 has 101 tokens, more than the limit of 100 (1 of 3 prompts are too long); "
        "remove them, drop them with prompts.overlong: drop, raise prompts.max_prompt_tokens, "
        "or lower sampling.max_new_tokens"
    )


def test_integers_that_the_queue_cannot_hold_are_refused_before_the_run(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "big.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b", "n": 2**70}) + "\n")
    config = PromptsConfig(source=JsonlSource(path=str(path)), held_out=0)
    with pytest.raises(PromptError, match=r"big.jsonl:1, column 'n': holds .* which takes more than 64 bits"):
        load_prompts(config, tokenizer, max_tokens=100)


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
    modules += "tailrace.rewards.serve, tailrace.rewards.math, tailrace.rewards.reasoning_gym, tailrace.models.resolve"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


PREFILLED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is"}]


def test_a_conversation_that_ends_with_the_assistant_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(PromptError, match=r"data.jsonl:2: the conversation ends with a message of the assistant"):
        load(tmp_path, tokenizer, ["a", PREFILLED])


def test_responses_continue_the_final_message_where_the_recipe_says_so(tmp_path: Path, tokenizer: Any) -> None:
    found = load(tmp_path, tokenizer, [PREFILLED, "b"], continue_final_message=True)
    texts = [prompt.text for prompt in found.train]
    assert texts == ["<user>a<eos><assistant>The answer is", "<user>b<eos><assistant>"]


def test_arguments_reach_the_chat_template(tmp_path: Path) -> None:
    thinking = make_tokenizer()
    thinking.chat_template = (
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ messages[0].content }}"
    )
    (prompt,) = load(tmp_path, thinking, ["a"], chat_template_arguments={"enable_thinking": False}).train
    assert prompt.text == "Falsea"


def test_an_argument_that_the_chat_template_never_reads_is_warned_of(tmp_path: Path) -> None:
    thinking = make_tokenizer()
    thinking.chat_template = "{{ enable_thinking }}{{ messages[0].content }}"
    with pytest.warns(
        TailraceWarning, match=r"has 'enable_thinkin', which .* never reads; did you mean 'enable_thinking'"
    ):
        load(tmp_path, thinking, ["a"], chat_template_arguments={"enable_thinkin": False})


@pytest.mark.parametrize("name", ["messages", "tokenize", "add_generation_prompt", "chat_template", "return_tensors"])
def test_arguments_that_are_not_for_recipes_are_refused(tmp_path: Path, tokenizer: Any, name: str) -> None:
    with pytest.raises(PromptError, match=f"chat_template_arguments has {name}, which is not for a recipe to set"):
        load(tmp_path, tokenizer, ["a"], chat_template_arguments={name: True})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for n in range(10000000000) %}x{% endfor %}", "Range too big"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ messages + 1 }}", "can only concatenate list"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('\x1b[31mred\nlines') }}", r"\x1b[31mred lines"),
    ],
)
def test_whatever_a_chat_template_raises_is_one_line_with_the_row(tmp_path: Path, template: str, reason: str) -> None:
    strange = make_tokenizer()
    strange.chat_template = template
    with pytest.raises(PromptError) as caught:
        load(tmp_path, strange, ["a"])
    assert str(caught.value).startswith("the model's chat template refuses data.jsonl:1: ")
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()


def test_prompts_that_are_too_long_are_dropped_and_counted_where_asked(tmp_path: Path, tokenizer: Any) -> None:
    found = load(tmp_path, tokenizer, ["a", "b" * 98, "c" * 97, "d" * 99], overlong="drop")
    assert [prompt.answer for prompt in found.train] == ["0", "2"]
    assert found.dropped == {"of prompts.source, longer than 100 tokens": 2}
    with pytest.raises(PromptError, match=r"leaves nothing of prompts.source: each of its 2 prompts has more than 100"):
        load(tmp_path, tokenizer, ["b" * 98, "d" * 99], overlong="drop")


def validation(tmp_path: Path, **sets: list[str]) -> dict[str, JsonlSource]:
    sources = {}
    for name, prompts in sets.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"question": prompt}) + "\n" for prompt in prompts))
        sources[name] = JsonlSource(path=str(path), prompt_column="question", answer_column=None)
    return sources


def test_validation_sets_are_evaluated_and_their_texts_not_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    sets = validation(tmp_path, easy=["v", "b", "v"], hard=["d"])
    found = load(tmp_path, tokenizer, ["a", "b", "c", "d", "b", "e"], validation=sets, held_out=1)
    assert list(found.evaluated) == ["held_out", "easy", "hard"]
    assert [prompt.question for prompt in found.evaluated["easy"]] == ["v", "b", "v"]
    evaluated = {prompt.text for prompts in found.evaluated.values() for prompt in prompts}
    assert not {prompt.text for prompt in found.train} & evaluated
    assert (len(found.train), len(found.held_out)) == (2, 1)
    assert found.dropped == {"equal to one that is evaluated": 3}


def test_a_validation_set_is_enough_to_evaluate(tmp_path: Path, tokenizer: Any) -> None:
    found = load(tmp_path, tokenizer, ["a"], validation=validation(tmp_path, mine=["b"]), held_out=0)
    assert list(found.evaluated) == ["mine"]
    assert found.longest == len(found.train[0].prompt_ids)


def test_a_source_that_is_all_validation_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(PromptError, match=r"each of its prompts is held out, or is in prompts.validation, too"):
        load(tmp_path, tokenizer, ["a"], validation=validation(tmp_path, mine=["a", "b"]))


@pytest.mark.parametrize("name", ["held_out", "sampled", "reward", "a b", "", "a.b", "x" * 65])
def test_a_set_is_not_named_like_a_figure(name: str) -> None:
    source = JsonlSource(path="x")
    with pytest.raises(ValueError, match="validation"):
        PromptsConfig(source=source, validation={name: source})

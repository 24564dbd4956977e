"""Reward models: scores of a tiny random classifier, in batches, and models that are none."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tailrace.config.rewards import GradingConfig, ModelReward, RewardsConfig
from tailrace.conformance.tiny import make_tokenizer
from tailrace.errors import ConfigError, ModelError, RewardError
from tailrace.models.classifier import Classifier
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.rewards.pool import GraderPool, capacity_of
from tailrace.rewards.process import GraderProcess
from tailrace.rewards.results import all_graded
from tailrace.rewards.reward_model import RewardModelGrader
from tests.helpers.reward_models import write_reward_model
from tests.rewards.requests import make_request

KEY = "rewards.grader"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward") / "model")


def grader(path: Path, **fields: Any) -> RewardModelGrader:
    return RewardModelGrader(ModelReward(path=str(path), **fields), KEY)


def texts(count: int) -> list[GradingRequest]:
    return [make_request("ab" * number, question=f"q{number}") for number in range(count)]


def changed(path: Path, **fields: Any) -> Path:
    """Change fields of the model's configuration."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    return path


def scored(path: Path, request: GradingRequest) -> float:
    """The score of a response by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    classifier = AutoModelForSequenceClassification.from_pretrained(path).eval()
    messages: Any = [{"role": "user", "content": request.question}, {"role": "assistant", "content": request.response}]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt")
    with torch.inference_mode():
        return float(classifier(**ids).logits)


def test_scores_are_those_of_transformers_in_any_batch(model: Path) -> None:
    requests = texts(7)
    together = grader(model).grade_all(requests)
    alone = [grader(model).grade(request) for request in requests[:3]]
    assert together == pytest.approx([scored(model, request) for request in requests], abs=1e-5)
    assert alone == pytest.approx(together[:3], abs=1e-5)
    assert grader(model).grade_all(requests[::-1]) == pytest.approx(list(together)[::-1], abs=1e-5)
    assert len({round(float(score), 4) for score in together}) == 7  # type: ignore[arg-type]


def read_by(grader: RewardModelGrader, response: str, question: Any) -> str:
    encoding = grader._encoded(make_request(response, question=question))
    return str(grader._classifier.tokenizer.decode(encoding["input_ids"]))


def test_a_conversation_is_read_with_its_messages(model: Path) -> None:
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert read_by(grader(model), "r", asked) == "<system>s<eos><user>u<eos><assistant>r<eos>"
    begun = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "so "}]
    assert read_by(grader(model), "r", begun) == "<user>u<eos><assistant>so r<eos>"


def test_without_a_chat_template_question_and_response_are_a_pair(tmp_path: Path) -> None:
    plain = grader(write_reward_model(tmp_path, has_template=False))
    assert read_by(plain, "c", "ab") == "abc"
    assert read_by(plain, "c", [{"role": "user", "content": "ab"}]) == "user: abc"
    together = plain.grade_all([make_request("c", question="ab"), make_request("cdef", question="a")])
    assert together[0] == pytest.approx(plain.grade(make_request("c", question="ab")), abs=1e-5)


@pytest.mark.parametrize("padding", [None, -1])
def test_a_model_without_a_token_to_pad_with_scores_one_by_one(
    tmp_path: Path, model: Path, padding: int | None
) -> None:
    padless = changed(write_reward_model(tmp_path, has_pad=False), pad_token_id=padding)
    assert grader(padless).grade_all(texts(3)) == pytest.approx(list(grader(model).grade_all(texts(3))), abs=1e-5)


@pytest.mark.parametrize("token", ["<eos>", "a"])
def test_texts_are_padded_with_the_token_of_the_model_whatever_the_tokenizer_has(
    tmp_path: Path, model: Path, token: str
) -> None:
    path = write_reward_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = token
    tokenizer.save_pretrained(path)
    assert grader(path).grade_all(texts(3)) == pytest.approx(list(grader(model).grade_all(texts(3))), abs=1e-5)


def test_a_model_whose_token_to_pad_with_ends_its_texts_scores_what_is_before_it(tmp_path: Path) -> None:
    path = changed(write_reward_model(tmp_path), pad_token_id=1)
    requests = texts(3)
    assert grader(path).grade_all(requests) == pytest.approx([scored(path, one) for one in requests], abs=1e-5)


def test_a_text_that_is_too_long_fails_alone(model: Path) -> None:
    requests = [make_request("a"), make_request("a" * 200), make_request("b")]
    first, error, last = grader(model).grade_all(requests)
    assert str(error) == "prompt and response are 204 tokens long, and the reward model reads 128"
    assert [first, last] == pytest.approx(grader(model).grade_all([requests[0], requests[2]]), abs=1e-5)
    with pytest.raises(RewardError, match="are 5 tokens long, and the reward model reads 4"):
        grader(model, max_tokens=4).grade(requests[0])


def test_a_model_whose_positions_begin_after_the_padding_token_reads_fewer_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    padding = int(tokenizer.pad_token_id)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=40,
        pad_token_id=padding,
    )
    config.num_labels = 1
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = Classifier(tmp_path, device="cpu", dtype="float32", key="rewards.grader")
    assert model.longest == 40 - padding - 1
    tokens = [1 + padding] * model.longest
    assert len(model.score([{"input_ids": tokens, "attention_mask": [1] * len(tokens)}])) == 1


def test_a_text_that_the_model_cannot_read_fails_alone(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path, has_template=False)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["zz"])
    tokenizer.save_pretrained(path)
    first, unknown, empty = grader(path).grade_all([make_request("a"), make_request("zz"), make_request("")])
    assert isinstance(first, float)
    assert str(unknown) == (
        "prompt and response have the token 261, and the reward model knows 261; does its tokenizer belong to it?"
    )
    assert str(empty) == "prompt and response have no token for the reward model"


def test_a_conversation_that_the_chat_template_refuses_fails_alone(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    tokenizer.save_pretrained(path)
    first, error = grader(path).grade_all(
        [make_request("a"), make_request("b", question=[{"role": "system", "content": "s"}])]
    )
    assert isinstance(first, float)
    assert str(error) == "the reward model's chat template refuses prompt and response: no system message"


def test_a_smaller_type_computes_nearly_the_same(model: Path) -> None:
    assert grader(model, dtype="bfloat16").grade_all(texts(3)) == pytest.approx(
        grader(model).grade_all(texts(3)), abs=0.1
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"labels": 3}, r"has 3 labels \(LABEL_0, LABEL_1, LABEL_2\), and a reward model has one, whose score is the"),
        (
            {"is_classifier": False},
            "is a LlamaForCausalLM, and a reward model is a sequence classifier of Hugging Face",
        ),
    ],
)
def test_a_model_that_gives_no_single_score_is_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=rf"^rewards\.grader\.path {tmp_path} {says}"):
        grader(write_reward_model(tmp_path, **fields))


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    write_reward_model(tmp_path, is_classifier=False)
    changed(tmp_path, architectures=["LlamaForSequenceClassification"], id2label={"0": "score"})
    with pytest.raises(ModelError, match=r"has no weights of the right shape for score\.weight, which would be"):
        grader(tmp_path)


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    changed(write_reward_model(tmp_path, labels=3), id2label={"0": "score"}, label2id={"score": 0})
    with pytest.raises(ModelError, match=r"has no weights of the right shape for score\.weight, which would be"):
        grader(tmp_path)


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    write_reward_model(tmp_path, vocabulary=200)
    with pytest.raises(ModelError, match=r"has a tokenizer of 261 tokens, and the model knows 200; give the tokenizer"):
        grader(tmp_path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "zork"}, "does not recognize this architecture"),
        ({"model_type": "zork", "auto_map": {"AutoConfig": "a.B"}}, "contains custom code"),
        ({"hidden_size": "x"}, "expected int, got str"),
        ({"id2label": ["score"]}, "cannot be read"),
        ({"architectures": [5]}, "is a 5, and a reward model is"),
        ({"pad_token_id": 10**6}, "cannot be loaded: Padding_idx"),
    ],
)
def test_a_broken_configuration_is_named_in_one_line(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    changed(write_reward_model(tmp_path), **fields)
    with pytest.raises(ModelError, match=rf"^rewards\.grader\.path {tmp_path} .*{says}") as caught:
        grader(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    (write_reward_model(tmp_path) / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match=rf"^rewards\.grader\.path {tmp_path} cannot be loaded: "):
        grader(tmp_path)


def test_a_model_that_is_missing_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rewards\.grader\.path .*gone does not exist"):
        grader(tmp_path / "gone")


def test_a_device_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.grader\.device 'cuda:7' cannot be used here"):
        grader(model, device="cuda:7")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests of each call to a grading process."""
    sizes: list[int] = []
    grade = GraderProcess.grade

    async def counted(
        self: GraderProcess, requests: Sequence[GradingRequest], *arguments: Any, **fields: Any
    ) -> list[Grade]:
        sizes.append(len(requests))
        return await grade(self, requests, *arguments, **fields)

    monkeypatch.setattr(GraderProcess, "grade", counted)
    return sizes


async def test_a_busy_model_finds_a_full_batch_and_each_text_gets_its_own_score(
    model: Path, batches: list[int]
) -> None:
    config = RewardsConfig(grader=ModelReward(path=str(model), batch_size=8), retries=1)
    assert (config.workers, config.timeout_s, await capacity_of(config)) == (1, 60.0, 16)
    requests = texts(40)
    waiting = iter(enumerate(requests))
    scores: dict[int, float | None] = {}
    async with GraderPool(config.each[""]) as pool:

        async def keep_asking() -> None:
            for number, request in waiting:
                scores[number] = (await pool.grade(request)).reward
                for _ in range(number % 5):  # the way to the queue and back
                    await asyncio.sleep(0)

        await asyncio.gather(*(keep_asking() for _ in range(pool.capacity)))
        assert batches[:4] == [8] * 4
        del batches[:]
        grades = await asyncio.gather(*map(pool.grade, map(make_request, ("a", "a" * 200, "b"))))
    assert [scores[number] for number in range(40)] == pytest.approx(list(grader(model).grade_all(requests)), abs=1e-5)
    assert [grade.error is None for grade in grades] == [True, False, True]
    assert batches == [3, 1], "a second attempt is for the failed one alone"


def test_a_score_that_is_no_number_is_a_failure_of_its_grading(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path, is_broken=True)
    grades = all_graded(grader(path).grade_all([*texts(2), make_request("a" * 200)]), 3)
    assert [(grade.error or "").partition(";")[0] for grade in grades] == [
        "ValueError: the grader returned nan",
        "ValueError: the grader returned nan",
        "RewardError: prompt and response are 204 tokens long, and the reward model reads 128",
    ]


async def test_a_grading_that_is_cancelled_takes_none_of_its_batch_with_it_and_all_end_with_the_pool(
    model: Path,
) -> None:
    async with GraderPool(GradingConfig(grader=ModelReward(path=str(model), batch_size=4))) as pool:
        asked = [asyncio.create_task(pool.grade(request)) for request in texts(4)]
        await asyncio.sleep(0)
        asked[1].cancel()
        grades = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(grades[1], asyncio.CancelledError)
        assert all(isinstance(grade, Grade) and grade.error is None for grade in (grades[0], *grades[2:]))
        assert (await pool.grade(texts(1)[0])).error is None
        asked = [asyncio.create_task(pool.grade(request)) for request in texts(11)]
        await asyncio.sleep(0)
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(end, RewardError) or (isinstance(end, Grade) and end.error) for end in ends)
    with pytest.raises(RewardError, match="closed"):
        await pool.grade(texts(1)[0])

"""Runs that expect the lengths of responses keep what they have learned, and go on where that fails."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tailrace.config.load import parse_as
from tailrace.config.rollout import FeaturesLengths
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError, ModelError
from tailrace.events import read_events
from tailrace.models.encoder import Encoder
from tailrace.planning.lengths.base import Asked, Finished
from tailrace.planning.lengths.features import Features
from tailrace.planning.lengths.ranker import pack
from tailrace.planning.lengths.text import TextFigures
from tailrace.run.inputs import load_inputs
from tailrace.run.lengths import make_lengths
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.runs import small_run, steps_of


def expecting(output: Path, model: Path, prompts: Path, **changes: Any) -> RunConfig:
    """A run that expects lengths from the hidden states of its own model, and checks itself after each step."""
    rollout = {
        "lengths": {"type": "model", "discount": 1.0},
        "dispatch": {"policy": "skewness_aware", "check_every": 1},
    }
    return small_run(output, model, prompts, **{"rollout": rollout, **changes})


def sums_of(checkpoint: Path) -> Any:
    """[2, figures + 1, figures + 1] sums that a predictor had when a checkpoint was written."""
    packed = msgspec.msgpack.decode((checkpoint / "lengths.msgpack").read_bytes())
    ridge = msgspec.msgpack.decode(packed["state"])
    return np.frombuffer(ridge["sums"]).reshape(2, ridge["figures"] + 1, -1)


def learned_of(checkpoint: Path) -> float:
    """The responses that a predictor had learned from when a checkpoint was written."""
    return float(sums_of(checkpoint)[:, 0, 0].sum())


def test_what_was_learned_is_in_the_checkpoint_and_a_resumed_run_goes_on_from_it(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    config = expecting(tmp_path / "run", tiny_model("llama"), prompts)
    train(config, resume=False)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [learned_of(checkpoints / f"step_00000{step}") for step in (2, 4)] == [16, 32]
    again = config.model_copy(update={"output_dir": str(tmp_path / "again")})
    train(again, resume=True, checkpoint=checkpoints / "step_000002")
    assert learned_of(tmp_path / "again" / "checkpoints" / "step_000004") == 32
    checks = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event.task == "dispatch"]
    assert [event.info["lengths"] for event in checks] == ["model"] * 4


@pytest.mark.parametrize("placement", ["colocated", "separated"])
def test_the_task_of_each_prompt_reaches_the_predictor(
    placement: str, tmp_path: Path, tiny_model: TinyModel, local: object
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"n{k}", "answer": str(k), "task": ("odd", "even")[k % 2]} for k in range(24)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = {"type": "features", "words": 8, "discount": 1.0}
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        rollout={"lengths": lengths},
        pipeline={"placement": placement},
        prompts__shuffle=False,
        prompts__held_out=0,
    )
    train(config, resume=False)
    sums = sums_of(tmp_path / "run" / "checkpoints" / "step_000004")[:, 0].sum(0)
    of_task = sums[TextFigures(8).tables[0]]
    assert of_task[of_task > 0].tolist() == [16, 16]


def test_a_resumed_run_with_other_lengths_learns_anew_and_says_so(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    config = expecting(tmp_path / "run", tiny_model("llama"), prompts, trainer__steps=3)
    train(config, resume=False)
    again = small_run(
        tmp_path / "again", tiny_model("llama"), prompts, rollout={"lengths": {"type": "features"}}, trainer__steps=3
    )
    anew = r"lengths\.msgpack is not used, and the lengths of responses are learned anew: it is of type model"
    with pytest.warns(match=anew):
        train(again, resume=True, checkpoint=tmp_path / "run" / "checkpoints" / "step_000002")
    assert [event.step for event in steps_of(tmp_path / "again")] == [2]


def test_a_model_that_cannot_be_loaded_in_mid_run_ends_no_run(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(encoder: Encoder, texts: list[str]) -> None:
        raise ModelError("the disk is gone")

    monkeypatch.setattr(Encoder, "__call__", broken)
    config = expecting(tmp_path / "run", tiny_model("llama"), prompts)
    train(config, resume=False)
    assert len(steps_of(tmp_path / "run")) == 4
    changes = [e.info["text"] for e in read_events(tmp_path / "run" / "events.jsonl") if e.task == "dispatch_change"]
    assert len(changes) == 1, changes
    assert changes[0] == (
        "prompts are pulled until a check finds that placing them pays: the lengths of model cannot be had (the disk "
        "is gone)"
    )


def test_a_run_begins_with_a_ranker(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    ranker, model = tmp_path / "lengths.ranker", tiny_model("llama")
    taught = make_lengths(FeaturesLengths(words=16), model)
    asked = [Asked(prompt_id=str(number), prompt_tokens=number, text="x " * number) for number in range(1, 41)]
    taught.prepare(asked)
    taught.learn([Finished(asked=one, tokens=10 * one.prompt_tokens, version=0) for one in asked])
    ranker.write_bytes(pack(taught))
    lengths = {"type": "features", "words": 16, "ranker": str(ranker)}
    config = small_run(tmp_path / "run", model, prompts, rollout={"lengths": lengths})
    found = load_inputs(config).lengths
    assert found is not None
    for predictor in (taught, found):
        predictor.prepare(asked)
    assert found.expect(asked) == taught.expect(asked)
    short, *_, long = found.expect(asked)
    assert 5 * short.tokens < long.tokens
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    with pytest.raises(
        ConfigError, match="and not from 6 figures, 128 tasks, and 16 words and pairs, lengths with the tokenizer"
    ):
        make_lengths(FeaturesLengths(words=16, ranker=str(ranker)), other)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            {"type": "features", "words": 8},
            "and 16 words and pairs, and not from 6 figures, 128 tasks, and 8 words and",
        ),
        ({"type": "model"}, "cannot be used: it is of type features, and the recipe says model; make one"),
        ({"type": "history"}, "cannot be used: it is of type features, and the recipe says history; make one"),
    ],
)
def test_a_ranker_of_another_kind_is_refused_before_the_run_begins(
    lengths: dict[str, Any], message: str, tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    ranker = tmp_path / "lengths.ranker"
    ranker.write_bytes(pack(Features(words=16)))
    rollout = {"lengths": lengths | {"ranker": str(ranker)}}
    with pytest.raises(ConfigError, match=message):
        load_inputs(small_run(tmp_path / "run", tiny_model("llama"), prompts, rollout=rollout))


def test_a_ranker_that_does_not_exist_is_refused(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    rollout = {"lengths": {"type": "history", "ranker": str(tmp_path / "none")}}
    with pytest.raises(ConfigError, match=r"rollout\.lengths\.ranker .*none cannot be used: .*No such file"):
        load_inputs(small_run(tmp_path / "run", tiny_model("llama"), prompts, rollout=rollout))


def test_a_layer_that_the_model_lacks_is_refused(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    rollout = {"lengths": {"type": "model", "layer": 9}}
    with pytest.raises(ModelError, match=r"layer 9 of .* does not exist; it has 1 … 2"):
        load_inputs(small_run(tmp_path / "run", tiny_model("llama"), prompts, rollout=rollout))


def test_the_oracle_needs_a_trace(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, rollout={"lengths": {"type": "oracle"}})
    with pytest.raises(ConfigError, match=r"oracle takes the lengths of a trace, and pipeline\.replay gives none"):
        train(config, resume=False)
    assert not (tmp_path / "run").exists()


def test_the_oracle_takes_no_ranker() -> None:
    with pytest.raises(ConfigError, match="ranker"):
        parse_as(RunConfig, {"rollout": {"lengths": {"type": "oracle", "ranker": "x"}}}, source="test")

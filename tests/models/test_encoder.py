"""The encoder's figures are the hidden states of the model in transformers."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailrace.errors import ModelError
from tailrace.models.encoder import Encoder
from tests.conftest import TinyModel


def test_figures_are_the_mean_states_of_a_layer(tiny_model: TinyModel) -> None:
    directory = tiny_model("llama")
    texts = ["one two three", "four", ""]
    found = Encoder(directory)(texts)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert found.shape == (3, 64)
    for row, text in zip(found[:2], texts, strict=False):
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        assert row == pytest.approx(states[1][0].mean(0).numpy(), abs=1e-5), "the first of two layers is the middle"
    assert not found[2].any()
    assert Encoder(directory)([]).shape == (0, 64)


def test_a_layer_that_does_not_exist_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelError, match=r"layer 3 of .* does not exist; it has 1 … 2"):
        Encoder(tiny_model("llama"), layer=3)


def test_models_with_other_tokenizers_or_layers_are_others(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = tiny_model("llama")
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    assert Encoder(directory).identity == Encoder(copy).identity
    assert Encoder(directory, layer=2).identity != Encoder(directory).identity
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert Encoder(copy).identity != Encoder(directory).identity
    assert not np.allclose(Encoder(directory, layer=2)(["a"]), Encoder(directory)(["a"]))

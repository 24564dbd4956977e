"""The facts about a model that are read without torch, and errors of model directories."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tailrace.conformance.tiny import FAMILIES
from tailrace.errors import ModelError
from tailrace.models.architecture import read_architecture
from tailrace.models.info import ModelInfo, describe_model
from tests.conftest import TinyModel


@pytest.fixture
def directory(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of a model's directory that a test may break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    kept = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))


def shard(directory: Path) -> None:
    """Split the weights into two files with an index, as large models have them."""
    weights = load_file(directory / "model.safetensors")
    where = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in weights if where[name] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_agree_with_the_model(family: str, tiny_model: TinyModel) -> None:
    directory = tiny_model(family)
    model = AutoModelForCausalLM.from_pretrained(directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert describe_model(directory) == ModelInfo(
        family=family,
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=24 if family == "qwen3" else 16,
        intermediate=96,
        vocab=261,
        context_length=512,
        tied=family != "qwen2",
        parameters=parameters,
        bytes=4 * parameters,
    )


def test_shards_count_as_one_model(directory: Path) -> None:
    whole = describe_model(directory)
    shard(directory)
    assert describe_model(directory) == whole


def test_stored_copy_of_a_tied_head_counts_once(directory: Path) -> None:
    whole = describe_model(directory)
    weights = load_file(directory / "model.safetensors")
    save_file(
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, directory / "model.safetensors"
    )
    assert describe_model(directory) == whole


def test_bytes_are_those_of_the_stored_dtype(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, directory / "model.safetensors")
    info = describe_model(directory)
    assert info.bytes == 2 * info.parameters


def test_old_configurations_leave_derived_sizes_out(directory: Path) -> None:
    edit_config(directory, head_dim=None, num_key_value_heads=None)
    architecture = read_architecture(directory)
    assert (architecture.head_dim, architecture.kv_heads) == (16, 4)


def test_unsupported_family_names_the_supported_ones(directory: Path) -> None:
    edit_config(directory, model_type="mamba", hidden_size=None)
    with pytest.raises(ModelError, match="family 'mamba'; supported are llama, qwen2, qwen3"):
        describe_model(directory)


def test_missing_setting_is_named(directory: Path) -> None:
    edit_config(directory, vocab_size=None)
    with pytest.raises(ModelError, match=r"config.json .* `vocab_size`"):
        describe_model(directory)


def test_untied_model_without_a_head_is_refused(directory: Path) -> None:
    edit_config(directory, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"no lm_head.weight"):
        describe_model(directory)


def test_truncated_weights_are_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ModelError, match=f"is {len(content) - 1} bytes long and should be {len(content)}"):
        describe_model(directory)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_weights_of_another_format_are_refused(content: bytes, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="is corrupt or of another kind"):
        describe_model(directory)


def test_directory_without_weights_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor"):
        describe_model(directory)

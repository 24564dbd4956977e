"""Reading models: configurations, rotary embeddings, weight files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tailrace.conformance.requests import make_request, same_tokens
from tailrace.conformance.tiny import FAMILIES
from tailrace.engine.model.rope import inverse_frequencies
from tailrace.engine.model.weights import read_weights
from tailrace.errors import ConfigError, ModelError
from tailrace.models.architecture import Rope, parameter_shapes, read_architecture
from tests.engine.helpers import TinyModel, make_core, run_core


def changed_copy(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_weights_are_those_of_the_checkpoint(tiny_model: TinyModel, family: str) -> None:
    directory = tiny_model(family)
    shapes = {name: tuple(tensor.shape) for name, tensor in read_weights(directory)}
    assert shapes == parameter_shapes(read_architecture(directory))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_frequencies_equal_those_of_transformers(
    tiny_model: TinyModel, tmp_path: Path, parameters: dict[str, Any]
) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path / "m", rope_parameters=parameters)
    expected = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(directory)).inv_freq
    torch.testing.assert_close(inverse_frequencies(read_architecture(directory).rope, 16), expected)


def test_the_old_spelling_of_rope_scaling_is_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 12345.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (directory / "config.json").write_text(json.dumps(config))
    assert read_architecture(directory).rope == Rope(type="linear", theta=12345.0, factor=2.0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "gpt2"}, "family 'gpt2'; supported are llama, qwen2, qwen3"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type 'dynamic'",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
            "use_sliding_window True",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(
    tiny_model: TinyModel, tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_architecture(changed_copy(tiny_model(family), tmp_path / "m", **changes))


def test_directories_that_hold_no_model_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_architecture(tmp_path)
    directory = changed_copy(tiny_model("llama"), tmp_path / "m")
    (directory / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        list(read_weights(directory))
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        list(read_weights(directory))


def test_files_that_do_not_say_what_they_should_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks 9 weights that its config\.json asks for, such as model\.layers\.2\."):
        make_core(changed_copy(tiny_model("llama"), tmp_path / "deeper", num_hidden_layers=3))
    directory = changed_copy(tiny_model("llama"), tmp_path / "m")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"weights": {}}')
    with pytest.raises(ModelError, match=r"index\.json is corrupt .* `weight_map`"):
        list(read_weights(directory))
    (directory / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        read_architecture(directory)


def test_sharded_checkpoints_are_read_through_their_index(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("qwen2"), tmp_path / "m")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, directory / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    requests = [make_request(0)]
    whole = run_core(make_core(tiny_model("qwen2")), requests)
    assert same_tokens(run_core(make_core(directory), requests), whole)


def test_biases_of_llama_attention_are_used(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attention_bias=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path)
    request = make_request(0, max_new_tokens=6, ignore_eos=True)
    sample = run_core(make_core(tmp_path), [request])[0]
    ids = torch.tensor([*request.prompt_ids.tolist(), *sample.response_ids.tolist()])
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        log_probs = loaded(ids[None]).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(1, torch.from_numpy(sample.response_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(sample.rollout_log_probs), expected, atol=1e-4, rtol=0)


def test_a_cache_without_room_for_a_block_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="kv_cache_gib 1e-06 holds no block of 4 tokens; raise it"):
        make_core(tiny_model("llama"), kv_cache_gib=1e-6)


def test_a_cache_larger_than_the_memory_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"cpu has no 1000000\.0 GiB for the KV cache; lower engine\.kv_cache_gib"):
        make_core(tiny_model("llama"), kv_cache_gib=1e6)

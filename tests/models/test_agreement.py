"""Engine and trainer compute the same log-probabilities for every model that is not refused, whatever its files say."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tailrace.config.engine import HfEngineConfig
from tailrace.conformance.requests import make_request
from tailrace.conformance.tiny import FAMILIES
from tailrace.engine.backends.hf import HfCore
from tailrace.errors import ModelError
from tailrace.models.loading import check_model
from tailrace.models.tokenizer import load_tokenizer
from tailrace.trainer.base import TrainSample
from tests.conftest import TinyModel
from tests.engine.helpers import make_core
from tests.trainer.single import make_trainer

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
WEIGHTS = "model.safetensors"
TEMPERATURE = 0.7


def difference(directory: Path, *, oracle: bool = False) -> float:
    """The largest difference between the log-probabilities of an engine and the trainer.

    `oracle`: use the hf engine in the place of the native one.
    """
    request = make_request(3, prompt=5, max_new_tokens=12, temperature=TEMPERATURE, ignore_eos=True)
    core = HfCore(HfEngineConfig(), directory, device=torch.device("cpu")) if oracle else make_core(directory)
    core.add(request)
    samples = []
    while core.has_work:
        samples += core.step()
    response_ids = samples[0].response_ids
    trained = TrainSample(
        group_id=0,
        prompt_ids=request.prompt_ids,
        response_ids=response_ids,
        response_mask=np.ones_like(response_ids),
        columns={},
    )
    log_probs = make_trainer(directory, temperature=TEMPERATURE).log_probs([trained])[0]
    return float(np.abs(log_probs - samples[0].rollout_log_probs).max())


def agree(directory: Path) -> bool:
    """Whether engine and trainer agree on a model, or the model is refused in one line that names its directory."""
    refusal = ""
    try:
        check_model(directory)
    except ModelError as error:
        refusal = str(error)
    if refusal:
        return "\n" not in refusal and str(directory) in refusal
    return difference(directory) < 2e-4


@st.composite
def ropes(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["default", "linear", "llama3"]))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([100.0, 1e4, 5e5]))}
    if kind != "default":
        rope["factor"] = draw(st.sampled_from([1.0, 2.5, 8.0]))
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.sampled_from([1.5, 4.0]))}
        if draw(st.booleans()):
            rope["original_max_position_embeddings"] = draw(st.sampled_from([8, 64]))
    return rope


@st.composite
def configurations(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    family = draw(st.sampled_from(FAMILIES))
    kv_heads, width = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([2, 4, 6]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    config = {
        "vocab_size": draw(st.sampled_from([261, 300])),
        "hidden_size": heads * width,
        "intermediate_size": draw(st.sampled_from([5, 16])),
        "num_hidden_layers": draw(st.sampled_from([1, 2])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(ropes()),
        "eos_token_id": 1,
    }
    if family == "qwen3" or (family == "llama" and draw(st.booleans())):
        config["head_dim"] = draw(st.sampled_from([2, 4, 8]))
    if family != "qwen2":
        config["attention_bias"] = draw(st.booleans())
    return family, config


def write_model(family: str, config: dict[str, Any], tokenizer: Path, directory: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**config))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, directory / file.name)


@settings(max_examples=20)
@given(model=configurations(), old_spelling=st.booleans())
def test_engine_and_trainer_agree_on_every_architecture(
    tiny_model: TinyModel, model: tuple[str, dict[str, Any]], old_spelling: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        write_model(*model, tiny_model("llama"), directory)
        if old_spelling:
            config = json.loads((directory / "config.json").read_text())
            rope = config.pop("rope_parameters")
            config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
            (directory / "config.json").write_text(json.dumps(config))
        check_model(directory)
        assert difference(directory) < 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_of_transformers_agrees_with_the_trainer(tiny_model: TinyModel, family: str) -> None:
    assert difference(tiny_model(family), oracle=True) < 2e-4


FIELDS = [
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias"),
    *("mlp_bias", "hidden_act", "rope_parameters", "rope_scaling", "rope_theta", "layer_types", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "partial_rotary_factor", "pad_token_id", "eos_token_id", "dtype"),
    *("torch_dtype", "quantization_config", "per_layer_config", "auto_map", "return_dict", "output_attentions"),
    *("output_hidden_states", "is_encoder_decoder", "attention_dropout", "initializer_range", "architectures"),
    *("use_cache", "transformers_weights", "original_max_position_embeddings", "model_type", "num_labels"),
    *("id2label", "pretraining_tp", "final_logit_softcapping", "logit_scale", "chunk_size_feed_forward", "is_causal"),
]
ABSENT = object()
VALUES = [
    *(ABSENT, None, True, False, 0, 1, 3, 7, -1, 2**40, 2**70, 0.5, 1.0, 2.0, 1e300, "", "x", "silu", "float8_e4m3fn"),
    *([], [1], ["sliding_attention", "full_attention"], ["full_attention"] * 2, {}, {"rope_type": "yarn"}),
    {"rope_type": "default", "rope_theta": 7.0},
    {"rope_type": "linear", "factor": 3},
    {"rope_type": "default", "rope_theta": None},
    {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 100.0}},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"AutoModelForCausalLM": "code.Model"},
    {"0": {"num_key_value_heads": 1}},
]


@settings(max_examples=100)
@given(family=st.sampled_from(FAMILIES), field=st.sampled_from(FIELDS), value=st.sampled_from(VALUES))
@example(family="llama", field="num_key_value_heads", value=0)
@example(family="qwen2", field="layer_types", value=["sliding_attention", "full_attention"])
@example(family="llama", field="pad_token_id", value=2**40)
@example(family="qwen2", field="num_key_value_heads", value=ABSENT)
@example(family="qwen3", field="head_dim", value=ABSENT)
@example(family="qwen3", field="rope_parameters", value={"full_attention": {"rope_theta": 100.0}})
@example(family="llama", field="per_layer_config", value={"0": {"num_key_value_heads": 1}})
@example(family="llama", field="return_dict", value=False)
def test_a_field_of_any_value_is_computed_alike_or_refused(
    tiny_model: TinyModel, family: str, field: str, value: Any
) -> None:
    assume(field != "max_position_embeddings" or value not in (1, 3, 7))  # there is no room for the request
    with tempfile.TemporaryDirectory() as place:
        directory = Path(shutil.copytree(tiny_model(family), f"{place}/model"))
        config = json.loads((directory / "config.json").read_text())
        config[field] = value
        if value is ABSENT:
            del config[field]
        (directory / "config.json").write_text(json.dumps(config))
        assert agree(directory)


Tensors = dict[str, torch.Tensor]


def _renamed(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "another head": lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] * 2},
    "the embedding as head": lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()},
    "the head in another dtype": lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].bfloat16()},
    "no head": lambda t: {name: tensor for name, tensor in t.items() if name != "lm_head.weight"},
    "a head alone": lambda t: {
        ("lm_head.weight" if name == "model.embed_tokens.weight" else name): tensor for name, tensor in t.items()
    },
    "an output bias": lambda t: {**t, "model.layers.0.self_attn.o_proj.bias": torch.ones(64)},
    "a query norm": lambda t: {**t, "model.layers.0.self_attn.q_norm.weight": torch.full((16,), 2.0)},
    "a bias of the head": lambda t: {**t, "lm_head.bias": torch.ones(261)},
    "no bias": lambda t: {name: tensor for name, tensor in t.items() if not name.endswith(".bias")},
    "no norm": lambda t: {name: tensor for name, tensor in t.items() if "q_norm" not in name},
    "a padded vocabulary": lambda t: {
        name: torch.cat([tensor, tensor[:3]]) if tensor.shape[0] == 261 else tensor for name, tensor in t.items()
    },
    "a third layer": lambda t: {
        **t, **{n.replace("layers.1.", "layers.2."): v.clone() for n, v in t.items() if "layers.1." in n}
    },
    "a transposed matrix": lambda t: {
        n: v.T.contiguous() if n.endswith("0.mlp.up_proj.weight") else v for n, v in t.items()
    },
    "names without a prefix": _renamed,
    "frequencies": lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    "float16": lambda t: {name: tensor.half() for name, tensor in t.items()},
    "float64": lambda t: {name: tensor.double() for name, tensor in t.items()},
    "float8": lambda t: {name: tensor.to(torch.float8_e4m3fn) for name, tensor in t.items()},
    "int8": lambda t: {name: tensor.to(torch.int8) for name, tensor in t.items()},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_the_configuration_does_not_describe_are_read_alike_or_refused(
    tiny_model: TinyModel, tmp_path: Path, family: str, change: str
) -> None:
    directory = Path(shutil.copytree(tiny_model(family), tmp_path / "model"))
    save_file(CHANGES[change](load_file(directory / WEIGHTS)), directory / WEIGHTS, metadata={"format": "pt"})
    assert agree(directory)


@settings(max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), cut=st.booleans(), byte=st.integers(0, 255))
@example(place=0.999, cut=True, byte=0)
def test_damaged_weights_are_refused_or_read_alike(tiny_model: TinyModel, place: float, cut: bool, byte: int) -> None:
    content = (tiny_model("llama") / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    where = int(place * (len(content) if cut else header))
    assume(cut or content[where] != byte)
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(shutil.copytree(tiny_model("llama"), f"{parent}/model"))
        damaged = content[:where] if cut else content[:where] + bytes([byte]) + content[where + 1 :]
        (directory / WEIGHTS).write_bytes(damaged)
        assert agree(directory)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b"{", b"[" * 100_000, b'{"eos_token_id": "x"}'])
def test_other_damaged_files_are_named(tiny_model: TinyModel, tmp_path: Path, file: str, content: bytes) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    (directory / file).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        (load_tokenizer if file == "tokenizer.json" else check_model)(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)
    if file != "tokenizer.json":
        assert file in str(caught.value)


def test_a_model_with_an_adapter_beside_it_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has adapter_config\.json; merge the adapter"):
        check_model(directory)


def test_one_file_counts_before_an_index_for_engine_and_trainer(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    other = {name: tensor * 1.5 for name, tensor in load_file(directory / WEIGHTS).items()}
    save_file(other, directory / "shard.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "shard.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert difference(directory) < 2e-4


def test_a_weight_in_two_shards_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    for shard in ("a", "b"):
        save_file(tensors, directory / f"{shard}.safetensors", metadata={"format": "pt"})
    places = {name: f"{'ab'[index % 2]}.safetensors" for index, name in enumerate(tensors)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with pytest.raises(ModelError, match=r"is in both .*a\.safetensors and .*b\.safetensors"):
        check_model(directory)


def test_weights_that_are_not_finite_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    tensors = load_file(directory / WEIGHTS)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"numbers in model\.norm\.weight that are not finite"):
        make_trainer(directory)

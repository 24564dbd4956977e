"""Claims on the sizes of models."""

import json
from pathlib import Path

import pytest

from tailrace.errors import PlanError
from tailrace.planning.model_shape.catalogue import find_shape, known_models, model_path
from tailrace.planning.model_shape.hugging_face import read_shape

PUBLISHED = {  # billions of parameters, as the models' authors print them
    "Qwen2.5-7B": 7.62,
    "Qwen2.5-72B": 72.7,
    "Qwen3-0.6B": 0.6,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "Llama-3.1-8B": 8.03,
    "DeepSeek-V3": 671,
    "GLM-4.5-Air": 106.9,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_as_many_as_published(name: str, billions: float) -> None:
    assert find_shape(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_all_known_models_can_be_read() -> None:
    assert {find_shape(name).name for name in known_models()} == set(known_models())


def test_an_organisation_and_a_kind_do_not_count_in_a_name() -> None:
    assert find_shape("Qwen/Qwen2.5-7B-Instruct") == find_shape("qwen2.5-7b")


def test_the_cache_is_split_among_ranks_until_each_has_one_head() -> None:
    shape = find_shape("Llama-3.1-8B")
    assert shape.cache_bytes() == 131_072  # 2 · 32 layers · 8 heads · 128 · 2 bytes
    assert [shape.cache_bytes(tp=tp) for tp in (2, 8, 16)] == [65_536, 16_384, 16_384]


def test_latent_attention_caches_one_vector_for_all_heads() -> None:
    assert find_shape("DeepSeek-V3").cache_bytes(tp=8) == 61 * (512 + 64) * 2


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="did you mean 'Qwen3-8B'"):
        find_shape("Qwen3-8C")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers '32'; expected a positive integer"),
        ({"hidden_size": 4100}, "hidden_size 4100, which is not divisible by its 32 num_attention_heads"),
        ({"num_key_value_heads": 5}, "32 num_attention_heads, which 5 num_key_value_heads cannot share"),
        ({"layer_types": ["linear_attention"]}, "layers of type linear_attention"),
        ({"layer_types": 5}, "layer_types 5; expected a list"),
        ({"text_config": "x"}, "text_config 'x'; expected an object"),
        ({"model_type": "gemma2"}, "the model_type 'gemma2', whose sizes are not understood"),
        ({"model_type": None}, "the model_type null, whose sizes are not understood"),
        ({"decoder_sparse_step": 2}, "experts in one of 2 layers"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    fields = {**known_models()["Llama-3.1-8B"], **change}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(PlanError, match=said):
        read_shape(tmp_path)


def test_a_model_of_images_and_text_says_at_the_top_that_its_embedding_is_the_head(tmp_path: Path) -> None:
    text = {key: value for key, value in known_models()["Qwen3-0.6B"].items() if key != "tie_word_embeddings"}
    fields = {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_shape(tmp_path).parameters == find_shape("Qwen3-0.6B").parameters


def test_a_directory_may_be_named_by_its_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(known_models()["Llama-3.1-8B"]))
    assert find_shape(str(config)) == find_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ("Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("mine/Qwen2.5-7B-Chat", "mine/Qwen2.5-7B-Chat"),
    ],
)
def test_a_known_model_has_its_name_of_the_hub_in_recipes(said: str, path: str) -> None:
    assert model_path(said) == path


def test_every_known_model_has_an_owner() -> None:
    assert all("/" in model_path(name) for name in known_models())


def test_a_directory_stays_one_in_recipes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_models()["Llama-3.1-8B"]))
    assert model_path(str(tmp_path / "config.json")) == str(tmp_path)

"""The decoder in PyTorch, whole and in shards: transformers is the oracle."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tailrace.conformance.tiny import FAMILIES
from tailrace.engine.collectives.base import Alone, Collective
from tailrace.engine.decoder.base import Batch
from tailrace.engine.decoder.graphs import pad_decode, padded_rows, padded_width
from tailrace.engine.decoder.model import rope_tables
from tailrace.engine.decoder.torch import TorchDecoder, decode_inputs
from tailrace.engine.model.shard import Shard
from tailrace.engine.model.sharding import local_architecture, shard_weights
from tailrace.engine.model.weights import check_weights, read_weights
from tailrace.engine.profile import PARTS
from tailrace.engine.sampling.sampler import Sampler, SamplingRows, uniforms
from tailrace.engine.scheduling.step import Chunk, Draw
from tailrace.errors import ConfigError
from tailrace.models.architecture import Architecture, read_architecture
from tests.engine.caches import cache_of
from tests.engine.thread_ranks import run_ranks

TinyModel = Callable[..., Path]
BLOCK_SIZE, BLOCKS = 4, 24
CPU = torch.device("cpu")
SEQUENCES = [np.random.default_rng(i).integers(5, 261, length).tolist() for i, length in enumerate((9, 14, 5))]
TABLES = [[7, 3, 22], [1, 0, 9, 15], [20, 2]]
STEPS = [
    [(0, 0, 6), (1, 0, 5)],  # (sequence, start, tokens): a whole prompt, and a part of one that ends within a block
    [(0, 6, 1), (1, 5, 7), (2, 0, 1)],
    [(2, 1, 2), (0, 7, 1), (1, 12, 1)],
    [(1, 13, 1), (0, 8, 1), (2, 3, 1)],
    [(2, 4, 1)],
]
DRAWS = [
    Draw(seed, 3, temperature, top_k, top_p, min_p)
    for seed, (temperature, top_k, top_p, min_p) in enumerate(
        [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.9, 0.0), (1.3, 0, 0.8, 0.05), (1.0, 0, 1.0, 0.2)]
    )
]


def chunk(sequence: int, start: int, length: int, *, table: list[int] | None = None) -> Chunk:
    tokens = SEQUENCES[sequence][start : start + length]
    return Chunk(start, tokens, TABLES[sequence] if table is None else table, DRAWS[0])


def make_decoder(
    model_dir: Path, collective: Collective, *, dtype: torch.dtype = torch.float32, cuda_graphs: bool = False
) -> tuple[Architecture, TorchDecoder]:
    architecture = read_architecture(model_dir)
    local = local_architecture(architecture, collective.size)
    decoder = TorchDecoder(
        local,
        cache=cache_of(local, blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=dtype),
        rope=rope_tables(architecture, 64, dtype, CPU),
        collective=collective,
        cuda_graphs=cuda_graphs,
    )
    named = check_weights(architecture, read_weights(model_dir))
    decoder.load(shard_weights(architecture, Shard(collective.rank, collective.size), named))
    return architecture, decoder


@torch.inference_mode()
def run_steps(model_dir: Path, collective: Collective) -> list[torch.Tensor]:
    """The logits of each step, over the whole vocabulary."""
    architecture, decoder = make_decoder(model_dir, collective)
    results = []
    for step in STEPS:
        logits_NV = decoder.forward(Batch.of([chunk(*part) for part in step], BLOCK_SIZE))
        whole_NV = collective.all_gather(logits_NV).transpose(0, 1).flatten(1)
        results.append(whole_NV[:, : architecture.vocab_size])
    return results


@torch.inference_mode()
def expected_logits(model_dir: Path) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    logits = [model(torch.tensor([tokens])).logits[0] for tokens in SEQUENCES]
    return [torch.stack([logits[index][start + length - 1] for index, start, length in step]) for step in STEPS]


def check_all_degrees(model_dir: Path, *degrees: int) -> None:
    whole = run_steps(model_dir, Alone())
    for one, other in zip(whole, expected_logits(model_dir), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    for tp in degrees:
        for rank in run_ranks(tp, partial(run_steps, model_dir)):
            for one, other in zip(rank, whole, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_whatever_the_tp_degree(tiny_model: TinyModel, family: str) -> None:
    check_all_degrees(tiny_model(family), 2, 3, 4)


def write_model(directory: Path, kind: type[PreTrainedModel], config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return directory


def test_heads_like_smollm2s_and_biases_are_shared_out_by_padding(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"vocab_size": 600, "hidden_size": 36, "intermediate_size": 100, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "attention_bias": True}
    config = LlamaConfig(**shape, **heads, max_position_embeddings=64, tie_word_embeddings=False)
    check_all_degrees(write_model(tmp_path, LlamaForCausalLM, config), 2, 4)


def test_a_kv_head_on_two_ranks_shares_out_its_query_heads(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"vocab_size": 600, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2}
    config = Qwen2Config(**shape, **heads, max_position_embeddings=64, tie_word_embeddings=True)
    check_all_degrees(write_model(tmp_path, Qwen2ForCausalLM, config), 4, 5)


@torch.inference_mode()
def draw_tokens(model_dir: Path, collective: Collective) -> tuple[list[int], list[float]]:
    """The tokens and log-probabilities that five ways to draw give for the same prompt."""
    architecture, decoder = make_decoder(model_dir, collective)
    tables = [[4 * row + place for place in range(4)] for row in range(len(DRAWS))]
    chunks = [Chunk(0, SEQUENCES[1], table, draw) for table, draw in zip(tables, DRAWS, strict=True)]
    logits_NV = decoder.forward(Batch.of(chunks, BLOCK_SIZE))
    sampler = Sampler(architecture.vocab_size, collective, decoder.drawing)
    draws = uniforms([draw.seed for draw in DRAWS], [draw.position for draw in DRAWS])
    return sampler.sample(logits_NV, SamplingRows.of(DRAWS, CPU), draws)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_are_drawn_whatever_the_tp_degree(tiny_model: TinyModel, family: str) -> None:
    tokens, log_probs = draw_tokens(tiny_model(family), Alone())
    for tp in (2, 3, 4):
        for other_tokens, other_log_probs in run_ranks(tp, partial(draw_tokens, tiny_model(family))):
            assert other_tokens == tokens
            assert other_log_probs == pytest.approx(log_probs, abs=1e-5)


@torch.inference_mode()
def test_a_copied_block_serves_like_its_source(tiny_model: TinyModel) -> None:
    _, decoder = make_decoder(tiny_model("qwen3"), Alone())
    decoder.forward(Batch.of([chunk(0, 0, 8)], BLOCK_SIZE))
    expected = decoder.forward(Batch.of([chunk(0, 8, 1)], BLOCK_SIZE))
    decoder.copy_blocks([(7, 11), (3, 12)])
    found = decoder.forward(Batch.of([chunk(0, 8, 1, table=[11, 12, 13])], BLOCK_SIZE))
    torch.testing.assert_close(found, expected)


@torch.inference_mode()
def test_only_rows_that_are_drawn_have_logits(tiny_model: TinyModel) -> None:
    _, decoder = make_decoder(tiny_model("llama"), Alone())
    chunks = [chunk(0, 0, 1), chunk(1, 0, 1), chunk(2, 0, 1)]
    every = decoder.forward(Batch.of(chunks, BLOCK_SIZE))
    silent = Chunk(0, chunks[1].tokens, chunks[1].blocks, None)
    some = decoder.forward(Batch.of([chunks[0], silent, chunks[2]], BLOCK_SIZE))
    torch.testing.assert_close(some, every[[0, 2]])
    assert decoder.forward(Batch.of([silent], BLOCK_SIZE)).shape == (0, every.shape[1])
    long = Chunk(0, SEQUENCES[1][:5], TABLES[1], None)
    assert decoder.forward(Batch.of([long], BLOCK_SIZE)).shape == (0, every.shape[1])


@torch.inference_mode()
def test_bf16_stays_close_to_fp32(tiny_model: TinyModel) -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        _, decoder = make_decoder(tiny_model("llama"), Alone(), dtype=dtype)
        results.append(decoder.forward(Batch.of([chunk(1, 0, 14)], BLOCK_SIZE)))
        assert results[-1].dtype == torch.float32
    torch.testing.assert_close(results[1][:, :261], results[0][:, :261], atol=0.15, rtol=0.1)


@torch.inference_mode()
def test_padding_a_decoding_step_to_the_size_of_a_graph_changes_no_result(tiny_model: TinyModel) -> None:
    _, decoder = make_decoder(tiny_model("qwen2"), Alone())
    decoder.forward(Batch.of([chunk(0, 0, 8), chunk(1, 0, 13), chunk(2, 0, 4)], BLOCK_SIZE))
    inputs_BX = decode_inputs(Batch.of([chunk(0, 8, 1), chunk(1, 13, 1), chunk(2, 4, 1)], BLOCK_SIZE))
    plain = decoder._decode(torch.from_numpy(inputs_BX))
    before = decoder.cache.data.clone()
    padded_BX = pad_decode(inputs_BX)
    assert padded_BX.shape == (4, 2 + 4)
    assert (padded_BX[3] == padded_BX[0]).all()
    torch.testing.assert_close(decoder._decode(torch.from_numpy(padded_BX))[:3], plain)
    torch.testing.assert_close(decoder.cache.data, before)


@torch.inference_mode()
def test_the_time_of_a_step_is_told_by_part_and_once(tiny_model: TinyModel) -> None:
    _, decoder = make_decoder(tiny_model("llama"), Alone())
    for length in (5, 1):
        decoder.forward(Batch.of([chunk(0, 0, length)], BLOCK_SIZE))
        seconds = decoder.take_seconds()
        assert seconds.keys() == {"embed", "qkv", "attention", "out", "all_reduce", "mlp", "head"} <= set(PARTS)
    assert decoder.take_seconds() == {}


def test_graphs_are_refused_without_cuda(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"cuda_graphs needs a CUDA device, not cpu; set it to false"):
        make_decoder(tiny_model("llama"), Alone(), cuda_graphs=True)


def test_few_sizes_hold_all_steps_and_none_is_more_than_twice_as_large() -> None:
    assert sorted({padded_rows(rows) for rows in range(1, 129)}) == [1, 2, 4, 8, *range(16, 129, 16)]
    for size in range(1, 300):
        assert size <= padded_rows(size) < 2 * size
        assert size <= padded_width(size) < 2 * size

"""The decoder in C++: near transformers in value, and bit for bit the same however tokens are batched."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tailrace.conformance.tiny import FAMILIES, write_tiny_model
from tailrace.engine.collectives.base import Alone, Collective
from tailrace.engine.decoder.base import Batch
from tailrace.engine.decoder.cpu import CpuDecoder, Packed, rope_tables, unsupported
from tailrace.engine.decoder.packing import Packing
from tailrace.engine.kernels.build import VECTORS, KernelUnavailable
from tailrace.engine.model.shard import Shard
from tailrace.engine.model.sharding import local_architecture, shard_weights
from tailrace.engine.model.weights import check_weights, read_weights
from tailrace.engine.profile import PARTS
from tailrace.engine.scheduling.step import Chunk, Draw
from tailrace.host.cpu import cpu_flags
from tailrace.models.architecture import Architecture, read_architecture
from tests.engine.caches import cache_of
from tests.engine.thread_ranks import run_ranks

pytestmark = pytest.mark.skipif(not cpu_flags() >= set(VECTORS), reason="this CPU has no AVX2")

Named = Mapping[str, torch.Tensor]
BLOCK_SIZE, BLOCKS = 16, 48
HEAD_DIM = 32
"""The head size of llama and qwen2; qwen3 has 48. So half of a head fills a whole register, or one and a half."""
DRAW = Draw(0, 0, 0.0, 0, 1.0, 0.0)
TOKENS = np.random.default_rng(0).integers(5, 261, 250).tolist()
"""More tokens than pass through a layer together."""
TABLE = np.random.default_rng(1).permutation(BLOCKS)[:16].tolist()
OTHER_TABLE = [block for block in range(BLOCKS) if block not in TABLE]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of every family, and a Llama whose projections have biases."""
    root = tmp_path_factory.mktemp("models")
    made = {family: write_tiny_model(family, root / family, head_dim=HEAD_DIM) for family in FAMILIES}
    biased = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=261,
            hidden_size=96,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            attention_bias=True,
            rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        )
    )
    with torch.no_grad():
        for parameter in biased.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.05)
    biased.save_pretrained(root / "biased")
    return made | {"biased": root / "biased"}


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype that the decoder computes in."""
    return cast(torch.dtype, request.param)


@pytest.fixture(scope="module")
def llama(models: dict[str, Path], dtype: torch.dtype) -> CpuDecoder:
    return make_decoder(models["llama"], dtype)


@pytest.mark.parametrize("columns", [16, 48, 32 * 9])
@pytest.mark.parametrize("given_dtype", [torch.bfloat16, torch.float32])
def test_a_packed_matrix_holds_its_rows_side_by_side(
    columns: int, given_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    weight_NK = torch.randn(48, columns, dtype=given_dtype, generator=torch.Generator().manual_seed(0))
    form = Packed(dtype)
    gate, up = form.gate_and_up(torch.zeros(form.shape(96, columns), dtype=form.matrices))
    form.write(weight_NK, up)
    neighbours = up.shape[-1]
    assert neighbours * dtype.itemsize == 4
    for row, column in itertools.product(range(48), range(columns)):
        found = up[row // 16, column // neighbours, row % 16, column % neighbours]
        assert found == weight_NK[row, column].to(dtype)
    assert not gate.any()


def test_master_weights_make_the_numbers_of_the_model_that_is_exported_of_them(
    models: dict[str, Path], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    architecture, named = read_model(models["biased"])
    masters = {name: tensor + torch.randn(tensor.shape, generator=generator) for name, tensor in named.items()}
    exported = {name: tensor.to(dtype) for name, tensor in masters.items()}
    shard, packing = Shard(0, 1), Packing(local_architecture(architecture, 1), Packed(dtype))
    for group in packing.groups:
        made = []
        for weights in (masters, exported):
            memory = torch.zeros(packing.size(group), dtype=torch.uint8)
            packing.write(group, memory, shard_weights(architecture, shard, weights))
            made.append(memory)
        assert torch.equal(*made)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def read_model(model_dir: Path) -> tuple[Architecture, Named]:
    architecture = read_architecture(model_dir)
    return architecture, check_weights(architecture, read_weights(model_dir))


def make_decoder(model_dir: Path, dtype: torch.dtype, collective: Collective | None = None) -> CpuDecoder:
    collective = collective or Alone()
    architecture, named = read_model(model_dir)
    local = local_architecture(architecture, collective.size)
    cache = cache_of(local, blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)
    decoder = CpuDecoder(local, cache=cache, rope=rope_tables(architecture, 256), collective=collective)
    decoder.load(shard_weights(architecture, Shard(collective.rank, collective.size), named))
    return decoder


def chunk(start: int, stop: int, table: list[int] = TABLE) -> Chunk:
    return Chunk(start, TOKENS[start:stop], table, DRAW)


def forward(decoder: CpuDecoder, *chunks: Chunk) -> torch.Tensor:
    """Compute logits, and copy them: the decoder reuses their memory."""
    return decoder.forward(Batch.of(list(chunks), BLOCK_SIZE)).clone()


def expected_logits(model_dir: Path, dtype: torch.dtype) -> torch.Tensor:
    """The logits, [tokens, V], of transformers in fp32, with weights rounded to `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", [*FAMILIES, "biased"])
def test_logits_are_those_of_transformers_within_rounding_whatever_the_tp_degree(
    models: dict[str, Path], name: str, tp: int, dtype: torch.dtype
) -> None:
    def run(collective: Collective) -> torch.Tensor:
        decoder = make_decoder(models[name], dtype, collective)
        parts = [forward(decoder, chunk(0, 199)), forward(decoder, chunk(199, 249)), forward(decoder, chunk(249, 250))]
        return collective.all_gather(torch.cat(parts)).transpose(0, 1).flatten(1)[:, :261]

    off = 0.03 if dtype == torch.bfloat16 else 1e-5
    expected = expected_logits(models[name], dtype)[[198, 248, 249]]
    for logits in run_ranks(tp, run):
        assert (logits - expected).abs().max() < off * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10)
@given(cuts=st.lists(st.integers(1, 249), max_size=4, unique=True))
def test_a_prompt_in_chunks_gives_the_bits_of_the_whole_prompt(
    models: dict[str, Path], name: str, dtype: torch.dtype, cuts: list[int]
) -> None:
    whole = forward(make_decoder(models[name], dtype), chunk(0, 250))
    decoder = make_decoder(models[name], dtype)
    bounds = [0, *sorted(cuts), 250]
    for start, stop in itertools.pairwise(bounds):
        last = forward(decoder, chunk(start, stop))
    assert torch.equal(last, whole)


@pytest.mark.parametrize("others", [1, 3, 6, 11, 30])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(llama: CpuDecoder, others: int) -> None:
    forward(llama, chunk(0, 100))
    alone = forward(llama, chunk(100, 101))
    rows = [Chunk(15, [5 + i], [OTHER_TABLE[i]], DRAW) for i in range(others)]
    batch = forward(llama, *rows[: others // 2], chunk(100, 101), *rows[others // 2 :])
    assert torch.equal(batch[others // 2], alone[0])


def test_a_token_has_the_same_bits_beside_a_prompt(llama: CpuDecoder) -> None:
    forward(llama, chunk(0, 100))
    alone = forward(llama, chunk(100, 101))
    beside = forward(llama, chunk(0, 229, OTHER_TABLE), chunk(100, 101))
    assert torch.equal(beside[1], alone[0])


def test_decoding_a_prompt_token_by_token_gives_the_bits_of_prefilling_it(llama: CpuDecoder) -> None:
    prefilled = forward(llama, chunk(0, 40, OTHER_TABLE))
    for position in range(40):
        decoded = forward(llama, chunk(position, position + 1))
    assert torch.equal(decoded, prefilled)


def test_blocks_that_another_sequence_filled_serve_as_well_as_own_ones(llama: CpuDecoder) -> None:
    own = forward(llama, chunk(0, 100))
    shared = [*TABLE[:4], *OTHER_TABLE]
    assert torch.equal(forward(llama, chunk(64, 100, shared)), own)


def test_a_copied_block_serves_as_well_as_the_original(llama: CpuDecoder) -> None:
    forward(llama, chunk(0, 40))
    original = forward(llama, chunk(40, 41))
    llama.copy_blocks([(TABLE[2], OTHER_TABLE[5])])
    assert torch.equal(forward(llama, chunk(40, 41, [*TABLE[:2], OTHER_TABLE[5]])), original)


def test_the_number_of_threads_changes_no_bit(
    models: dict[str, Path], dtype: torch.dtype, llama: CpuDecoder, two_threads: None
) -> None:
    threaded = make_decoder(models["llama"], dtype)
    for part in (chunk(0, 243), chunk(243, 244)):
        assert torch.equal(forward(threaded, part), forward(llama, part))


def test_what_a_block_held_before_is_never_read(models: dict[str, Path], dtype: torch.dtype) -> None:
    decoder = make_decoder(models["llama"], dtype)
    clean = [forward(decoder, chunk(0, 33)), forward(decoder, chunk(33, 34))]
    decoder.cache.data.fill_(torch.nan)
    assert torch.equal(torch.cat([forward(decoder, chunk(0, 33)), forward(decoder, chunk(33, 34))]), torch.cat(clean))


def test_what_a_block_held_before_is_never_read_where_a_slab_of_rows_ends(
    models: dict[str, Path], dtype: torch.dtype
) -> None:
    """The chunk begins at an odd row, so the last row of the slab is an even position."""
    decoder = make_decoder(models["llama"], dtype)
    step = chunk(0, 1, OTHER_TABLE), chunk(0, 243)
    clean = forward(decoder, *step)
    decoder.cache.data.fill_(torch.nan)
    assert torch.equal(forward(decoder, *step), clean)


def test_only_drawn_rows_have_logits(llama: CpuDecoder) -> None:
    silent = Chunk(0, TOKENS[:20], OTHER_TABLE, None)
    assert forward(llama, silent).shape == (0, 512)
    assert torch.equal(forward(llama, silent, chunk(0, 9)), forward(llama, chunk(0, 9)))


def test_loading_replaces_every_weight(models: dict[str, Path], dtype: torch.dtype, tmp_path: Path) -> None:
    changed = write_tiny_model("qwen3", tmp_path, seed=1, head_dim=HEAD_DIM)
    decoder = make_decoder(models["qwen3"], dtype)
    before = forward(decoder, chunk(0, 30))
    decoder.load(shard_weights(read_model(changed)[0], Shard(0, 1), read_model(changed)[1]))
    after = forward(decoder, chunk(0, 30))
    assert not torch.equal(after, before)
    assert torch.equal(after, forward(make_decoder(changed, dtype), chunk(0, 30)))


def test_weights_that_the_caller_changes_later_do_not_change_the_decoder(
    models: dict[str, Path], dtype: torch.dtype
) -> None:
    architecture, named = read_model(models["qwen2"])
    decoder = make_decoder(models["qwen2"], dtype)
    shards = shard_weights(architecture, Shard(0, 1), {name: tensor.clone() for name, tensor in named.items()})
    decoder.load(shards)
    before = forward(decoder, chunk(0, 30))
    for tensor in shards.values():
        tensor.zero_()
    assert torch.equal(forward(decoder, chunk(0, 30)), before)


def test_seconds_are_of_known_parts_and_start_again_when_taken(llama: CpuDecoder) -> None:
    forward(llama, chunk(0, 30))
    seconds = llama.take_seconds()
    assert set(seconds) <= set(PARTS)
    assert seconds["attention"] > 0
    assert set(llama.take_seconds().values()) == {0.0}


@pytest.mark.parametrize(
    ("change", "setting", "reason"),
    [
        ({"head_dim": 24}, {}, "needs a head_dim that is a multiple of 16, not 24"),
        ({"head_dim": 512}, {}, "heads of up to 256, not 512"),
        ({"hidden_size": 100}, {}, "needs a hidden_size that is a multiple of 16, not 100"),
        ({}, {"block_size": 4}, "needs a block_size that is a multiple of 16, not 4"),
        ({}, {"dtype": torch.float16}, "computes in bfloat16 or float32, not float16"),
        ({}, {"device": torch.device("cuda")}, "for CPUs, not cuda"),
    ],
)
def test_what_it_cannot_compute_is_said(
    models: dict[str, Path], change: dict[str, int], setting: dict[str, object], reason: str
) -> None:
    local = local_architecture(read_architecture(models["llama"]), 1)
    where: dict[str, object] = {"block_size": 16, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    assert unsupported(local, **where) is None  # type: ignore[arg-type]
    said = unsupported(dataclasses.replace(local, **change), **{**where, **setting})  # type: ignore[arg-type]
    assert said is not None
    assert reason in said


@pytest.mark.parametrize(("module", "kernel"), [("decoder.cpu", "decoder"), ("sampling.cpu", "sampling")])
def test_a_kernel_that_cannot_be_had_is_said(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, module: str, kernel: str
) -> None:
    def fail(name: str, **_: object) -> None:
        raise KernelUnavailable(f"no compiler for {name}")

    monkeypatch.setattr(f"tailrace.engine.{module}.load", fail)
    local = local_architecture(read_architecture(models["llama"]), 1)
    said = unsupported(local, block_size=16, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert said == f"no compiler for {kernel}"

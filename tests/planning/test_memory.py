"""Claims on the bytes of a trainer, an engine and a reference."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import PlanError
from tailrace.planning.hardware.catalogue import find_device
from tailrace.planning.memory import engine_memory, in_turns, reference_memory, trainer_memory
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.training_setup import Adapters, Layout, MicroBatch, TrainingSetup
from tests.planning.fsdp_memory import tracked

GIB = 2**30
H100 = find_device("H100")[1]
SMALL = ModelShape(
    name="small", layers=4, hidden=512, heads=8, kv_heads=8, head_dim=64, intermediate=1536, vocab=2000, tied=True
)
BATCH = MicroBatch.of([4096])


def setup(
    shape: ModelShape | str = SMALL, head: Any = "chunks", adapters: Adapters | None = None, **layout: Any
) -> Any:
    shape = find_shape(shape) if isinstance(shape, str) else shape
    return TrainingSetup(shape=shape, head=head, adapters=adapters, layout=Layout(**layout))


def held(setup: TrainingSetup) -> float:
    """Bytes of weights, gradients and moments for each parameter of the model."""
    optimizer = trainer_memory(setup, BATCH).instants["optimizer"]
    return sum(optimizer[name] for name in ("weights", "gradients", "moments")) / setup.parameters


def test_a_parameter_takes_eighteen_bytes_and_shards_of_them() -> None:
    assert held(setup()) == 18  # bf16 beside fp32, and gradient and moments in fp32
    assert held(setup(dp=4, sharding="optimizer")) == pytest.approx(2 + 4 + 12 / 4)
    assert held(setup(dp=4, sharding="full")) == pytest.approx(16 / 4)
    assert held(replace(setup(), dtype="float32")) == 16


def test_adapters_alone_have_gradients_and_moments() -> None:
    adapted = setup(adapters=Adapters(rank=16, kept=4), sharding="full")
    each = 4 * 16 * (4 * (512 + 512) + 3 * (512 + 1536)) * SMALL.layers
    assert adapted.trained == each
    parts = trainer_memory(adapted, BATCH).instants["optimizer"]
    assert (parts["gradients"], parts["moments"]) == (4 * each, 8 * each)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_memory_is_that_of_fsdp2_in_torch(checkpointing: Any) -> None:
    """By purpose, and as a sum; torch's norms, logits and optimizer are other kernels, and left out."""
    plan = trainer_memory(setup(head="value", dp=4, sharding="full", checkpointing=checkpointing), BATCH)
    torch = tracked(SMALL, tokens=4096, devices=4, checkpointing=checkpointing == "full")
    backward = plan.instants["backward pass of the last layer"]
    assert backward["weights"] == pytest.approx(torch["Sharded Param"], rel=0.01)
    assert backward["gradients"] == pytest.approx(torch["Sharded Grad"], rel=0.01)
    assert backward["moments"] == pytest.approx(torch["OptState"], rel=0.01)
    assert backward["gathered weights"] == pytest.approx(torch["Unsharded Param"] + torch["All Gather"], rel=0.01)
    assert backward["activations"] == pytest.approx(torch["kept"], rel=0.1)
    assert backward["gradients of activations"] == pytest.approx(torch["Temp"], rel=0.1)
    assert plan.peak == pytest.approx(torch["Total"], rel=0.1)
    assert plan.worst == "backward pass of the last layer"


def test_whole_logits_make_the_loss_the_worst_instant() -> None:
    whole = trainer_memory(setup("Qwen3-0.6B", head="whole", checkpointing="full"), BATCH)
    assert whole.worst == "loss"
    assert whole.instants["loss"]["logits"] == 18 * 4096 * 151_936
    assert trainer_memory(setup("Qwen3-0.6B", checkpointing="full"), BATCH).peak < whole.peak - 9 * GIB


def test_a_critic_has_neither_head_nor_logits() -> None:
    shape = find_shape("Qwen3-8B")
    critic, actor = setup(shape, head="value"), setup(shape)
    assert actor.parameters - critic.parameters == shape.head_parameters
    assert trainer_memory(critic, BATCH).peak < trainer_memory(actor, BATCH).peak


def test_a_pipelines_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    piped, alone = (trainer_memory(setup(pp=pp), BATCH).instants["loss"]["activations"] for pp in (2, 1))
    assert piped == alone


MODELS = st.sampled_from(["Qwen3-4B", "Qwen3-30B-A3B", "DeepSeek-V3"])
TOKENS = st.integers(1, 65_536)


@given(MODELS, TOKENS, st.integers(1, 512), st.integers(1, 512), st.sampled_from([None, 16]))
def test_more_devices_in_full_sharding_never_take_more_memory_each(
    model: str, tokens: int, devices: int, more: int, rank: int | None
) -> None:
    adapters = Adapters(rank=rank) if rank else None
    fewer, larger = (setup(model, adapters=adapters, dp=dp, sharding="full") for dp in (devices, devices + more))
    batch = MicroBatch.of([tokens])
    assert trainer_memory(larger, batch).peak <= trainer_memory(fewer, batch).peak


@given(MODELS, TOKENS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from(["none", "full"]))
def test_neither_checkpointing_nor_offload_ever_takes_more_memory(
    model: str, tokens: int, tp: int, pp: int, sharding: str
) -> None:
    batch = MicroBatch.of([tokens])
    own: dict[str, Any] = {"tp": tp, "pp": pp, "sharding": sharding}
    kinds: list[dict[str, Any]] = [{}, {"checkpointing": "full"}, {"checkpointing": "full", "offload": True}]
    peaks = [trainer_memory(setup(model, **own, **kind), batch).peak for kind in kinds]
    assert peaks == sorted(peaks, reverse=True)


def test_what_does_not_fit_is_refused_with_what_is_lacking() -> None:
    too_large = trainer_memory(setup("Qwen2.5-72B", dp=8, sharding="full", checkpointing="full"), BATCH)
    assert not too_large.fits(H100)
    with pytest.raises(
        PlanError, match=r"the trainer of Qwen2.5-72B lacks \d+\.\d GiB on H100, which has 80: .*moments"
    ):
        too_large.check(H100, "H100")
    fits = trainer_memory(setup("Qwen2.5-72B", dp=64, sharding="full", checkpointing="full"), BATCH)
    fits.check(H100, "H100")
    assert fits.fits(H100)
    assert fits.excess(H100) < 0


def test_an_engine_holds_weights_cache_and_its_largest_step() -> None:
    shape = find_shape("Qwen3-8B")
    memory = engine_memory(shape, tp=2, cache_tokens=100_000, step_tokens=8192, batch_size=256)
    step = memory.instants["largest step"]
    assert step["weights"] == pytest.approx(shape.parameters, rel=1e-3)  # 2 bytes, on two ranks
    assert step["KV cache"] == 100_000 * shape.cache_bytes(tp=2)
    assert memory.instants["sampling"]["logits"] == 256 * 151_936 * 8
    assert memory.worst == "largest step"


def test_a_reference_holds_weights_alone() -> None:
    reference = setup("Qwen3-8B", dp=8, sharding="full")
    memory = reference_memory(reference, BATCH)
    assert memory.instants["forward pass"]["weights"] == pytest.approx(2 * reference.parameters / 8)
    assert memory.peak < trainer_memory(reference, BATCH).peak / 2


def test_workers_that_take_turns_keep_what_they_always_hold() -> None:
    trainer = trainer_memory(setup(), BATCH)
    engine = engine_memory(SMALL, tp=1, cache_tokens=10_000, step_tokens=10, batch_size=1)
    both = in_turns({"trainer": trainer, "engine": engine})
    held = {name: trainer.instants["optimizer"][name] for name in ("weights", "gradients", "moments")}
    assert trainer.held == held
    assert both.instants["sampling of the engine"] == {
        **{f"{name} of the engine": size for name, size in engine.instants["sampling"].items()},
        **{f"{name} of the trainer": size for name, size in held.items()},
    }
    assert both.worst == f"{trainer.worst} of the trainer"
    assert both.peak == pytest.approx(trainer.peak + sum(engine.held.values()))


def test_a_step_of_few_tokens_has_no_more_logits_than_these() -> None:
    assert trainer_memory(setup(), MicroBatch.of([10])).instants["loss"]["logits"] == 10 * 10 * SMALL.vocab
    assert trainer_memory(setup("Qwen3-8B"), BATCH).instants["loss"]["logits"] == 2**26 * 10

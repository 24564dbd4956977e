"""The synchronous engine against transformers and against itself."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tailrace.conformance.requests import make_request, same_tokens
from tailrace.conformance.tiny import FAMILIES, write_tiny_model
from tailrace.errors import EngineError, RequestError
from tailrace.types import FinishReason, Request, Sample
from tests.engine.helpers import TINY_GIB, TinyModel, make_core, run_core


def reference_log_probs(model_dir: Path, request: Request, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """The log-probabilities, [R, V], that transformers computes along the sample's own tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.from_numpy(np.concatenate((request.prompt_ids, sample.response_ids)))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(request.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def greedy_tokens(model: Any, request: Request) -> list[int]:
    prompt = torch.from_numpy(request.prompt_ids)[None]
    tokens = request.sampling.max_new_tokens
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    response: list[int] = output[0, prompt.shape[1] :].tolist()
    return response


def chosen(log_probs: torch.Tensor, sample: Sample) -> np.ndarray:
    return log_probs.gather(1, torch.from_numpy(sample.response_ids)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_while_requests_join_and_leave(tiny_model: TinyModel, family: str) -> None:
    directory = tiny_model(family)
    requests = [
        make_request(i, group_id=i // 3, prompt=7 + 5 * (i // 3), temperature=i % 2, max_new_tokens=3 + 4 * (i % 5))
        for i in range(12)
    ]
    samples = run_core(make_core(directory, prefill_tokens=6), requests, stagger=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for request in requests:
        sample = samples[request.request_id]
        if request.sampling.temperature == 0:
            assert sample.response_ids.tolist() == greedy_tokens(model, request)
        reference = chosen(reference_log_probs(directory, request, sample), sample)
        np.testing.assert_allclose(sample.rollout_log_probs, reference, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_those_of_the_tempered_softmax(tiny_model: TinyModel, family: str) -> None:
    directory = tiny_model(family)
    requests = [make_request(i, group_id=0, temperature=0.7, max_new_tokens=20, ignore_eos=True) for i in range(4)]
    for request, sample in zip(requests, run_core(make_core(directory), requests).values(), strict=True):
        reference = chosen(reference_log_probs(directory, request, sample, 0.7), sample)
        np.testing.assert_allclose(sample.rollout_log_probs, reference, atol=1e-4)


def test_the_same_seed_gives_the_same_tokens_in_any_batch(tiny_model: TinyModel) -> None:
    requests = [make_request(i, group_id=i // 4, max_new_tokens=12) for i in range(12)]
    together = run_core(make_core(tiny_model("llama")), requests)
    apart = {i: s for request in requests for i, s in run_core(make_core(tiny_model("llama")), [request]).items()}
    assert same_tokens(together, apart)
    assert len({tuple(together[i].response_ids.tolist()) for i in range(4)}) == 4, "seeds must differ in effect"


def test_a_group_prefills_its_prompt_once_and_shares_its_full_blocks(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"))
    requests = [make_request(i, group_id=0, prompt=10, max_new_tokens=6, ignore_eos=True) for i in range(8)]
    for request in requests[:6]:
        core.add(request)
    core.step()
    for request in requests[6:]:
        core.add(request)
    core.step()
    stats = core.stats()
    assert stats.running == 8
    assert stats.prefilled_tokens == 10 + 7, "each of the others computes the last prompt token, to draw from it"
    assert stats.shared_tokens == 7 * 9
    assert stats.used_blocks == 2 + 8, "two full blocks of the prompt, and one block for each sequence"
    run_core(core, [])
    assert core.stats().used_blocks == 0


def test_prompts_that_begin_alike_share_what_they_have_in_common(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"))
    longer = make_request(1, group_id=0, prompt=12, temperature=0)
    samples = run_core(core, [make_request(0, prompt=8, temperature=0), longer])
    assert (core.stats().prefilled_tokens, core.stats().shared_tokens) == (12, 8)
    assert same_tokens({1: samples[1]}, run_core(make_core(tiny_model("llama")), [longer]))


def test_the_next_turn_of_a_conversation_shares_the_last_one(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"))
    first = make_request(0, prompt=9, max_new_tokens=6, ignore_eos=True)
    said = run_core(core, [first])[0].response_ids
    asked = np.array([7, 8, 9])
    turn = dataclasses.replace(first, request_id=1, prompt_ids=np.concatenate((first.prompt_ids, said, asked)))
    before = core.stats()
    again = run_core(core, [turn])
    assert core.stats().shared_tokens - before.shared_tokens == 9 + 6 - 1, "all but the newest token was computed"
    assert core.stats().prefilled_tokens - before.prefilled_tokens == 1 + 3
    assert same_tokens(again, run_core(make_core(tiny_model("llama")), [turn]))


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_changes_no_token(tiny_model: TinyModel, family: str) -> None:
    requests = [
        make_request(i, group_id=i // 2, prompt=5 + i // 2, max_new_tokens=30, ignore_eos=True) for i in range(10)
    ]
    large = run_core(make_core(tiny_model(family)), requests)
    core = make_core(tiny_model(family), kv_cache_gib=25 * 4 * TINY_GIB[family], prefill_tokens=7)
    small = run_core(core, requests, stagger=True)
    assert core.stats().total_blocks == 25
    assert core.stats().preemptions > 3
    assert same_tokens(large, small)
    for request_id, sample in large.items():
        np.testing.assert_allclose(sample.rollout_log_probs, small[request_id].rollout_log_probs, atol=1e-4)
    assert core.stats().used_blocks == 0
    assert core.stats().generated_tokens == 300, "a preempted sequence keeps its tokens"


def test_the_smallest_cache_that_accepts_a_request_serves_it(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"), kv_cache_gib=5 * 4 * TINY_GIB["llama"])
    requests = [make_request(i, group_id=0, prompt=10, max_new_tokens=10, ignore_eos=True) for i in range(3)]
    assert [len(s.response_ids) for s in run_core(core, requests).values()] == [10, 10, 10]


def test_a_prompt_dropped_to_admit_the_next_request_has_served_its_own(tiny_model: TinyModel) -> None:
    requests = [make_request(i, prompt=3 + i % 3, max_new_tokens=4 + i % 5, ignore_eos=True) for i in range(12)]
    core = make_core(tiny_model("qwen3"), kv_cache_gib=9 * 4 * TINY_GIB["qwen3"])
    assert same_tokens(run_core(core, requests), run_core(make_core(tiny_model("qwen3")), requests))
    assert core.stats().used_blocks == 0


def test_the_batch_size_is_kept_to(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"), max_batch_size=3)
    for i in range(8):
        core.add(make_request(i, max_new_tokens=5, ignore_eos=True))
    most = 0
    while core.has_work:
        core.step()
        most = max(most, core.stats().running)
    assert most == 3


def test_a_stop_token_ends_the_response_and_stays_in_it(tiny_model: TinyModel) -> None:
    free = run_core(make_core(tiny_model("llama")), [make_request(0, ignore_eos=True, max_new_tokens=20)])[0]
    stop = int(free.response_ids[7])
    end = free.response_ids.tolist().index(stop) + 1
    sample = run_core(make_core(tiny_model("llama")), [make_request(0, stop_token_ids=(stop,), max_new_tokens=20)])[0]
    assert sample.response_ids.tolist() == free.response_ids[:end].tolist()
    assert sample.finish_reason == FinishReason.STOP


def test_the_models_eos_ends_a_response_unless_ignored(tmp_path: Path) -> None:
    directory = write_tiny_model("llama", tmp_path / "model")
    ignoring = make_request(0, temperature=0, max_new_tokens=12, ignore_eos=True)
    free = run_core(make_core(directory), [ignoring])[0]
    eos = int(free.response_ids[3])
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": [{eos}, 260]}}')
    end = free.response_ids.tolist().index(eos) + 1
    stopped = run_core(make_core(directory), [make_request(0, temperature=0, max_new_tokens=12)])[0]
    assert (len(stopped.response_ids), stopped.finish_reason) == (end, FinishReason.STOP)
    forced = run_core(make_core(directory), [ignoring])[0]
    assert (len(forced.response_ids), forced.finish_reason) == (12, FinishReason.LENGTH)


def test_a_stop_string_across_tokens_ends_the_response(tiny_model: TinyModel) -> None:
    free = run_core(make_core(tiny_model("llama")), [make_request(0, ignore_eos=True, max_new_tokens=40)])[0]
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(free.response_ids, free.response_ids[1:], strict=False))]
    printable = [(i, a, b) for i, a, b in pairs if all(5 <= token < 5 + 94 for token in (a, b))]
    index, first, second = printable[0]  # the byte alphabet begins with the printable ASCII characters from "!"
    text = chr(ord("!") + first - 5) + chr(ord("!") + second - 5)
    sample = run_core(make_core(tiny_model("llama")), [make_request(0, stop=(text,), max_new_tokens=40)])[0]
    assert sample.response_ids.tolist() == free.response_ids[: index + 2].tolist()
    assert sample.finish_reason == FinishReason.STOP


def test_the_end_of_the_context_ends_a_response(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"), max_model_len=16)
    sample = run_core(core, [make_request(0, prompt=9, max_new_tokens=100, ignore_eos=True)])[0]
    assert (len(sample.response_ids), sample.finish_reason) == (7, FinishReason.LENGTH)


def test_abort_finishes_running_and_waiting_requests_with_what_they_have(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"), max_batch_size=1)
    for i in range(3):
        core.add(make_request(i, group_id=0, max_new_tokens=20, ignore_eos=True))
    for _ in range(5):
        core.step()
    aborted = {sample.request_id: sample for sample in core.abort([0, 2, 77])}
    assert {i: (len(s.response_ids), s.finish_reason) for i, s in aborted.items()} == {
        0: (5, FinishReason.ABORT),
        2: (0, FinishReason.ABORT),
    }
    assert list(run_core(core, [])) == [1]
    assert core.stats().used_blocks == 0


def test_new_weights_take_over_in_the_middle_and_each_token_tells_its_version(tmp_path: Path) -> None:
    old, new = write_tiny_model("qwen3", tmp_path / "old", seed=0), write_tiny_model("qwen3", tmp_path / "new", seed=1)
    core = make_core(old, max_batch_size=2)
    requests = [make_request(i, group_id=0, max_new_tokens=9, ignore_eos=True) for i in range(3)]
    for request in requests:
        core.add(request)
    for _ in range(4):
        core.step()
    core.load_weights(1, AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).state_dict().items())
    samples = run_core(core, [])
    assert core.stats().used_blocks == 0

    assert samples[0].weight_versions.tolist() == [0] * 4 + [1] * 5
    spanning = log_probs_across_versions(old, new, requests[0], samples[0], switch=4)
    np.testing.assert_allclose(samples[0].rollout_log_probs, chosen(spanning, samples[0]), atol=1e-4)

    assert samples[2].weight_versions.tolist() == [1] * 9
    alone = chosen(reference_log_probs(new, requests[2], samples[2]), samples[2])
    np.testing.assert_allclose(
        samples[2].rollout_log_probs,
        alone,
        atol=1e-4,
        err_msg="it started later, so it must not use the old prompt cache",
    )


def log_probs_across_versions(old: Path, new: Path, request: Request, sample: Sample, *, switch: int) -> torch.Tensor:
    """The log-probabilities, [R, V], of a response that changes weights.

    The first `switch` tokens come from the old weights. The new weights go on from the old ones' cache.
    """
    ids = torch.from_numpy(np.concatenate((request.prompt_ids, sample.response_ids)))[None]
    cached = len(request.prompt_ids) + switch - 1
    with torch.no_grad():
        first = AutoModelForCausalLM.from_pretrained(old, dtype=torch.float32)(ids[:, :cached], use_cache=True)
        rest = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)(
            ids[:, cached:-1], past_key_values=first.past_key_values
        )
    logits = torch.cat((first.logits[0, len(request.prompt_ids) - 1 :], rest.logits[0]))
    return logits.log_softmax(-1)


@pytest.mark.parametrize("break_it", ["missing", "unknown", "shape", "integers"])
def test_wrong_weights_are_refused_whole(tiny_model: TinyModel, tmp_path: Path, break_it: str) -> None:
    core = make_core(tiny_model("llama"))
    state = AutoModelForCausalLM.from_pretrained(write_tiny_model("llama", tmp_path / "m", seed=5)).state_dict()
    last = "model.layers.1.mlp.down_proj.weight"
    if break_it == "missing":
        del state[last]
    elif break_it == "unknown":
        state["model.layers.2.mlp.down_proj.weight"] = state[last]
    elif break_it == "shape":
        state[last] = state[last][:, 1:]
    else:
        state[last] = state[last].long()
    with pytest.raises(EngineError, match=r"model\.layers\.[12]\.mlp\.down_proj\.weight"):
        core.load_weights(1, iter(state.items()))
    request = make_request(0, temperature=0)
    assert same_tokens(run_core(core, [request]), run_core(make_core(tiny_model("llama")), [request]))
    assert core.stats().version == 0


def test_a_core_tells_when_its_weights_were_copied_in_part(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tiny_model("llama"))
    state = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).state_dict()

    def no_room(named: object) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(core.lanes[0].replica, "load", no_room)
        with pytest.raises(RuntimeError, match="no room"):
            core.load_weights(1, state.items())
    assert not core.weights_are_whole
    core.load_weights(2, state.items())
    assert core.weights_are_whole
    request = make_request(0, temperature=0)
    assert same_tokens(run_core(core, [request]), run_core(make_core(tiny_model("llama")), [request]))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(0, prompt=0), "empty prompt"),
        (make_request(0, prompt=32), "a prompt of 32 tokens; the context of 32"),
        (make_request(0, prompt=9, max_new_tokens=20), "needs up to 7 blocks of 4 tokens, and the cache has 6"),
        (
            Request(request_id=0, group_id=0, prompt_ids=np.array([261]), sampling=make_request(0).sampling, seed=0),
            "outside the vocabulary, 0 … 260",
        ),
    ],
)
def test_requests_that_can_never_be_served_are_refused(tiny_model: TinyModel, request_: Request, message: str) -> None:
    core = make_core(tiny_model("llama"), max_model_len=32, kv_cache_gib=6 * 4 * TINY_GIB["llama"])
    with pytest.raises(RequestError, match=message):
        core.check(request_)


def test_logits_that_are_not_finite_fail_the_step(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"))
    state = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).state_dict()
    core.load_weights(1, [(name, tensor * torch.nan) for name, tensor in state.items()])
    core.add(make_request(0))
    with pytest.raises(EngineError, match="not finite"):
        core.step()


def test_bf16_stays_close_to_fp32(tiny_model: TinyModel) -> None:
    directory = tiny_model("llama")
    requests = [make_request(i, group_id=0, max_new_tokens=12, ignore_eos=True) for i in range(6)]
    for request, sample in zip(
        requests, run_core(make_core(directory, dtype="bfloat16"), requests).values(), strict=True
    ):
        reference = chosen(reference_log_probs(directory, request, sample), sample)
        np.testing.assert_allclose(sample.rollout_log_probs, reference, atol=0.15)

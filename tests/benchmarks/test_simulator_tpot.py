"""Claims on the steady state that published measurements of serving are compared with."""

import pytest
import simulator_tpot
from simulator_tpot import Row, Steady, fitted_host, steady

from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.operators import Pass
from tailrace.planning.step_times.rates import Host


class Constant:
    """A step takes 10 ms, and 1 us more for each token of a prompt."""

    basis = Basis(kind="analytic", error=0.0)

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        return 0.01

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        return 0.01 + 1e-6 * batch_size * rms_length

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        return 0.01 + 1e-6 * chunk.tokens


def row(requests: int, *, name: str = "a", prompt: int = 1000, response: int = 101, tpot_s: float = 0.01) -> Row:
    return Row(
        id=name,
        backend="vllm",
        model="Qwen3-32B",
        device="H100",
        dtype="bfloat16",
        prompt=prompt,
        response=response,
        requests=requests,
        tp=2,
        tpot_s=tpot_s,
    )


def test_a_request_alone_decodes() -> None:
    assert steady(Constant(), row(1), 1e6).kernels_s == pytest.approx(0.01)


def test_each_of_the_others_has_its_prompt_computed_meanwhile() -> None:
    # 100 steps of 10 ms, and 10 prompts of 1 ms, less those that fall into the 11 ms in which the request itself waits
    found = steady(Constant(), row(11), 1e6)
    decoding = 100 * found.kernels_s
    assert decoding == pytest.approx(1.0 + 0.010 * decoding / (decoding + 0.011))
    assert found.tokens == pytest.approx(11 + 0.1, abs=0.01)


def test_no_more_run_than_the_cache_holds() -> None:
    assert steady(Constant(), row(100), 4 * 1050.5) == steady(Constant(), row(4), 1e6)


def test_long_prompts_are_computed_in_parts() -> None:
    parts = [(chunk.tokens, chunk.logits) for chunk in simulator_tpot._chunks(20_000)]
    assert parts == [(8192, 0.0), (8192, 0.0), (3616, 1.0)]


def test_what_the_host_takes_is_found() -> None:
    states = [Steady(0.01, float(n)) for n in (1, 4, 16, 64)]
    truth = Host(step_s=2e-3, sequence_s=30e-6)
    found = fitted_host([row(1, tpot_s=state.tpot_s(truth)) for state in states], states)
    assert found.step_s == pytest.approx(truth.step_s, rel=0.02)
    assert found.sequence_s == pytest.approx(truth.sequence_s, rel=0.02)


def test_about_half_of_the_rows_are_held_out() -> None:
    halves = [row(1, name=f"row {n}").held_out for n in range(1000)]
    assert 450 < sum(halves) < 550

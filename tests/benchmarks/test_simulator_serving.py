"""Claims on the replay of recorded requests."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import simulator_serving
from simulator_serving import Request, Run, Server, decode_ratio, figures, read_stated

from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.operators import Pass


class Constant:
    """A step takes 10 ms, and 10 us more for each token of a prompt."""

    basis = Basis(kind="analytic", error=0.0)

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        return 0.01

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        return 0.01 + 1e-5 * batch_size * rms_length

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        return 0.01 + 1e-5 * chunk.tokens


def request(name: str, *, came: float = 0.0, prompt: int = 1000, like: str = "", shared: int = 0) -> Request:
    return Request(
        name=name, prompt=prompt, response=11, came=came, first=came + 0.5, last=came + 1.5, like=like, shared=shared
    )


def run(*requests: Request, decoding: Sequence[tuple[float, float, float]] = (), **changes: int) -> Run:
    fields = {"replicas": 1, "slots": 256, "step_tokens": 2048, **changes}
    return Run(
        name="a",
        kind="RTX-4090",
        shape=find_shape("Llama-3.1-8B"),
        pool=open_cluster("1xRTX-4090").pools[0],
        recorded_cache=None,
        requests=requests,
        decoding=tuple(decoding),
        stated={},
        **fields,
    )


def test_a_request_alone_takes_a_step_for_its_prompt_and_one_for_each_further_token() -> None:
    served = Server(run(request("a", came=2.0)), Constant(), 10_000).serve()
    found = figures(served)
    assert found["ttft_s"] == pytest.approx(0.02)
    assert found["latency_s"] == pytest.approx(0.12)
    assert found["tpot_s"] == pytest.approx(0.01)
    assert found["makespan_s"] == pytest.approx(2.12)


@pytest.mark.parametrize(("cache_tokens", "ttft_s"), [(10_000, 0.012), (2_000, 0.02)])
def test_a_prefix_of_an_earlier_request_is_found_where_the_cache_never_fills(cache_tokens: int, ttft_s: float) -> None:
    replayed = run(request("a"), request("b", came=1.0, like="a", shared=800))
    last = Server(replayed, Constant(), cache_tokens).serve()[-1]
    assert last.first - last.came == pytest.approx(ttft_s)


def test_the_planned_cache_of_an_rtx_4090_is_near_the_one_that_vllm_found() -> None:
    assert run().planned_cache == pytest.approx(41_408, rel=0.05)


def test_steps_that_only_decode_are_compared_with_the_tokens_of_their_second() -> None:
    recorded = run(request("a"), decoding=[(1.0, 4.0, 200.0)])  # 50 steps in a second: 20 ms each
    assert decode_ratio(recorded, Constant()) == pytest.approx(0.5)


def test_the_errors_that_others_state_are_read(tmp_path: Path) -> None:
    text = "Metric  vLLM  Sim  Diff%\n-----\nTTFT Mean  10.0  9.6  -4.0%\n\nTPOT P90  5.0  5.1  +2.0%\n"
    (tmp_path / "summary.txt").write_text(text)
    assert read_stated(tmp_path / "summary.txt") == {"TTFT Mean": -4.0, "TPOT P90": 2.0}


def test_without_data_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulator_serving.main(tmp_path)
    assert "TAILRACE_DATA has no llmservingsim" in capsys.readouterr().out

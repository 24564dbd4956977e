"""Real ranks under the real controller, whose steps take what PAT's figure 4 says.

The figure has the milliseconds of a step of eight GPUs, by the sequences of all of them:

    sequences       1       128
    TP 2, DP 4    15.37    24.41
    TP 8, DP 1     9.64    30.87

Steps are linear in between here. On two ranks, TP 1 and TP 2 take as long as these. The batch has 128 responses: 56 of
60 tokens, 56 of 80, 12 of 100 and 4 of 300. A switch takes 50 ms for weights and 10 ms for the rest, and a rank sends
40 MB/s. With PAT's preset the controller takes all responses for the longest. It decides after the first step, and
whenever some have ended:

    unfinished   still to make   TP 1                  TP 2
    128          299             · 24.41 ms = 7.30 s   · 30.87 ms = 9.23 s and a switch    stays
     72          240             · 20.42 ms = 4.90 s   · 21.51 ms = 5.16 s and a switch    stays
     16          220             · 16.44 ms = 3.62 s   · 12.15 ms = 2.67 s and a switch    switches
      4          200             · 15.58 ms = 3.12 s   · 10.14 ms = 2.03 s                 stays at TP 2
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tailrace.config.engine import AdaptiveTPConfig, NativeEngineConfig
from tailrace.conformance.requests import make_request, same_tokens
from tailrace.conformance.tiny import write_tiny_model
from tailrace.engine.adaptive_tp.profile_key import profile_key
from tailrace.engine.core import EngineCore
from tailrace.models.architecture import read_architecture
from tailrace.planning.drain import Work, drain, drain_s
from tailrace.planning.latency import LatencyPredictor
from tailrace.planning.remaining import Ranked, Unfinished
from tailrace.planning.tp_decision import Candidate, Decision, Snapshot
from tailrace.planning.tp_merge import context, merge
from tailrace.planning.tp_profile import SwitchCost, TPProfile
from tailrace.planning.tp_stage import chosen
from tailrace.planning.tp_switch import SwitchController
from tailrace.planning.tp_verdict import Verdict
from tailrace.types import Request, Sample
from tests.engine.helpers import run_core
from tests.engine.table_time import TableTime
from tests.planning.tp_profiles import made_profile

CPU = torch.device("cpu")
PROMPT = 9
KV_BYTES = 512
"""Bytes of the keys and values of a token."""
LENGTHS = [60] * 56 + [80] * 56 + [100] * 12 + [300] * 4
COST = SwitchCost(source_tp=1, target_tp=2, reshard_s=0.05, rest_s=0.01, kv_bytes_per_s=4e7)
FIGURE_4 = {1: (15.37, 24.41), 2: (9.64, 30.87)}
FOUR_RANKS = {1: (15.37, 24.41), 2: (12.0, 25.0), 4: (9.64, 30.87)}
"""As the figure has it with TP 2 and TP 8; TP 4 is made up in between."""
EIGHT_RANKS = {1: (21.0, 22.5), 2: (15.37, 24.41), 4: (11.5, 26.5), 8: (9.64, 30.87)}
"""TP 2 and TP 8 are those of the figure; the others are made up."""


@dataclass(frozen=True)
class Table:
    """Milliseconds of a step with 1 and with 128 sequences in all, by TP."""

    ms: dict[int, tuple[float, float]]

    @property
    def ranks(self) -> int:
        return max(self.ms)

    def step_s(self, tp: int, size: int) -> float:
        """Seconds of a step of a replica with `size` sequences, where the others have as many."""
        one, full = self.ms[tp]
        return (one + (full - one) / 127 * (size * self.ranks / tp - 1)) / 1e3

    def profile(self) -> TPProfile:
        costs = [msgspec.structs.replace(COST, source_tp=a, target_tp=b) for a in self.ms for b in self.ms if a != b]
        return made_profile(
            lambda tp, size, tokens, replicas: self.step_s(tp, size),
            ranks=self.ranks,
            degrees=tuple(self.ms),
            switches=tuple(costs),
            group_s={tp: 0.0 for tp in self.ms if tp > 1},
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("table") / "llama", seed=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> TableTime:
    clock = TableTime(request.param.step_s, COST)
    clock.install(monkeypatch)
    return clock


TWO, FOUR, EIGHT = Table(FIGURE_4), Table(FOUR_RANKS), Table(EIGHT_RANKS)
BY_TWO = pytest.mark.parametrize("clock", [TWO], indirect=True, ids=["two ranks"])
BY_FOUR = pytest.mark.parametrize("clock", [FOUR], indirect=True, ids=["four ranks"])
BY_EIGHT = pytest.mark.parametrize("clock", [EIGHT], indirect=True, ids=["eight ranks"])


def responses(lengths: Sequence[int]) -> list[Request]:
    made = [
        make_request(i, prompt=PROMPT, max_new_tokens=n, ignore_eos=True, temperature=0.0)
        for i, n in enumerate(lengths)
    ]
    return [replace(request, expected_tokens=n) for request, n in zip(made, lengths, strict=True)]


@dataclass(frozen=True)
class Stage:
    """What came of a batch."""

    samples: dict[int, Sample]
    seconds: float
    verdicts: list[Verdict]

    @property
    def decisions(self) -> list[Decision]:
        return [verdict.decision for verdict in self.verdicts if verdict.decision is not None]

    @property
    def switches(self) -> list[tuple[int, int, int]]:
        """Unfinished sequences, and the degrees before and after."""
        return [(v.unfinished, v.source_tp, v.target_tp) for v in self.verdicts if v.report is not None]


def run(
    model: Path, clock: TableTime, batch: Sequence[Request], *, dp: int, tp: int, adaptive: dict[str, Any] | None = None
) -> Stage:
    """Generate the batch from the start of the clock on."""
    config = NativeEngineConfig(
        dtype="float32",
        block_size=4,
        kv_cache_gib=0.01,
        threads_per_rank=1,
        dp=dp,
        tp=tp,
        adaptive_tp=None if adaptive is None else AdaptiveTPConfig.model_validate(adaptive),
    )
    clock.now = 0.0
    with closing(EngineCore(config, model, device=CPU)) as core:
        samples = run_core(core, batch)
        return Stage(samples, clock.now, [] if core.adaptive_tp is None else core.adaptive_tp.take())


def settings(model: Path, folder: Path, profile: TPProfile, **changes: Any) -> dict[str, Any]:
    """The section `adaptive_tp` with this profile, as of the engine that `run` makes."""
    config = NativeEngineConfig(
        dtype="float32",
        block_size=4,
        kv_cache_gib=0.01,
        threads_per_rank=1,
        dp=profile.key.ranks,
        adaptive_tp=AdaptiveTPConfig(),
    )
    key = profile_key(config, read_architecture(model), model="tiny", device=CPU)
    msgspec.structs.replace(profile, key=key).write(folder / "profile.json")
    return {"profile": str(folder / "profile.json"), "steps_between": 10_000, **changes}


def of(decision: Decision, tp: int) -> Candidate:
    return next(candidate for candidate in decision.candidates if candidate.tp == tp)


@BY_TWO
def test_tp_rises_where_figure_4_says_and_takes_less_time_than_either_degree_that_stays(
    model: Path, tmp_path: Path, clock: TableTime
) -> None:
    pat = settings(model, tmp_path, TWO.profile(), preset="pat", max_response_tokens=300)
    ours = run(model, clock, responses(LENGTHS), dp=2, tp=1, adaptive=pat)
    assert [(d.unfinished, d.tp, d.chosen) for d in ours.decisions] == [
        (128, 1, 1),
        (72, 1, 1),
        (16, 1, 2),
        (4, 2, 2),
    ]
    assert [of(d, 1).remaining_s for d in ours.decisions] == pytest.approx([7.30, 4.90, 3.62, 3.12], rel=2e-3)
    assert [of(d, 2).remaining_s for d in ours.decisions] == pytest.approx([9.23, 5.16, 2.67, 2.03], rel=2e-3)
    switch_s = 0.05 + 0.01 + 8 * (PROMPT + 80) * KV_BYTES / COST.kv_bytes_per_s
    assert of(ours.decisions[2], 2).switch_s == pytest.approx(switch_s, rel=1e-3)
    parts = 60 * TWO.step_s(1, 64) + 20 * TWO.step_s(1, 36) + 20 * TWO.step_s(2, 16) + 200 * TWO.step_s(2, 4)
    assert ours.seconds == pytest.approx(parts + switch_s, rel=2e-3)
    low, high = run(model, clock, responses(LENGTHS), dp=2, tp=1), run(model, clock, responses(LENGTHS), dp=1, tp=2)
    assert [low.seconds, high.seconds] == pytest.approx([5.32, 4.55], rel=1e-3)
    assert ours.seconds < 0.95 * min(low.seconds, high.seconds)
    assert same_tokens(ours.samples, low.samples)


@BY_TWO
def test_steps_that_take_longer_than_profiled_are_foreseen_after_a_while(
    model: Path, tmp_path: Path, clock: TableTime
) -> None:
    quick = Table({tp: (one / 2, full / 2) for tp, (one, full) in FIGURE_4.items()})
    pat = settings(model, tmp_path, quick.profile(), preset="pat", max_response_tokens=300)
    ours = run(model, clock, responses(LENGTHS), dp=2, tp=1, adaptive=pat)
    second, last = ours.decisions[1], ours.decisions[-1]
    assert (second.unfinished, last.unfinished) == (72, 4)
    assert of(second, second.tp).remaining_s == pytest.approx(4.90, rel=0.05), "under TP 1"
    assert of(last, last.tp).remaining_s == pytest.approx(2.03, rel=0.05), "under TP 2"


@BY_TWO
def test_the_bytes_that_a_switch_moves_were_foreseen_where_groups_share_their_prompts(
    model: Path, tmp_path: Path, clock: TableTime
) -> None:
    pat = settings(model, tmp_path, TWO.profile(), preset="pat", max_response_tokens=200)
    groups = [
        make_request(number, group_id=number // 4, prompt=40, max_new_tokens=20 if number < 80 else 60, ignore_eos=True)
        for number in range(128)
    ]
    ours = run(model, clock, groups, dp=2, tp=1, adaptive=pat)
    (switch,) = (verdict for verdict in ours.verdicts if verdict.report is not None)
    assert switch.decision is not None
    assert switch.report is not None
    assert switch.unfinished == 48
    assert switch.report.kv_bytes == pytest.approx(6 * (40 + 4 * 20) * KV_BYTES, rel=0.1), "of six groups on a rank"
    assert chosen(switch.decision).move_s * COST.kv_bytes_per_s == pytest.approx(switch.report.kv_bytes, rel=0.1)


def replayed(table: Table, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """The switches that planning alone makes of the batch, where nothing is measured; as `Stage.switches`.

    It begins after the first step, which computes the prompts and a token of each response.
    """
    controller = SwitchController(
        table.profile(), Ranked(), max_batch_size=128, least_gain=0.005, steps_between=10_000, look_ahead=True
    )
    tables, tp, made = LatencyPredictor(table.profile()), 1, []
    replicas: list[list[Work]] = [
        [(PROMPT + 1, n - 1) for n in lengths[first :: table.ranks]] for first in range(table.ranks)
    ]
    home: int | None = None
    controller.due(len(lengths))
    while unfinished := sum(map(len, replicas)):
        if controller.due(unfinished):
            rows = tuple(tuple(unfinished_of(*work, most=max(lengths)) for work in running) for running in replicas)
            decision = controller.decide(
                Snapshot(
                    tp=tp,
                    degrees=tuple(table.ms),
                    replicas=rows,
                    kv_bytes_per_token=KV_BYTES,
                    groups=frozenset(table.ms) - {1},
                    home_tp=home,
                )
            )
            home = home or decision.chosen
            if decision.switch:
                made.append((unfinished, tp, decision.chosen))
                replicas, tp = merge(replicas, tp, decision.chosen, tokens=context).replicas, decision.chosen
        replicas = drain(tables, tp, replicas, (), slots=128, stops=range(1, unfinished))[0].replicas
    return [*made, (0, tp, home)] if home not in (None, tp) else made


def unfinished_of(held: int, remaining: int, *, most: int) -> Unfinished:
    made = held - PROMPT
    return Unfinished(context=held, generated=made, most=most - made, expected=made + remaining)


def check_path(
    model: Path, folder: Path, clock: TableTime, table: Table, lengths: Sequence[int], path: list[int]
) -> None:
    """Assert that the ranks take the path that planning alone takes, in the time that it foresaw, below all others."""
    ranks, longest = table.ranks, max(lengths)
    ranked = settings(model, folder, table.profile(), estimate="ranked", least_gain=0.005, max_response_tokens=longest)
    ours = run(model, clock, responses(lengths), dp=ranks, tp=1, adaptive=ranked)
    assert ours.switches == replayed(table, lengths)
    assert [target for _, _, target in ours.switches] == path
    first_step_s = table.step_s(1, len(lengths) // ranks)
    assert ours.seconds == pytest.approx(first_step_s + chosen(ours.decisions[0]).total_s, rel=0.02)
    for tp in table.ms:
        dealt = [[(PROMPT, n) for n in lengths[first :: ranks // tp]] for first in range(ranks // tp)]
        assert ours.seconds < drain_s(LatencyPredictor(table.profile()), tp, dealt, (), slots=128)
    assert same_tokens(ours.samples, run(model, clock, responses(lengths), dp=2, tp=1).samples)


@BY_FOUR
def test_four_ranks_take_the_path_that_planning_alone_takes_in_the_time_that_it_foresaw(
    model: Path, tmp_path: Path, clock: TableTime
) -> None:
    lengths = [20] * 56 + [160] * 56 + [400] * 16
    check_path(model, tmp_path, clock, FOUR, lengths, [2, 4, 1])  # and back for the next batch


@BY_EIGHT
def test_eight_ranks_take_the_path_that_planning_alone_takes_in_the_time_that_it_foresaw(
    tmp_path: Path, clock: TableTime
) -> None:
    model = write_tiny_model("llama", tmp_path / "llama", query_heads=8)
    lengths = [15] * 64 + [110] * 44 + [180] * 16 + [240] * 4
    check_path(model, tmp_path, clock, EIGHT, lengths, [4, 8, 1])

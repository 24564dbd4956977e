"""Claims on how far a step may be from what is predicted."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planner.bound import Bases, Flow, Generation, Parts, bound, together
from tailrace.planner.load import Load
from tailrace.planner.modes import USUAL, Mode
from tailrace.planner.problem import Table
from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.operators import Pass
from tailrace.simulator.scenario import Remaking
from tailrace.workloads.replay import Replay, Script, Turn
from tests.planner.problems import config_of, problem_of

TABLE = Table.of(config_of())
BATCHES, STREAMING = Mode(placement="separated"), Mode(placement="separated", streaming=True)
AHEAD = replace(STREAMING, max_staleness=1)
FLOW = Flow(first_s=0.01, more_s=1e-4, most=64, tokens=64_000, read_s=0.1, longest=2000, tools_s=0.0)


def basis(error: float) -> Basis:
    return Basis(kind="analytic", error=error)


def bases(engines: float = 0.0, trainer: float = 0.0, weights: float = 0.0) -> Bases:
    return Bases(engines=basis(engines), trainer=basis(trainer), weights=basis(weights))


def parts(generation: Flow | float = 100.0, *, training_s: float = 50.0, weights_s: float = 0.0) -> Parts:
    return Parts(
        generation=generation,
        training_s=training_s,
        claims=10,
        optimizer_s=0.0,
        reference_s=0.0,
        grading_s=0.0,
        grade_s=0.0,
        publish_s=weights_s,
        arrive_s=0.0,
        install_s=0.0,
    )


class Steps:
    """Steps of so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        return self._seconds

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        return self._seconds

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        return self._seconds


def generation(seconds: float, *, slots: int = 8) -> Generation:
    load = problem_of("4xH100").load
    return Generation(Steps(seconds), load, tp=1, slots=slots, cache_tokens=1e9)


def generation_s(*each: tuple[Generation, int], ahead: int) -> float:
    found = together(each, ahead)
    return found.generation_s if isinstance(found, Flow) else found


@pytest.mark.parametrize("ahead", [0, 1])
def test_replicas_that_differ_share_a_step_as_their_speeds(ahead: int) -> None:
    quick, slow = generation(0.01), generation(0.02)
    assert generation_s((quick, 1), (quick, 2), ahead=ahead) == generation_s((quick, 3), ahead=ahead)
    both = generation_s((quick, 1), (slow, 2), ahead=ahead)
    assert both >= generation_s((quick, 2), ahead=ahead), "as fast as two quick ones, but for the last responses"
    assert both < generation_s((slow, 2), ahead=ahead)


def test_replicas_without_a_model_leave_nothing_to_do_for_others() -> None:
    assert generation_s((generation(0.01), 1), (generation(0.0), 1), ahead=1) < 1e-3


def test_a_recipe_that_replaces_prompts_generates_what_the_filter_of_the_workload_threw_away() -> None:
    grpo, dapo = problem_of(), problem_of("4xH100", "algorithm={type: dapo, group_size: 4}")
    attempts = dapo.load.attempts
    assert grpo.load.attempts == 1.0
    assert 2 < attempts < 9, "math-32b keeps 31 % of its groups, and a place has eight further prompts at most"
    assert dapo.load.read == pytest.approx(attempts * grpo.load.read)
    assert dapo.load.samples == grpo.load.samples
    flows, alone = [], []
    for problem in (grpo, dapo):
        engine = Generation(Steps(0.01), problem.load, tp=1, slots=8, cache_tokens=1e9)
        flows.append(engine.flow(1, ahead=1).tokens)
        alone.append(engine.together_s(1))
    assert flows[1] == pytest.approx(attempts * flows[0])
    assert alone[1] > 0.8 * attempts * alone[0]


def test_the_slowest_place_of_a_step_waits_for_one_group_after_the_other() -> None:
    problem = problem_of("4xH100", "algorithm={type: dapo, group_size: 4}")
    load, waits = problem.load, replace(problem.load, chain=0.0)
    assert load.chain > 3 * load.mean
    roomy, together_ = (Generation(Steps(0.01), each, tp=1, slots=4096, cache_tokens=1e9) for each in (load, waits))
    assert roomy.together_s(1) > 1.5 * together_.together_s(1)
    assert roomy.flow(1, ahead=1).longest == load.chain > together_.flow(1, ahead=1).longest


def test_a_trainer_is_planned_for_the_groups_that_it_is_given() -> None:
    short, long = (
        Script(prompt_tokens=10, turns=(Turn(generated_tokens=tokens),), reward=reward)
        for tokens, reward in ((10, 1.0), (1000, 0.0))
    )
    replay = Replay([[short, replace(short, reward=0.0)], [long, long]])
    remaking = Remaking(decide=lambda rows: len({row["reward"] for row in rows}) == 1, most=4)
    load = Load.of(replay, groups=2, remaking=remaking)
    assert load.batches.tokens == 2 * (10 + 2 * 10)
    assert load.batches.longest == 1010
    assert load.mean == Load.of(replay, groups=2).mean == 505
    assert (load.attempts, load.read) == (remaking.attempts(0.5), remaking.attempts(0.5) * 20)
    assert load.chain == remaking.rounds(0.5, 2) * 505


def test_several_updates_wait_for_the_last_response() -> None:
    once = parts(60.0, training_s=60.0)
    several = replace(once, updates_s=50.0)
    assert bound(STREAMING, TABLE, once).seconds < 80
    assert bound(STREAMING, TABLE, several).seconds > 60 + 50
    assert bound(BATCHES, TABLE, several).seconds == bound(BATCHES, TABLE, once).seconds == 60 + 60


def test_each_part_of_a_sequential_step_has_its_own_error() -> None:
    shorter, longer = bases(engines=0.5, trainer=0.1).spread(BATCHES, TABLE, parts())
    assert longer == pytest.approx((1.5 * 100 + 1.1 * 50) / 150)
    assert shorter == pytest.approx((100 / 1.5 + 50 / 1.1) / 150)


@pytest.mark.parametrize(
    ("asked", "said"), [(bases(engines=0.5), 1.0), (bases(trainer=0.5), 1.5), (bases(weights=0.5), 1.0)]
)
def test_what_a_step_does_not_wait_for_does_not_count(asked: Bases, said: float) -> None:
    _, longer = asked.spread(AHEAD, TABLE, parts(FLOW, training_s=10_000))
    assert longer == pytest.approx(said, rel=0.01)


@given(
    st.sampled_from(USUAL),
    st.one_of(st.floats(1, 1000), st.floats(0.001, 0.1).map(lambda first_s: replace(FLOW, first_s=first_s))),
    st.floats(1, 1000),
    st.floats(0, 100),
    st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(0, 2)),
)
def test_a_step_is_never_further_off_than_the_part_that_is_known_least(
    mode: Mode, generation: Flow | float, training_s: float, weights_s: float, errors: tuple[float, float, float]
) -> None:
    one = parts(generation, training_s=training_s, weights_s=weights_s)
    shorter, longer = bases(*errors).spread(mode, TABLE, one)
    most = 1 + max(errors)
    assert 1 / most * (1 - 1e-9) <= shorter <= 1 + 1e-9
    assert 1 - 1e-9 <= longer <= most * (1 + 1e-9)
    assert bound(mode, TABLE, one.slower(engines=1, trainer=1, weights=1)) == bound(mode, TABLE, one)

"""The figures that `make bench-elastic` computes from its runs, and a short run in virtual time."""

import pytest
from bench_elastic import summary
from elastic_engine import DECODE, RESPONSE
from elastic_real import GROUP_SIZE, GROUPS, MEAN_TOKENS, Span, differing, join_of, lengths, still_s, tokens_lost
from elastic_virtual import Played, beside, growing, play

from tailrace.events import Event


def decode(worker: str, start: float, *, longest_s: float = 0.01, generated: float = 0) -> Event:
    """A quarter of a second with 25 steps."""
    metrics = {"steps": 25.0, "longest_s": longest_s, "generated": generated}
    return Event(task=DECODE, actor="engine", worker=worker, start=start, end=start + 0.25, metrics=metrics)


def response(group: int, sample: int, digest: str) -> Event:
    info = {"group": group, "sample": sample, "digest": digest}
    return Event(task=RESPONSE, actor="engine", start=0.0, end=0.0, info=info)


def test_an_engine_stands_still_where_a_step_takes_several_usual_ones() -> None:
    steps = [decode("rollout-0", 0.25 * n, longest_s=0.51 if n == 8 else 0.04) for n in range(40)]
    other = decode("rollout-1", 2.0, longest_s=9.0)
    waits = [Event(task="weights_wait", actor="trainer", start=n, end=n + (0.3 if n == 3 else 0.1)) for n in range(9)]
    events = [*steps, other, *waits]
    assert still_s(events, Span(1.0, 4.0), worker="rollout-0") == pytest.approx(0.5 + 0.2)
    assert still_s(events, Span(5.0, 8.0), worker="rollout-0") == 0.0


def test_a_join_lasts_from_the_start_of_a_process_until_after_its_first_response() -> None:
    events = [
        Event(task="worker_started", actor="rollout-1", start=3.0, end=9.0),
        *(Event(task="sample", actor="engine", worker="rollout-1", start=9.5, end=end) for end in (12.0, 11.0)),
    ]
    assert join_of(events, "rollout-1") == Span(3.0, 12.0)
    with pytest.raises(RuntimeError, match="rollout-2 has not joined the run"):
        join_of(events, "rollout-2")


def test_tokens_that_an_engine_has_made_and_no_response_has_are_lost() -> None:
    made = [decode("rollout-0", 0.0, generated=60), decode("rollout-0", 0.25, generated=100)]
    made.append(decode("rollout-1", 0.0, generated=50))
    samples = [Event(task="sample", actor="engine", start=0.0, end=1.0, tokens=tokens) for tokens in (90, 53)]
    assert tokens_lost([*made, *samples]) == 7


def test_responses_that_are_others_missing_or_twice_differ() -> None:
    right = [response(0, 0, "a"), response(0, 1, "b"), response(1, 0, "c")]
    assert differing(right[::-1], right) == 0
    assert differing([*right, right[0]], right) == 1
    assert differing(right[1:], right) == 1
    assert differing([*right[1:], response(0, 0, "x")], right) == 2


def test_the_best_number_of_each_phase_is_the_one_that_took_the_least_time() -> None:
    one, two, three = (
        Played([10.0] * 6, [], 60.0),
        Played([5.0, 5.0, 8.0, 8.0, 9.0, 9.0], [], 88.0),
        Played([5.0, 5.0, 6.0, 6.0, 6.0, 6.0], [], 100.0),
    )
    elastic = Played([10.0, 10.0, 9.0, 8.0, 6.0, 6.3], [1, 3], 80.0)
    assert beside(elastic, [one, two, three]) == {
        "changes": [1, 3],
        "best": [2, 3, 3],
        "phases": [2.0, round(17 / 12, 4), 1.025],
        "step_over_right": {"run": round(49.3 / 34, 4), "settled": 1.05},
        "settled_steps": 1,
        "engine_s_share": 0.8,
    }
    unchanged = beside(Played([10.0] * 6, [], 60.0), [one, two, three])
    assert (unchanged["best"], unchanged["settled_steps"]) == ([3], 5)


def test_the_worst_seed_counts() -> None:
    real = {"exposed_s": 0.1, "tokens_lost": 0, "moved": 3}
    virtual = [{"step_over_right": {"run": run, "settled": settled}} for run, settled in ((1.2, 1.0), (1.4, None))]
    assert summary(real, virtual) == {
        "bench": "elastic",
        "step_over_right": {"run": 1.4, "settled": 1.0},
        "exposed_s": 0.1,
        "tokens_lost": 0,
        "real": {"moved": 3},
        "virtual": virtual,
    }


def test_lengths_grow_to_twice_their_start() -> None:
    longest = [
        max(script.tokens for group in growing(0, steps=3, groups=8).groups[a : a + 8] for script in group)
        for a in (0, 16)
    ]
    assert longest[1] > 1.2 * longest[0]
    groups = lengths(5).groups
    assert len(groups) == 5 * GROUPS
    assert {len(group) for group in groups} == {GROUP_SIZE}
    last = [script.tokens for group in groups[-GROUPS:] for script in group]
    assert min(last) >= MEAN_TOKENS
    assert max(last) <= 3 * MEAN_TOKENS


def test_a_short_run_in_virtual_time_adds_engines_by_itself() -> None:
    elastic = play(0, 1, 3, 6, 6, 1e6)  # the trainer is so quick that each engine pays
    assert elastic.changes[0] == 1
    assert len(elastic.seconds) == 6
    assert elastic == play(0, 1, 3, 6, 6, 1e6), "it is the same each time"
    assert sum(play(0, 1, None, 6, 6, 1e6).seconds) > sum(elastic.seconds)

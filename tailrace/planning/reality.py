"""Which assumption of a plan was wrong, of what a run tells.

The trainer's time adds up to the step: it computes, hands weights on, waits for samples, or does something else. The
part in which it spent the difference says where to look. Within that part, the assumption counts that changes it the
most, in the logarithm of its ratio:

    part               assumptions about the work                        assumptions about the time of a unit of work
    training           samples, lengths, prompts                         a trained token, the optimizer
    waits for samples  samples, lengths, the longest response, engines,  a decode step of the batch that there was, a
                       how full they are                                 grading, a token for reference or critic
       while engines   lengths, the longest response, engines            the way of weights to an engine
       idle, too
    weights                                                              the trainer's part of their way

A step ends with the critic's update, too. So where the trainer did other things, it may have waited for that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tailrace.planning.foretold import Foretold, StepFigures

About = Literal["work", "times"]
Part = Literal["training", "generation", "reward", "reference", "critic", "idle", "weights", "other"]

_RIGHT = 0.05
"""A step that is off by no more is as foretold, and an assumption that is off by no more is right."""
_MOST = math.log(1000)
_MOSTLY = 0.5
"""Work explains why the trainer waits where it took longer by at least this part of that."""
_ALSO = 0.5
"""A second assumption is named where its effect is at least this part of the first one's."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something that a plan takes for granted."""

    part: Part
    """The part of a step that it changes."""
    about: About
    effect: float
    """The logarithm of the factor by which that part takes longer than foretold."""
    text: str
    """What was, and what was foretold."""
    is_last: bool = False
    """Whether it follows from other things, and so is named only where nothing else is wrong."""


def verdict(foretold: Foretold, measured: StepFigures) -> str:
    """Say in a sentence or two how right the plan was, and which assumption was wrong."""
    planned, step_s = foretold.figures.step_s, measured.step_s
    bounds = f"{_number(foretold.least_s)} to {_number(foretold.most_s)} s"
    head = f"A step took {_number(step_s)} s, and {_number(planned)} s were foretold, from {bounds}"
    within = foretold.least_s <= step_s <= foretold.most_s
    if abs(step_s / planned - 1) <= _RIGHT:
        return f"{head}. The plan was right."
    causes = wrong_assumptions(foretold, measured)
    head += ". The plan was right within its bounds." if within else ". The plan was wrong."
    if not causes:
        return f"{head} None of its assumptions says why: {_elsewhere(foretold.figures, measured)}."
    what = "the work that there was" if causes[0].about == "work" else "the time that work takes"
    also = f"; besides, {causes[1].text}" if len(causes) > 1 else ""
    return f"{head} What was wrong is an assumption about {what}: {causes[0].text}{also}."


def wrong_assumptions(foretold: Foretold, measured: StepFigures) -> list[Assumption]:
    """The assumptions that explain most of the difference of a step, the first one the most; two at most."""
    sign = math.copysign(1.0, measured.step_s - foretold.figures.step_s)
    part = _part(foretold.figures, measured, sign)
    every = [one for one in assumptions(foretold, measured) if one.part == part and sign * one.effect > _RIGHT]
    found = [one for one in every if not one.is_last] or every
    found.sort(key=lambda one: -sign * one.effect)
    return [one for one in found if one.effect / found[0].effect >= _ALSO][:2]


def _part(foretold: StepFigures, measured: StepFigures, sign: float) -> Part:
    """Where the trainer spent the difference; of what it waits for, what took longer, or shorter, than foretold."""
    spent: dict[Part, float] = {
        "training": measured.training_s - foretold.training_s,
        "weights": measured.weights_s - foretold.weights_s,
        "generation": measured.waiting_s - foretold.waiting_s,
        "other": _other_s(measured) - _other_s(foretold),
    }
    part = max(spent, key=lambda name: sign * spent[name])
    if part not in ("generation", "other"):
        return part
    before: dict[Part, float] = {
        "generation": measured.generation_s - foretold.generation_s,
        "reward": measured.reward_s - foretold.reward_s,
        "reference": measured.reference_s - foretold.reference_s,
        "critic": measured.critic_s - foretold.critic_s,
    }
    if part == "other":
        return "critic" if sign * before["critic"] >= _MOSTLY * sign * spent["other"] else "other"
    longest = max(before, key=lambda name: sign * before[name])
    return longest if sign * before[longest] >= _MOSTLY * sign * spent["generation"] else "idle"


def _other_s(figures: StepFigures) -> float:
    return figures.step_s - figures.training_s - figures.weights_s - figures.waiting_s


def _elsewhere(foretold: StepFigures, measured: StepFigures) -> str:
    return (
        f"the trainer waited {_number(measured.waiting_s)} s for samples instead of {_number(foretold.waiting_s)}, and "
        f"did other things for {_number(max(0.0, _other_s(measured)))} s"
    )


def assumptions(foretold: Foretold, measured: StepFigures) -> Iterator[Assumption]:
    """Yield the assumptions of a plan, and how wrong each was."""
    plan = foretold.figures
    yield from _of_work(foretold, plan, measured)
    yield from _of_times(foretold, plan, measured)


def _of_work(foretold: Foretold, plan: StepFigures, run: StepFigures) -> Iterator[Assumption]:
    samples = _log(run.samples, plan.samples)
    lengths = _log(run.response_tokens, plan.response_tokens)
    longest = _log(run.longest_tokens, plan.longest_tokens) - lengths
    prompts = _log(run.trained_tokens, plan.trained_tokens) - samples - lengths
    each: Sequence[Part] = ("training", "generation", "reference", "critic", "reward")
    for part in each:
        yield _work(part, samples, f"a step had {_pair(run.samples, plan.samples)} responses")
    each = ("training", "generation", "reference", "critic", "idle")
    for part in each:
        size = "longer" if lengths > 0 else "shorter"
        text = f"responses were {size}, {_pair(run.response_tokens, plan.response_tokens)} tokens in the mean"
        yield _work(part, lengths, text)
    yield _work("training", prompts, f"prompts had {_pair(run.prompt_tokens, plan.prompt_tokens)} tokens")
    each = ("generation", "idle")
    for part in each:
        text = f"the longest response of a step had {_pair(run.longest_tokens, plan.longest_tokens)} tokens"
        yield _work(part, longest, text)
        text = f"{_pair(run.engines, plan.engines)} engines generated"
        yield _work(part, -_log(run.engines, plan.engines), text)
    less = _log(foretold.decode_s(run), foretold.decode_s(plan)) - _log(run.batch, plan.batch)
    text = f"an engine had {_pair(run.batch, plan.batch)} responses at a time"
    yield Assumption("generation", "work", less, text, is_last=True)


def _of_times(foretold: Foretold, plan: StepFigures, run: StepFigures) -> Iterator[Assumption]:
    expected = foretold.token_s(run)
    text = f"a decode step of {_number(run.batch)} responses took {_pair(1e3 * run.token_s, 1e3 * expected)} ms"
    yield _time("generation", _log(run.token_s, expected), text)
    token, planned = run.trained_token_s, plan.trained_token_s
    text = f"training took {_pair(1e6 * token, 1e6 * planned)} µs a token"
    yield _time("training", _log(token, planned), text)
    more = _log(plan.training_s + run.optimizer_s - plan.optimizer_s, plan.training_s)
    yield _time("training", more, f"the optimizer took {_pair(run.optimizer_s, plan.optimizer_s)} s a step")
    later = _log(plan.step_s + run.arrival_s - plan.arrival_s, plan.step_s)
    text = f"an engine had new weights {_pair(run.arrival_s, plan.arrival_s)} s after an update"
    yield _time("idle", later, text)
    text = f"weights took {_pair(run.weights_s, plan.weights_s)} s a step"
    yield _time("weights", _log(run.weights_s, plan.weights_s), text)
    text = f"a grading took {_pair(1e3 * run.grading_s, 1e3 * plan.grading_s)} ms"
    yield _time("reward", _log(run.grading_s, plan.grading_s), text)
    scored, foreseen = run.reference_s / run.trained_tokens, plan.reference_s / plan.trained_tokens
    text = f"the reference took {_pair(1e6 * scored, 1e6 * foreseen)} µs a token"
    yield _time("reference", _log(scored, foreseen), text)
    scored, foreseen = run.critic_s / run.trained_tokens, plan.critic_s / plan.trained_tokens
    text = f"the critic took {_pair(1e6 * scored, 1e6 * foreseen)} µs a token"
    yield _time("critic", _log(scored, foreseen), text)


def _work(part: Part, effect: float, text: str) -> Assumption:
    return Assumption(part, "work", effect, text)


def _time(part: Part, effect: float, text: str) -> Assumption:
    return Assumption(part, "times", effect, text)


def _log(measured: float, foretold: float) -> float:
    """The logarithm of a ratio, within `_MOST`: what was to take nothing may take something."""
    if measured <= 0 or foretold <= 0:
        return _MOST * ((measured > 0) - (foretold > 0))
    return max(-_MOST, min(_MOST, math.log(measured / foretold)))


def _pair(measured: float, foretold: float) -> str:
    return f"{_number(measured)} instead of {_number(foretold)}"


def _number(value: float) -> str:
    """Three digits."""
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

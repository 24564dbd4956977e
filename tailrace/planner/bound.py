"""Seconds of a training step by arithmetic alone: what the best engines and the best trainer could do.

    mode                          a step takes
    whole batches, staleness 0    the critical path through the algorithm's tasks; colocated, all of them in turn
    streaming, staleness 0        the slower of generation and training, a claim of the other, and the weights; several
                                  updates come after the last response
    staleness 1 or more           the slowest pool: they work at the same time

With staleness, a response may take several steps: from the weights that begin it to those that it makes. Responses are
spread evenly here, and nothing waits for a place; the simulation of a candidate knows better.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tailrace.planner.load import Load
from tailrace.planner.modes import Mode
from tailrace.planner.problem import Table
from tailrace.planning.critical_path import critical_path
from tailrace.planning.step_times.base import MixedStepTimes
from tailrace.planning.step_times.basis import Basis

_PARTS = 12
"""Lengths that stand for all of them while a batch drains."""
_ROUNDS = 6
"""Steps of the search for the seconds at which the longest response takes as long as a step lets it."""
_SHARPNESS = 4.0
"""The exponent of the norm that joins what is done at the same time; with infinity, the longest counts alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of a step, and of its parts."""

    seconds: float
    generation_s: float
    longest_s: float
    """With staleness: of the longest response, and of what comes before and after it, divided by the steps that it may
    take. Else it is in `generation_s`."""
    training_s: float
    reference_s: float
    critic_s: float
    """Of the critic: of its values and of its updates."""
    grading_s: float
    weights_s: float

    @property
    def binds(self) -> str:
        """What takes the longest."""
        parts = {
            "generation": self.generation_s,
            "the longest response": self.longest_s,
            "training": self.training_s,
            "the reference": self.reference_s,
            "the critic": self.critic_s,
            "graders": self.grading_s,
            "weights": self.weights_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Replicas that never pause. Their decode steps take `first_s + more_s · batch`, about."""

    first_s: float
    more_s: float
    most: float
    """The largest batch."""
    tokens: float
    """Tokens of a step's responses on a replica."""
    read_s: float
    longest: float
    tools_s: float

    @property
    def generation_s(self) -> float:
        """Seconds of a training step's responses in the largest batches."""
        return self.tokens / self.most * self._decode_s(self.most) + self.read_s

    def longest_s(self, step_s: float) -> float:
        """Seconds of the longest response, where a training step takes `step_s`.

        Little's law says how many are there at a time: those that begin in a second, times the seconds of each.
        """
        rest = step_s - self.tokens * self.more_s
        batch = min(self.most, self.tokens * self.first_s / rest) if rest > 0 else self.most
        return self.longest * self._decode_s(max(1.0, batch)) + self.tools_s

    def slower(self, factor: float) -> "Flow":
        """The same with steps that take `factor` times as long. Tools take as long as before."""
        return replace(self, first_s=factor * self.first_s, more_s=factor * self.more_s, read_s=factor * self.read_s)

    def _decode_s(self, batch: float) -> float:
        return self.first_s + self.more_s * batch


class Generation:
    """Seconds of a step's generation by replicas of one kind."""

    def __init__(self, times: MixedStepTimes, load: Load, *, tp: int, slots: int, cache_tokens: float) -> None:
        """`slots`, `cache_tokens`: of a replica."""
        self._times, self._load, self._tp = times, load, tp
        self._most = max(1.0, min(slots, cache_tokens / (load.prompt + load.mean)))
        self._read_s = load.read * times.prefill_s(tp, 1, _PREFILL) / _PREFILL

    @property
    def tokens_per_s(self) -> float:
        """Tokens that a replica generates in a second, in its largest batch."""
        return self._most / max(_LEAST_S, self._decode_s(self._most, self._load.context))

    def together_s(self, replicas: float) -> float:
        """Seconds until all responses of a step have ended, where none of another step is there."""
        load = self._load
        each = load.attempts * load.samples / replicas
        batch = max(1.0, min(each, self._most))
        full = max(0.0, each - batch) * load.mean / batch
        seconds = full * self._decode_s(batch, load.context) if full else 0.0
        before = 0.0
        for part, length in enumerate([*load.quantiles(_PARTS), load.longest]):
            alive = max(1.0, batch * (1 - part / _PARTS))
            seconds += max(0.0, length - before) * self._decode_s(alive, load.prompt + (before + length) / 2)
            before = max(before, length)
        seconds = max(seconds, load.chain * self._decode_s(float(load.group_size), load.context))
        return seconds + self._read_s / replicas + load.tools_s

    def flow(self, replicas: float, ahead: int) -> Flow:
        """The same where the responses of `ahead` further steps are there, too."""
        load = self._load
        each = load.attempts * load.samples / replicas
        most = max(1.0, min(each * (1 + ahead), self._most))
        one, all_ = self._decode_s(1.0, load.context), self._decode_s(most, load.context)
        more_s = (all_ - one) / (most - 1) if most > 1 else 0.0
        return Flow(
            first_s=one - more_s,
            more_s=more_s,
            most=most,
            tokens=each * load.mean,
            read_s=self._read_s / replicas,
            longest=max(load.longest, load.chain),
            tools_s=load.tools_s,
        )

    def _decode_s(self, batch: float, context: float) -> float:
        return self._times.step_s(self._tp, batch, batch * context, 1)


_PREFILL = 4096
"""Tokens of a step that computes prompts alone, of which the seconds of a token are taken."""
_LEAST_S = 1e-9
"""Seconds of a decode step at least: engines without a model take none."""


def together(each: Sequence[tuple[Generation, int]], ahead: int) -> Flow | float:
    """Return a step's generation by replicas of several kinds, whose parts of it are as their speeds.

    The kind that takes the longest counts.

    Args:
        each: the kinds, and the replicas of each.
        ahead: further steps whose responses are there, too; see `Parts`.
    """
    speed = sum(count * kind.tokens_per_s for kind, count in each)
    alike = [(kind, speed / kind.tokens_per_s) for kind, _ in each]  # so many of one kind are as fast as all
    found = [kind.flow(count, ahead) if ahead else kind.together_s(count) for kind, count in alike]
    return max(found, key=lambda one: one.generation_s if isinstance(one, Flow) else one)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds of the work of a step."""

    generation: Flow | float
    """Of generation: the seconds of a step whose responses begin together, or a flow."""
    training_s: float
    updates_s: float = 0.0
    """What of the training begins only when all samples are there: several updates."""
    claims: float
    """Claims in which a streaming trainer takes a step."""
    optimizer_s: float
    reference_s: float
    values_s: float = 0.0
    """Of the values that a critic gives."""
    critic_s: float = 0.0
    """Of the updates of a critic, with its optimizer."""
    grading_s: float
    """Of all gradings, by all graders."""
    grade_s: float
    """Of the grading of a response."""
    publish_s: float
    arrive_s: float
    install_s: float

    def slower(self, *, engines: float, trainer: float, weights: float) -> "Parts":
        """The same with work that takes so many times as long. Graders take as long as before."""
        generation = self.generation
        return replace(
            self,
            generation=generation.slower(engines) if isinstance(generation, Flow) else engines * generation,
            training_s=trainer * self.training_s,
            updates_s=trainer * self.updates_s,
            optimizer_s=trainer * self.optimizer_s,
            reference_s=trainer * self.reference_s,
            values_s=trainer * self.values_s,
            critic_s=trainer * self.critic_s,
            publish_s=weights * self.publish_s,
            arrive_s=weights * self.arrive_s,
            install_s=weights * self.install_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bases:
    """What the times of each part rest on."""

    engines: Basis
    trainer: Basis
    """A reference's and a critic's, too."""
    weights: Basis

    def spread(self, mode: Mode, table: Table, parts: Parts) -> tuple[float, float]:
        """By how many times a step may be shorter and longer, where all parts err the same way, each by its own error.

        What the step does not wait for does not count.
        """

        def seconds(sign: int) -> float:
            factors = {name: (1 + getattr(self, name).error) ** sign for name in ("engines", "trainer", "weights")}
            return bound(mode, table, parts.slower(**factors)).seconds

        expected = bound(mode, table, parts).seconds
        # where a part takes longer, fewer responses are there at a time, and the longest one may end sooner
        return min(1.0, seconds(-1) / expected), max(1.0, seconds(1) / expected)


def bound(mode: Mode, table: Table, parts: Parts) -> Bound:
    """Return the seconds of a step in a mode."""
    streams = mode.streaming and not table.whole_steps  # else training waits for the last response of its step
    if isinstance(parts.generation, Flow):
        return _asynchronous(mode, parts, parts.generation, streams=streams)
    generation = parts.generation
    weights = parts.publish_s + parts.arrive_s + parts.install_s
    if mode.colocated:
        works = (generation, parts.grade_s, parts.reference_s, parts.training_s, parts.optimizer_s, weights)
        seconds = sum(works) + parts.values_s + parts.critic_s
    elif streams:
        begun_s = parts.training_s - parts.updates_s
        critic_s = 0.0 if parts.updates_s else parts.critic_s
        claims = _together(
            generation + begun_s / parts.claims,
            generation / parts.claims + begun_s,
            parts.reference_s,
            parts.values_s + critic_s,
            parts.grading_s,
        )
        updates_s = max(parts.updates_s, parts.critic_s - critic_s)
        seconds = claims + updates_s + parts.grade_s + parts.optimizer_s + weights
    else:
        seconds = critical_path(table.graph, _costs(table, parts, generation, weights))[1]
    return _bound(parts, seconds=seconds, generation_s=generation, longest_s=0.0, weights_s=weights)


def _asynchronous(mode: Mode, parts: Parts, flow: Flow, *, streams: bool) -> Bound:
    """The step of pools that work at the same time. How long a response takes depends on how many are there.

    `streams`: whether training begins before the last response of its step.
    """
    weights = parts.publish_s + parts.install_s
    claim_s = parts.updates_s + (parts.training_s - parts.updates_s) / (parts.claims if streams else 1.0)
    tail_s = parts.grade_s + claim_s + parts.optimizer_s + weights + parts.arrive_s
    others = (
        flow.generation_s + parts.install_s,
        parts.training_s + parts.optimizer_s + parts.publish_s,
        parts.reference_s,
        parts.values_s + parts.critic_s,
        parts.grading_s,
    )
    seconds, longest = max(others), 0.0
    for _ in range(_ROUNDS):
        longest = (flow.longest_s(seconds) + tail_s) / (1 + mode.max_staleness)
        seconds = max(*others, (seconds + longest) / 2)
    seconds = _together(*others, longest)
    return _bound(parts, seconds=seconds, generation_s=flow.generation_s, longest_s=longest, weights_s=weights)


def _bound(parts: Parts, *, seconds: float, generation_s: float, longest_s: float, weights_s: float) -> Bound:
    return Bound(
        seconds=seconds,
        generation_s=generation_s,
        longest_s=longest_s,
        training_s=parts.training_s + parts.optimizer_s,
        reference_s=parts.reference_s,
        critic_s=parts.values_s + parts.critic_s,
        grading_s=parts.grading_s,
        weights_s=weights_s,
    )


def _together(*seconds: float) -> float:
    """Seconds of what is done at the same time: the longest; where others take about as long, they wait for each other
    now and then."""
    longest = max(seconds)
    parts = math.fsum((each / longest) ** _SHARPNESS for each in seconds)
    return float(longest * parts ** (1 / _SHARPNESS))


def _costs(table: Table, parts: Parts, generation_s: float, weights_s: float) -> Mapping[str, float]:
    """What each task costs on the path of a whole batch. A grading waits for the last response alone."""
    return table.costs(
        rollout=generation_s,
        reward=parts.grade_s,
        reference=parts.reference_s,
        actor=parts.training_s + parts.optimizer_s + weights_s,
        values=parts.values_s,
        critic=parts.critic_s,
    )

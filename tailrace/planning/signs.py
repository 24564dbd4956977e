"""Signs that a run learns nothing, from the figures of its steps: the problem, its size, and the usual remedies.

Each sign has a bound on the mean of several steps, which chance alone does not reach. It is reported when it begins,
and again only after it was over. A run that merely begins badly (three quarters of its groups flat, a third of its
responses cut) gives none.
"""

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

WINDOW = 5
"""The number of steps that are averaged, and of steps at the start that later ones are compared with."""
MIN_GROUPS = 16
"""The number of groups in those steps; where steps have fewer, more steps are averaged."""
FLAT = 0.95
"""Share of the groups that have equal rewards."""
TRUNCATED = 0.5
"""Share of the responses that reach their limit."""
FAILED = 0.5
"""Share of the gradings that fail."""
LENGTH_FACTOR = 4.0
"""Factor by which the mean length has changed, while the reward is no higher than at the start."""
ENTROPY_FACTOR = 10.0
"""Factor by which the entropy has fallen, while three quarters of the groups are flat."""
FLAT_WITH_LOW_ENTROPY = 0.75

Kind = Literal["flat_groups", "truncated", "reward_failures", "length_explosion", "length_collapse", "entropy_collapse"]
"""The kind of a sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The figures of one step that signs are made from."""

    groups: int
    flat_groups: float
    samples: int
    failures: float
    truncated: float
    """Fraction of the responses that were cut at their limit."""
    tokens: float
    """Mean tokens of a response."""
    reward: float | None
    """Mean reward; None where no grading succeeded."""
    entropy: float | None
    """Entropy of sampling, nats a token; None where unknown."""

    @classmethod
    def of(cls, metrics: Mapping[str, float], *, groups: int, samples: int) -> Self:
        """Take the figures from the metrics of a `step` event."""
        return cls(
            groups=groups,
            flat_groups=metrics.get("flat_groups", 0.0),
            samples=samples,
            failures=metrics.get("reward_failures", 0.0),
            truncated=metrics.get("truncated_fraction", 0.0),
            tokens=metrics.get("response_tokens_mean", 0.0),
            reward=metrics.get("reward"),
            entropy=metrics.get("sampling_entropy"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign that something is wrong."""

    kind: Kind
    value: float
    """The figure that has passed its bound."""
    text: str
    """A sentence with the figure and the usual remedies."""


class Signs:
    """Finds signs from the steps of a run, one by one."""

    def __init__(self) -> None:
        self._steps = 0
        self._first: list[StepFigures] = []
        self._lately: deque[StepFigures] = deque()
        self._seen: dict[Kind, int] = {}
        """The step at which each sign was last seen."""

    def add(self, step: StepFigures) -> list[Sign]:
        """Take a step; return the signs that begin with it. A sign is over when it was not seen for `WINDOW` steps."""
        self._steps += 1
        if len(self._first) < WINDOW:
            self._first.append(step)
        self._lately.append(step)
        while len(self._lately) > WINDOW and _groups(self._lately) - self._lately[0].groups >= MIN_GROUPS:
            self._lately.popleft()
        signs = list(self._signs())
        begun = [sign for sign in signs if self._steps - self._seen.get(sign.kind, -WINDOW) > WINDOW]
        self._seen |= {sign.kind: self._steps for sign in signs}
        return begun

    def _signs(self) -> Iterator[Sign]:
        lately, groups = self._lately, _groups(self._lately)
        if len(lately) < WINDOW or groups < MIN_GROUPS:
            return
        flat = sum(step.flat_groups for step in lately) / groups
        found = [_flat(lately, flat), _truncated(lately), _failed(lately)]
        if self._steps - len(lately) >= WINDOW:
            found += [_length(self._first, lately), _entropy(self._first, lately, flat)]
        yield from (sign for sign in found if sign is not None)


def _flat(lately: Collection[StepFigures], flat: float) -> Sign | None:
    if flat < FLAT:
        return None
    mean = _mean(step.reward for step in lately)
    text = (
        f"{flat:.0%} of the groups of the last {len(lately)} steps teach nothing: their rewards are equal"
        f"{'' if mean is None else f', {mean:.3g} in the mean'}. Usual remedies: look at the responses (tailrace "
        "samples) and at the grader; easier prompts where all are wrong, harder ones where all are right; a larger "
        "algorithm.group_size; a sampling.temperature nearer to 1"
    )
    return Sign(kind="flat_groups", value=flat, text=text)


def _truncated(lately: Collection[StepFigures]) -> Sign | None:
    truncated = statistics.fmean(step.truncated for step in lately)
    if truncated < TRUNCATED:
        return None
    text = (
        f"{truncated:.0%} of the responses of the last {len(lately)} steps were cut at their limit, maybe before their "
        "answer. Usual remedies: a larger sampling.max_new_tokens; a prompt, or a sampling.stop, that ends them sooner"
    )
    return Sign(kind="truncated", value=truncated, text=text)


def _failed(lately: Collection[StepFigures]) -> Sign | None:
    failed = sum(step.failures for step in lately) / sum(step.samples for step in lately)
    if failed < FAILED:
        return None
    text = (
        f"{failed:.0%} of the gradings of the last {len(lately)} steps failed. Usual remedies: mend the grader, whose "
        "errors stand with the samples (tailrace samples --worst); a longer rewards.timeout_s, where they are timeouts"
    )
    return Sign(kind="reward_failures", value=failed, text=text)


def _length(first: Collection[StepFigures], lately: Collection[StepFigures]) -> Sign | None:
    before, now = (statistics.fmean(step.tokens for step in steps) for steps in (first, lately))
    reward, reward_now = (_mean(step.reward for step in steps) for steps in (first, lately))
    rises = reward is not None and reward_now is not None and reward_now > reward
    if rises or before <= 0 or before / LENGTH_FACTOR < now < before * LENGTH_FACTOR:
        return None
    kind: Kind = "length_explosion" if now > before else "length_collapse"
    rewarded = "length" if now > before else "short or empty answers"
    text = (
        f"the responses of the last {len(lately)} steps have {now:.0f} tokens in the mean, those of the first "
        f"{len(first)} had {before:.0f}, and the reward is no higher. Usual remedies: a lower trainer.lr; a KL penalty "
        f"(algorithm.kl.coefficient); see whether the grader rewards {rewarded}"
    )
    return Sign(kind=kind, value=now / before, text=text)


def _entropy(first: Collection[StepFigures], lately: Collection[StepFigures], flat: float) -> Sign | None:
    before, now = (_mean(step.entropy for step in steps) for steps in (first, lately))
    if before is None or now is None or flat < FLAT_WITH_LOW_ENTROPY or now * ENTROPY_FACTOR > before:
        return None
    text = (
        f"responses hardly differ any more: sampling had an entropy of {now:.3g} nats a token in the last "
        f"{len(lately)} steps, after {before:.3g} in the first {len(first)}, and {flat:.0%} of the groups have equal "
        "rewards. Usual remedies: a lower trainer.lr; a higher algorithm.clip_high; an algorithm.kl.coefficient"
    )
    return Sign(kind="entropy_collapse", value=now, text=text)


def _groups(steps: Iterable[StepFigures]) -> int:
    return sum(step.groups for step in steps)


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None where there are none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None

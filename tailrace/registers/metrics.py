"""The metrics of events: each with its name, unit, meaning, direction, and the places that show it.

Their order is the order in which they are shown. A metric that is not listed is shown all the same, by its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from itertools import chain
from typing import Literal

from tailrace.registers.events import EventKind
from tailrace.registers.phases import PARTS, PHASES, PURPOSES
from tailrace.registers.queue import QUEUE_COUNTS, TASK_COUNTS

Group = Literal["From its samples", "Of its update", "Speed"]
"""The origin of the metrics of a `step`."""
Chart = Literal["Learning", "Speed", "Staleness", "Optimization", "Reward failures", "Further metrics"]
"""The sections of the report that have charts of metrics."""


class Shown(Flag):
    """Places that show a metric beside the report's charts. TensorBoard, W&B and Prometheus have all metrics of a
    step."""

    NOWHERE = 0
    TABLE = auto()
    """The table of the live display."""
    LINE = auto()
    """The line of a step where there is no terminal."""
    HELD_OUT = auto()
    """Beside the value before training, where an evaluation has the metric: in the display and as a card of the
    report."""
    WARNING = auto()
    """In display, log and report, where the metric is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric, or all metrics whose names differ in the part `<...>` alone."""

    name: str
    of: tuple[EventKind, ...] = (EventKind.STEP,)
    """The kinds of events that have it."""
    group: Group | None = None
    """The part of the `step` section in `docs/metrics.md`, for a metric of steps."""
    title: str = ""
    """The title that people read; empty for the name in words."""
    unit: str = ""
    meaning: str
    """The meaning for `docs/metrics.md`, in Markdown."""
    is_fraction: bool = False
    """Whether it is a fraction of 1, which is written in percent."""
    better: Literal["higher", "lower"] | None = None
    """The desired direction; None where neither is better."""
    shown: Shown = Shown.NOWHERE
    chart: Chart = "Further metrics"
    """The section of the report whose charts show it."""
    is_scheduled: bool = False
    """Whether a schedule sets it, so that it has no noise to average out."""
    zero_says_nothing: bool = False
    """Whether it is left out where it has always been 0."""

    @property
    def is_family(self) -> bool:
        """Whether it stands for several metrics."""
        return "<" in self.name

    @property
    def prefix(self) -> str:
        """The part of the name before `<...>`."""
        return self.name.partition("<")[0]

    def is_better(self, change: float) -> bool:
        """Return whether `change` is for the better."""
        return change > 0 if self.better == "higher" else self.better == "lower" and change < 0

    @property
    def words(self) -> str:
        """The title, or the name in words."""
        return self.title or self.name.replace("_", " ").capitalize()

    @property
    def full_title(self) -> str:
        """The title with the unit."""
        return f"{self.words} ({self.unit})" if self.unit else self.words


_LEARNED = (EventKind.STEP, EventKind.EVALUATION)
_SAMPLES: Group = "From its samples"
_UPDATE: Group = "Of its update"
_SPEED: Group = "Speed"
_FIGURE = Shown.TABLE | Shown.LINE

TIME = Metric(
    name="time/<task>",
    group=_SPEED,
    unit="s",
    meaning="that a task took since the step before; tasks overlap, so they may exceed the step",
    chart="Speed",
)
SHARE = Metric(
    name="share/<worker>/<phase>",
    group=_SPEED,
    meaning=(
        "part of a worker's time since the step before, by what the worker has told by then; see `breakdown`. The "
        "shares of a worker add up to 1, and those that are 0 are left out"
    ),
    is_fraction=True,
    chart="Speed",
)
MEMORY = Metric(
    name="memory/<worker>",
    group=_SPEED,
    unit="bytes",
    meaning="the greatest `peak` of a worker's `memory` since the step before",
    chart="Speed",
)
STALENESS = Metric(
    name="staleness/<versions>", group=_SAMPLES, unit="samples", meaning="how many were that stale", chart="Staleness"
)
SPENT = Metric(
    name="spent/<what>",
    of=(*_LEARNED, EventKind.REWARD),
    group=_SAMPLES,
    meaning=(
        "sum over all gradings since the step before, or of the evaluation, failed ones included: `requests`, "
        "`prompt_tokens`, `completion_tokens` and `cost` of a judge; with several rewards the name of the reward "
        "stands before it, as in `spent/judge.cost`"
    ),
    better="lower",
)

METRICS = (
    Metric(
        name="reward",
        of=_LEARNED,
        group=_SAMPLES,
        title="Reward",
        meaning="mean of the samples that were graded",
        better="higher",
        shown=_FIGURE | Shown.HELD_OUT,
        chart="Learning",
    ),
    Metric(
        name="reward_std",
        of=_LEARNED,
        group=_SAMPLES,
        title="Reward deviation",
        meaning="standard deviation of the same",
    ),
    Metric(
        name="accuracy",
        of=_LEARNED,
        group=_SAMPLES,
        title="Accuracy",
        meaning="responses that are right, of those whose grader says so; absent where none does",
        is_fraction=True,
        better="higher",
        shown=_FIGURE | Shown.HELD_OUT,
        chart="Learning",
    ),
    Metric(
        name="reward/<part>",
        of=_LEARNED,
        group=_SAMPLES,
        meaning=(
            "mean of a figure that the grader gave beside the reward, over the samples that have it. With several "
            "rewards `<name>` is that of a reward, without its weight, and `<name>.<part>` a figure of its grader"
        ),
    ),
    Metric(
        name="reward_failures",
        of=_LEARNED,
        group=_SAMPLES,
        title="Reward failures",
        unit="samples",
        meaning="samples with a grading that failed",
        better="lower",
        shown=Shown.WARNING,
        chart="Reward failures",
    ),
    Metric(
        name="reward_failures/<kind>",
        of=_LEARNED,
        group=_SAMPLES,
        unit="samples",
        meaning=(
            "failed gradings by kind: `timeout`, `died`, or the name of the grader's exception; with several rewards "
            "the name of the reward stands before it, as in `judge.timeout`"
        ),
        better="lower",
    ),
    SPENT,
    Metric(
        name="flat_groups",
        group=_SAMPLES,
        title="Groups without signal",
        unit="groups",
        meaning="groups whose graded rewards are all equal: their advantages are 0",
        better="lower",
    ),
    Metric(
        name="remade_groups",
        group=_SAMPLES,
        title="Groups remade",
        unit="groups",
        meaning=(
            "groups without signal that were thrown away since the step before, and whose places other prompts got; "
            "with `algorithm.dynamic_sampling` only"
        ),
        chart="Learning",
    ),
    Metric(
        name="response_tokens",
        of=(EventKind.EVALUATION,),
        title="Response length",
        unit="tokens",
        meaning="mean length",
    ),
    Metric(
        name="pass@<k>",
        of=(EventKind.EVALUATION,),
        meaning=(
            "chance that one of k answers to a prompt is right, for k = 2, 4, 8, … and the most there are "
            "([Chen et al. 2021](https://arxiv.org/abs/2107.03374), equation 1)"
        ),
        is_fraction=True,
        better="higher",
    ),
    Metric(
        name="maj@<k>",
        of=(EventKind.EVALUATION,),
        meaning=(
            "chance that the answer that most of k responses to a prompt give is right, for the same k, but at most 64 "
            "or the most there are; ties are decided by lot ([Wang et al. 2022](https://arxiv.org/abs/2203.11171)). "
            "Absent where the grader does not say what responses answer"
        ),
        is_fraction=True,
        better="higher",
    ),
    Metric(
        name="response_tokens_mean",
        group=_SAMPLES,
        title="Mean response",
        unit="tokens",
        meaning="mean length of a response, the end-of-sequence token included",
        shown=_FIGURE,
    ),
    Metric(
        name="response_tokens_max",
        group=_SAMPLES,
        title="Longest response",
        unit="tokens",
        meaning="the longest",
        shown=Shown.TABLE,
    ),
    Metric(
        name="truncated_fraction",
        group=_SAMPLES,
        title="Truncated responses",
        meaning="responses that reached `sampling.max_new_tokens` or the end of the context",
        is_fraction=True,
        better="lower",
    ),
    Metric(
        name="sampling_entropy",
        group=_SAMPLES,
        title="Entropy of sampling",
        unit="nats",
        meaning=(
            "mean of −`rollout_log_probs` over the tokens: an unbiased estimate of the entropy of what was sampled "
            "from, at its temperature"
        ),
    ),
    Metric(
        name="loss",
        of=(EventKind.STEP, EventKind.OPTIMIZER),
        group=_UPDATE,
        title="Loss",
        meaning="what the gradient is of: the policy loss with its correction, and the KL penalty",
        shown=_FIGURE,
        chart="Optimization",
    ),
    Metric(
        name="policy_loss",
        group=_UPDATE,
        meaning="mean of the clipped surrogate alone ([PPO](https://arxiv.org/abs/1707.06347), equation 7)",
    ),
    Metric(
        name="grad_norm",
        of=(EventKind.STEP, EventKind.OPTIMIZER),
        group=_UPDATE,
        title="Gradient norm",
        meaning="before it is scaled down to `trainer.max_grad_norm`",
        shown=_FIGURE,
        chart="Optimization",
    ),
    Metric(
        name="lr",
        of=(EventKind.STEP, EventKind.OPTIMIZER),
        group=_UPDATE,
        title="Learning rate",
        meaning="of the optimizer step",
        shown=Shown.TABLE,
        chart="Optimization",
        is_scheduled=True,
    ),
    Metric(
        name="ratio",
        group=_UPDATE,
        meaning="mean probability ratio of the current weights and those at the start of the step",
    ),
    Metric(
        name="ratio_overflow",
        group=_UPDATE,
        title="Tokens beyond e^20",
        meaning="tokens whose ratio is beyond e^±20, and is bounded there; only where there is one",
        is_fraction=True,
        shown=Shown.WARNING,
    ),
    Metric(
        name="clip_fraction_low",
        group=_UPDATE,
        title="Tokens clipped low",
        meaning="tokens whose ratio is clipped below 1 − `algorithm.clip_low`",
        is_fraction=True,
        chart="Optimization",
    ),
    Metric(
        name="clip_fraction_high",
        group=_UPDATE,
        title="Tokens clipped high",
        meaning="tokens whose ratio is clipped above 1 + `algorithm.clip_high`",
        is_fraction=True,
        chart="Optimization",
    ),
    Metric(
        name="approx_kl",
        group=_UPDATE,
        title="KL from the start of the step",
        unit="nats",
        meaning=(
            "estimate k3 of the divergence of the current weights from those at the start of the step; 0 with one "
            "optimizer step ([Schulman](http://joschu.net/blog/kl-approx.html))"
        ),
        chart="Optimization",
    ),
    Metric(
        name="ref_kl",
        group=_UPDATE,
        title="KL from the reference",
        unit="nats",
        meaning="estimate `algorithm.kl.estimator` of the divergence from the initial weights; with a KL penalty only",
        shown=Shown.LINE,
        chart="Optimization",
    ),
    Metric(
        name="kl_coefficient",
        group=_UPDATE,
        title="KL coefficient",
        meaning="weight of the KL penalty, where `algorithm.kl.adaptive` changes it",
        chart="Optimization",
    ),
    Metric(
        name="critic/explained_variance",
        group=_UPDATE,
        title="Explained variance of the critic",
        meaning=(
            "1 − Var(return − value) / Var(return) over the tokens: 1 where the critic knows the returns, 0 where it "
            "knows no more than their mean"
        ),
        better="higher",
        chart="Optimization",
    ),
    Metric(
        name="critic/value_loss",
        group=_UPDATE,
        title="Loss of the critic",
        meaning="mean of its clipped squared error alone ([PPO](https://arxiv.org/abs/1707.06347), equation 9)",
        better="lower",
        chart="Optimization",
    ),
    Metric(
        name="critic/<figure>",
        group=_UPDATE,
        meaning=(
            "the other figures of its event `optimizer`, each the mean over its optimizer steps; so for any model that "
            "is trained beside the policy, under the name of its row"
        ),
    ),
    Metric(
        name="rollout_mismatch",
        group=_UPDATE,
        title="Rollout mismatch",
        unit="nats",
        meaning=(
            "mean distance of the trainer's log-probabilities at the start of the step from the engine's; rounding "
            "alone where nothing is stale"
        ),
        better="lower",
        chart="Optimization",
    ),
    Metric(
        name="on_policy_mismatch",
        group=_UPDATE,
        title="On-policy mismatch",
        unit="nats",
        meaning=(
            "the same over the responses of the weights of the step alone, all of their tokens; absent where there "
            "are none"
        ),
        better="lower",
        chart="Optimization",
    ),
    Metric(
        name="on_policy",
        group=_UPDATE,
        title="On-policy tokens",
        meaning="their part of the tokens, before any is rejected",
        is_fraction=True,
    ),
    *(
        Metric(
            name=f"{of}_{name}", group=_UPDATE, title=title, unit=unit, meaning=f"{meaning}, {tokens}", better="lower"
        )
        for of, tokens in (
            ("rollout", "over all tokens"),
            ("on_policy", "over the responses of the weights of the step alone"),
        )
        for name, title, unit, meaning in (
            (
                "kl",
                f"KL of {of.replace('_', ' ')}",
                "nats",
                "estimate k3 of the divergence of the engine's distribution from that of the start of the step",
            ),
            (
                "probs_diff_mean",
                "",
                "",
                "mean distance of the engine's probability of a token from that of the start of the step",
            ),
            ("probs_diff_std", "", "", "standard deviation of the same"),
            ("probs_diff_max", "", "", "the greatest"),
        )
    ),
    Metric(
        name="rollout_overflow",
        group=_UPDATE,
        title="Sampled tokens beyond e^20",
        meaning=(
            "tokens whose ratio of the two probabilities is beyond e^±20, and is bounded there; only where there is one"
        ),
        is_fraction=True,
        shown=Shown.WARNING,
    ),
    Metric(
        name="effective_sample_size",
        group=_UPDATE,
        title="Effective sample size",
        meaning=(
            "(mean of w)² / mean of w² over the tokens, with w the factor of `algorithm.rollout_correction`, or "
            "without one the ratio of the two probabilities; 1 where all weigh the same"
        ),
        is_fraction=True,
        better="higher",
    ),
    Metric(
        name="correction_weight",
        group=_UPDATE,
        title="Rollout correction",
        meaning="mean factor of `algorithm.rollout_correction`",
        chart="Optimization",
    ),
    Metric(
        name="correction_truncated",
        group=_UPDATE,
        title="Truncated corrections",
        meaning="tokens whose factor its limit has replaced ([IMPALA](https://arxiv.org/abs/1802.01561), section 4.1)",
        is_fraction=True,
        better="lower",
        chart="Optimization",
    ),
    Metric(
        name="correction_masked",
        group=_UPDATE,
        title="Masked corrections",
        meaning="tokens whose factor is 0, since their ratio is out of bounds; with `type: masked`",
        is_fraction=True,
        better="lower",
        chart="Optimization",
    ),
    Metric(
        name="rejected_tokens",
        group=_UPDATE,
        title="Rejected tokens",
        meaning="tokens that were not trained on because of `algorithm.rollout_rejection`, of all",
        is_fraction=True,
        better="lower",
        chart="Optimization",
    ),
    Metric(
        name="rejected_samples",
        group=_UPDATE,
        title="Rejected responses",
        meaning="responses of which no token was trained on for that reason, of all",
        is_fraction=True,
        better="lower",
        chart="Optimization",
    ),
    Metric(name="tokens", group=_UPDATE, meaning="tokens that an optimizer step trained on"),
    Metric(
        name="skipped_updates",
        group=_UPDATE,
        title="Skipped updates",
        unit="updates",
        meaning=(
            "optimizer steps that were left out: nothing to train on, because of failed gradings or of "
            "`algorithm.rollout_rejection`, or a loss or a gradient that is not finite"
        ),
        better="lower",
        shown=Shown.WARNING,
    ),
    Metric(
        name="samples_per_s",
        group=_SPEED,
        title="Samples per second",
        meaning="of the whole step, waiting included",
        better="higher",
        shown=_FIGURE,
        chart="Speed",
    ),
    Metric(
        name="tokens_per_s",
        group=_SPEED,
        title="Tokens per second",
        meaning="response tokens, likewise",
        better="higher",
        shown=Shown.TABLE,
        chart="Speed",
    ),
    TIME,
    SHARE,
    MEMORY,
    Metric(
        name="staleness_mean",
        group=_SAMPLES,
        title="Mean staleness",
        unit="versions",
        meaning="updates between the oldest weights that made a response and those that trained on it",
        better="lower",
        shown=_FIGURE,
        chart="Staleness",
        zero_says_nothing=True,
    ),
    Metric(
        name="staleness_max",
        group=_SAMPLES,
        title="Max staleness",
        unit="versions",
        meaning="the greatest",
        better="lower",
        shown=Shown.TABLE,
        chart="Staleness",
        zero_says_nothing=True,
    ),
    STALENESS,
    *(
        Metric(name=name, of=(EventKind.WARNING,), unit=unit, meaning=meaning, is_fraction=not unit)
        for name, unit, meaning in (
            ("flat_groups", "", "of the groups of the last steps"),
            ("truncated", "", "of their responses"),
            ("reward_failures", "", "of their gradings"),
            ("length_explosion", "times", "mean length, beside that of the first steps"),
            ("length_collapse", "times", "mean length, beside that of the first steps"),
            ("entropy_collapse", "nats", "`sampling_entropy` of the last steps"),
        )
    ),
    *(
        Metric(name=state, of=(EventKind.ACTIVITY,), unit="s", meaning=meaning)
        for state, meaning in (
            ("busy", "in which it works, see [observing.md](observing.md#where-the-time-of-a-worker-goes)"),
            ("weights", "in which it waits for weights"),
            ("data", "in which it waits for rows of the queue, or for tools"),
            ("idle", "in none of these states"),
        )
    ),
    *(
        Metric(name=phase, of=(EventKind.BREAKDOWN,), unit="s", meaning=f"{entry.title}: {entry.meaning}")
        for phase, entry in PHASES.items()
    ),
    *(
        Metric(name=f"{phase}/{part}", of=(EventKind.BREAKDOWN,), unit="s", meaning=entry.meaning)
        for phase, parts in PARTS.items()
        for part, entry in parts.items()
    ),
    *(
        Metric(name=name, of=(EventKind.MEMORY,), unit="bytes", meaning=meaning)
        for name, meaning in (
            *((purpose, entry.meaning) for purpose, entry in PURPOSES.items()),
            ("peak", "all of these: the device's memory, or on a CPU `resident`"),
            ("resident", "pages of the worker's processes in memory; a page that two share counts in both"),
            ("host", "the same, where a shared page is divided among all that share it (PSS); not in every event"),
        )
    ),
    *(
        Metric(name=f"{count.name}{of}", of=(EventKind.QUEUE,), unit=count.unit, meaning=count.observed)
        for counts, of in ((TASK_COUNTS, "/<task>"), (QUEUE_COUNTS, ""))
        for count in counts
        if count.observed
    ),
    *(
        Metric(name=name, of=of, unit="bytes", meaning=meaning)
        for name, of, meaning in (
            ("bytes", (EventKind.WEIGHTS_PUBLISH, EventKind.WEIGHTS_TRANSFER), "of its tensors"),
            ("network_bytes", (EventKind.WEIGHTS_TRANSFER,), "that came over the network to this worker"),
            ("broadcast_bytes", (EventKind.WEIGHTS_TRANSFER,), "that came in a broadcast"),
        )
    ),
    *(
        Metric(name=name, of=(EventKind.DISPATCH,), unit=unit, meaning=meaning, is_fraction=is_fraction)
        for name, unit, is_fraction, meaning in (
            ("recall_<percent>", "", True, "of the longest so many percent of the responses, found by expectation"),
            (
                "recall_ceiling_<percent>",
                "",
                True,
                "the same by the mean length of each group's other samples; no bound",
            ),
            ("expected_tau", "", False, "Kendall's rank correlation of expected and real lengths, from -1 to 1"),
            ("expected_inside", "", True, "of the responses within their interval, which should be 80 %"),
            ("pull_s", "s", False, "predicted for engines that pull, with the lengths that came"),
            ("ordered_s", "s", False, "the same where those begin first that were expected to be the longest"),
            ("placed_s", "s", False, "predicted for the placement by expected lengths, with the lengths that came"),
            ("order_gain", "", True, "of `pull_s` that the order saves"),
            (
                "placement_gain",
                "",
                True,
                "of the lesser of `pull_s` and `ordered_s` that placement saves; of policies that know lengths",
            ),
        )
    ),
    Metric(
        name="placed",
        of=(EventKind.DISPATCH, EventKind.DISPATCH_CHANGE),
        meaning="whether prompts were placed in this step, or are from now on: 1 or 0",
    ),
    *(
        Metric(name=name, of=(EventKind.SCALE,), unit=unit, meaning=meaning)
        for name, unit, meaning in (
            ("engines", "", "of all pools, before the change"),
            ("wanted", "", "after it"),
            (
                "generation_s",
                "s",
                "in which samples of the last step were generated, and none of an earlier one any more",
            ),
            ("training_s", "s", "in which that step was trained on"),
            ("lead_s", "s", "δ: generation less training"),
            ("saved_s", "s", "δ': by which one more engine is predicted to shorten generation"),
            ("lost_s", "s", "by which one engine less is predicted to lengthen it"),
        )
    ),
    *(
        Metric(name=name, of=(EventKind.ADAPTIVE_TP,), unit=unit, meaning=meaning)
        for name, unit, meaning in (
            ("source_tp", "", "degree before"),
            ("target_tp", "", "degree after; equal where nothing changed"),
            ("unfinished", "sequences", "in the engine"),
            ("current_s", "s", "until all are finished, as predicted without a change"),
            ("best_s", "s", "until all are finished, as predicted for what was chosen"),
            ("predicted_s", "s", "that the switch was to take"),
            ("switch_s", "s", "that the switch took"),
            ("waited_s", "s", "for steps that were under way before it"),
        )
    ),
)
"""All metrics."""


def metric(name: str) -> Metric:
    """Return the entry of a metric of steps and evaluations.

    One of a family is like the entry that the register has, under its own name; so is one of a set of prompts or a way
    to answer them, such as `sampled/accuracy`. Where the register has none, the entry has the name alone.
    """
    like = _entry(name, _LEARNED)
    rest = name
    while like is None and "/" in rest:
        _, _, rest = rest.partition("/")
        like = _entry(rest, (EventKind.EVALUATION,))
    if like is None:
        return Metric(name=name, meaning="")
    return like if like.name == name else replace(like, name=name, title="")


def _entry(name: str, kinds: Sequence[EventKind]) -> Metric | None:
    """The entry of a metric of these events, or else of its family."""
    entries = [entry for entry in METRICS if set(entry.of) & set(kinds)]
    exact = (entry for entry in entries if entry.name == name)
    family = (entry for entry in entries if entry.is_family and name.startswith(entry.prefix))
    return next(chain(exact, family), None)


def shown_in(place: Shown) -> list[str]:
    """Return the names of the metrics that are shown in `place`."""
    return [entry.name for entry in METRICS if place in entry.shown]


def charted_in(section: Chart) -> list[str]:
    """Return the names of the metrics whose charts are in `section`, without families."""
    return [entry.name for entry in METRICS if entry.chart == section and not entry.is_family]


def has_chart(name: str) -> bool:
    """Return whether a chart of the report's own sections shows the metric, alone or in its family."""
    return any(
        name.startswith(entry.prefix) if entry.is_family else name == entry.name
        for entry in METRICS
        if entry.chart != "Further metrics"
    )

"""Batches for the contract of losses, what a loss makes of one, and the closed forms that it may be compared with."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput, add_metrics
from tailrace.config.algorithm import LossAggMode

Sample = Mapping[str, torch.Tensor]
"""[R] each: `log_probs`, `old_log_probs`, `mask`, `on_policy`, and every column of the loss."""
COLUMNS = ("advantages", "rollout_log_probs", "ref_log_probs")
SurrogateName = Literal["clipped", "sequence_clipped", "weight_clipped"]
_LENGTHS = (6, 1, 4, 0, 5, 3, 2)
_OF_LOSS = ("log_probs", "old_log_probs", "mask", "on_policy")


def draw_samples(seed: int, columns: Iterable[str] = (), dtype: torch.dtype = torch.float64) -> list[Sample]:
    """Draw a batch off the policy, far enough that ratios are clipped.

    Some masks have holes. The mask of the last sample is all 0, and one sample has no token. `columns`: further ones,
    which get numbers from 0 to 1.
    """
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for number, tokens in enumerate(_LENGTHS):

        def normal(spread: float, tokens: int = tokens) -> torch.Tensor:
            return torch.randn(tokens, generator=generator, dtype=dtype) * spread

        mask = (torch.rand(tokens, generator=generator) < 0.8).to(dtype)
        log_probs = normal(0.5) - 2.0
        samples.append(
            {
                "log_probs": log_probs,
                "old_log_probs": log_probs + normal(0.4),
                "rollout_log_probs": log_probs + normal(0.6),
                "ref_log_probs": log_probs + normal(0.4),
                "advantages": normal(1.0),
                "mask": mask * (number < len(_LENGTHS) - 1),
                "on_policy": torch.full_like(mask, number % 2),
                **{name: torch.rand(tokens, generator=generator, dtype=dtype) for name in columns},
            }
        )
    return samples


def on_policy(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples, where all weights are those that are trained."""
    others = ("old_log_probs", "rollout_log_probs", "ref_log_probs")
    return [{**sample, **{name: sample["log_probs"] for name in others}} for sample in samples]


def padded(samples: Sequence[Sample], value: float, seed: int) -> tuple[list[Sample], list[torch.Tensor]]:
    """Put tokens outside the mask between those of each sample, with `value` in every input of theirs.

    Returns the samples with one more, all of whose tokens are such, and for each the places of its own tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    longer: list[Sample] = []
    places = []
    for sample in (*samples, {name: values[:0] for name, values in samples[0].items()}):
        tokens = len(sample["mask"])
        own = torch.randperm(tokens + 3, generator=generator)[:tokens].sort().values
        widened = {name: values.new_full((tokens + 3,), _outside(name, value)) for name, values in sample.items()}
        for name, values in sample.items():
            widened[name][own] = values
        longer.append(widened)
        places.append(own)
    return longer, places


def masked_as(samples: Sequence[Sample], value: float) -> list[Sample]:
    """The same samples, with `value` in every input of the tokens outside the mask."""
    return [
        {name: values.masked_fill(sample["mask"] == 0, _outside(name, value)) for name, values in sample.items()}
        for sample in samples
    ]


def _outside(name: str, value: float) -> float:
    """What stands outside the mask: a number that is known of each sample, or else `value`."""
    return 0.0 if name in ("mask", "on_policy") else value


def far_apart(samples: Sequence[Sample], of: str) -> Iterator[list[Sample]]:
    """Yield the samples with one of the four log-probabilities far below the others, and with it far above them."""
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    for nats, is_lower in product((30.0, 1000.0), (True, False)):
        lowered = [name for name in names if (name == of) == is_lower]
        yield [{**sample, **{name: sample[name] - nats for name in lowered}} for sample in samples]


def pack(samples: Sequence[Sample]) -> LossInputs:
    """Pack samples into the inputs of a loss. `log_probs_N` is a leaf that requires a gradient."""
    packed = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    lengths = torch.tensor([len(sample["mask"]) for sample in samples])
    return LossInputs(
        log_probs_N=packed["log_probs"].clone().requires_grad_(),
        old_log_probs_N=packed["old_log_probs"],
        mask_N=packed["mask"],
        sample_N=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        samples=len(samples),
        columns_N={name: values for name, values in packed.items() if name not in _OF_LOSS},
        on_policy_N=packed["on_policy"],
    )


def tensors(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """All tensors of the inputs of a loss, by name."""
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return {**{name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}, **inputs.columns_N}


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What a loss makes of a batch."""

    loss_sum: float
    denominator: float
    gradients: tuple[torch.Tensor, ...]
    """[R] of each sample."""
    metrics: Mapping[str, float]

    @property
    def gradient(self) -> torch.Tensor:
        """[N] of all samples."""
        return torch.cat(self.gradients)


def compute(loss: Callable[[LossInputs], LossOutput], samples: Sequence[Sample]) -> Computed:
    """Call the loss with a batch, and compute the gradient of its sum.

    Raises:
        AssertionError: the result is no loss.
    """
    inputs = pack(samples)
    output = loss(inputs)
    assert isinstance(output, LossOutput), f"a loss returns a LossOutput, and this is a {type(output).__name__}"
    assert output.loss_sum.ndim == 0, "loss_sum is one number"
    assert "tokens" in output.metrics, "the metrics are divided by `tokens`, the sum of the mask"
    assert all(isinstance(value, float | int) for value in (output.denominator, *output.metrics.values()))
    gradient = None
    if output.loss_sum.requires_grad:
        (gradient,) = torch.autograd.grad(output.loss_sum, inputs.log_probs_N, allow_unused=True)
    gradient = torch.zeros_like(inputs.log_probs_N) if gradient is None else gradient
    return Computed(
        loss_sum=output.loss_sum.item(),
        denominator=float(output.denominator),
        gradients=torch.split(gradient, [len(sample["mask"]) for sample in samples]),
        metrics=output.metrics,
    )


def added(parts: Sequence[Computed]) -> Computed:
    """Add up what a loss makes of the parts of a batch, as a trainer does."""
    metrics: dict[str, float] = {}
    for part in parts:
        add_metrics(metrics, part.metrics)
    return Computed(
        loss_sum=math.fsum(part.loss_sum for part in parts),
        denominator=math.fsum(part.denominator for part in parts),
        gradients=tuple(gradient for part in parts for gradient in part.gradients),
        metrics=metrics,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """What a loss is to equal, computed token by token without tensors."""

    mode: LossAggMode = "token-mean"
    """The aggregation; see `tailrace.algorithms.losses.aggregate`."""
    norm_tokens: int | None = None
    """The number that `seq-mean-token-sum-norm` divides by."""
    surrogate: SurrogateName | None = None
    """The surrogate, see `tailrace.algorithms.surrogates`. None: any, so that only its gradient at ratio 1 is known."""
    clip_low: float = 0.2
    clip_high: float = 0.2

    def denominator(self, samples: Sequence[Sample]) -> float:
        """The number of tokens of the mask, or of samples that have any, in the last mode times `norm_tokens`."""
        tokens = [int(sample["mask"].sum()) for sample in samples]
        if self.mode == "token-mean":
            return float(sum(tokens))
        samples_trained_on = sum(count > 0 for count in tokens)
        if self.mode != "seq-mean-token-sum-norm":
            return float(samples_trained_on)
        assert self.norm_tokens is not None, "give the closed form its norm_tokens"
        return float(samples_trained_on * self.norm_tokens)

    def values(self, sample: Sample) -> tuple[list[float], list[float]]:
        """The loss of each token, and its slope in the token's log-probability, both as they enter the sum."""
        counted = sample["mask"].bool().tolist()
        log_ratios = (sample["log_probs"] - sample["old_log_probs"]).tolist()
        if self.surrogate == "sequence_clipped":
            log_ratios = [_mean(log_ratios, counted)] * len(log_ratios)
        weight = 1 / max(sum(counted), 1) if self.mode == "seq-mean-token-mean" else 1.0
        losses, slopes = [], []
        for counts, log_ratio, advantage, log_prob in zip(
            counted, log_ratios, sample["advantages"].tolist(), sample["log_probs"].tolist(), strict=True
        ):
            loss, slope = self._of_token(math.exp(log_ratio), advantage, log_prob) if counts else (0.0, 0.0)
            losses.append(weight * loss)
            slopes.append(weight * slope)
        return losses, slopes

    def _of_token(self, ratio: float, advantage: float, log_prob: float) -> tuple[float, float]:
        bounded = min(max(ratio, 1 - self.clip_low), 1 + self.clip_high)
        if self.surrogate == "weight_clipped":
            return -bounded * advantage * log_prob, -bounded * advantage
        if bounded * advantage < ratio * advantage:
            return -bounded * advantage, 0.0
        return -ratio * advantage, -ratio * advantage


def _mean(values: Sequence[float], counted: Sequence[bool]) -> float:
    return math.fsum(value for value, counts in zip(values, counted, strict=True) if counts) / max(sum(counted), 1)

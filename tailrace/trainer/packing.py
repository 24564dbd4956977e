"""Packs samples into micro-batches: how the tokens of those that go together lie in one row.

    [prompt a][response a0][response a1][response a2][prompt b][response b0] …      T tokens, no padding

A prompt is computed once for all responses of its group that are in the same micro-batch, and so is a response that
several of its samples have: short answers are often equal. Every response continues at its prompt's position;
`attention.py` keeps responses from seeing each other. This module uses numpy and no tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.errors import AlgorithmError
from tailrace.planning import packing
from tailrace.planning.packing import Lengths
from tailrace.trainer.base import TrainSample
from tailrace.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupPart:
    """Samples of one group that share one copy of their prompt."""

    indices: tuple[int, ...]
    """Places of the samples in the list that was planned."""
    samples: tuple[TrainSample, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens: the prompt once, and every response."""
        return len(self.samples[0].prompt_ids) + sum(len(sample.response_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpan:
    """The place of a group part in the packed row."""

    start: int
    """Index of the prompt's first token."""
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    """Number of tokens of each distinct response; the first one begins right after the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """A micro-batch: T tokens to compute. Those of distinct responses, U, get scores for all N response tokens."""

    spans: tuple[PartSpan, ...]
    input_ids_T: IntArray
    position_ids_T: IntArray
    predictor_U: IntArray
    """Index in 0 … T - 1 of the hidden state that predicts each token of the distinct responses."""
    target_U: IntArray
    scored_N: IntArray
    """Index in 0 … U - 1 of the score of each response token."""
    sample_N: IntArray
    """Index in 0 … S - 1 of the sample of each response token."""
    mask_N: FloatArray
    columns_N: Mapping[str, FloatArray]
    """See `TrainSample.columns`."""
    old_log_probs_N: FloatArray | None
    on_policy_N: FloatArray | None
    samples: int
    """S"""


def plan_micro_batches(samples: Sequence[TrainSample], budget: int) -> list[list[GroupPart]]:
    """Split samples into micro-batches of at most `budget` tokens; see `planning.packing.plan_micro_batches`."""
    lengths = [Lengths(sample.group_id, len(sample.prompt_ids), len(sample.response_ids)) for sample in samples]
    return [
        [GroupPart(indices=part.samples, samples=tuple(samples[index] for index in part.samples)) for part in parts]
        for parts in packing.plan_micro_batches(lengths, budget)
    ]


def pack(parts: Sequence[GroupPart]) -> PackedBatch:
    """Lay the parts out in one row.

    Raises:
        ValueError: only some of the samples have a column or old log-probabilities.
        AlgorithmError: a column has a number of values other than one for each token.
    """
    spans: list[PartSpan] = []
    token_ids: list[IntArray] = []
    targets: list[IntArray] = []
    """The distinct responses."""
    places: list[int] = []
    """The place of each sample's response among them."""
    for part in parts:
        responses, own = _distinct(part.samples)
        start = spans[-1].start + _tokens(spans[-1]) if spans else 0
        spans.append(_span(part, responses, start))
        token_ids += [part.samples[0].prompt_ids, *responses]
        places += [len(targets) + place for place in own]
        targets += responses
    scored = np.split(np.arange(sum(map(len, targets))), np.cumsum([len(target) for target in targets])[:-1])
    samples = [sample for part in parts for sample in part.samples]
    lengths = [len(sample.response_ids) for sample in samples]
    return PackedBatch(
        spans=tuple(spans),
        input_ids_T=np.concatenate(token_ids),
        position_ids_T=np.concatenate([positions for span in spans for positions in _positions(span)]),
        predictor_U=np.concatenate([indices for span in spans for indices in _predictors(span)]),
        target_U=np.concatenate(targets),
        scored_N=np.concatenate([scored[place] for place in places]),
        sample_N=np.repeat(np.arange(len(samples)), lengths),
        mask_N=np.concatenate([sample.response_mask for sample in samples]).astype(np.float32),
        columns_N=_columns(samples),
        old_log_probs_N=_of_all("old_log_probs", samples, [sample.old_log_probs for sample in samples]),
        on_policy_N=_on_policy(samples, lengths),
        samples=len(samples),
    )


def _on_policy(samples: Sequence[TrainSample], lengths: Sequence[int]) -> FloatArray | None:
    if any(sample.on_policy is None for sample in samples):
        return None
    return np.repeat(np.array([sample.on_policy for sample in samples], np.float32), lengths)


def _distinct(samples: Sequence[TrainSample]) -> tuple[list[IntArray], list[int]]:
    """The distinct responses of samples, and for each sample the place of its own among them."""
    found: dict[tuple[int, ...], int] = {}
    places = [found.setdefault(tuple(sample.response_ids.tolist()), len(found)) for sample in samples]
    return [samples[places.index(place)].response_ids for place in range(len(found))], places


def _span(part: GroupPart, responses: Sequence[IntArray], start: int) -> PartSpan:
    return PartSpan(
        start=start,
        prompt_tokens=len(part.samples[0].prompt_ids),
        response_tokens=tuple(map(len, responses)),
    )


def _tokens(span: PartSpan) -> int:
    return span.prompt_tokens + sum(span.response_tokens)


def _positions(span: PartSpan) -> Iterator[IntArray]:
    yield np.arange(span.prompt_tokens)
    yield from (np.arange(span.prompt_tokens, span.prompt_tokens + tokens) for tokens in span.response_tokens)


def _predictors(span: PartSpan) -> Iterator[IntArray]:
    """The predictors of each response of a part.

    The prompt's last token predicts every response's first one; from there each token predicts the next.
    """
    prompt_end = span.start + span.prompt_tokens
    begin = prompt_end
    for tokens in span.response_tokens:
        indices = np.arange(begin - 1, begin - 1 + tokens)
        indices[0] = prompt_end - 1
        yield indices
        begin += tokens


def _columns(samples: Sequence[TrainSample]) -> dict[str, FloatArray]:
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    packed = {name: _of_all(name, samples, [sample.columns.get(name) for sample in samples]) for name in names}
    return {name: values for name, values in packed.items() if values is not None}


def _of_all(name: str, samples: Sequence[TrainSample], given: Sequence[FloatArray | None]) -> FloatArray | None:
    values = [value for value in given if value is not None]
    if not values:
        return None
    if len(values) < len(samples):
        raise ValueError(
            f"{len(values)} of the {len(samples)} samples of a micro-batch carry {name}; "
            "give it for all of them or none"
        )
    for sample, value in zip(samples, values, strict=True):
        if value.shape != sample.response_ids.shape:
            raise AlgorithmError(
                f"column {name} has the shape {value.shape}, and the response {len(sample.response_ids)} tokens; "
                "a column that a loss reads has a number for each token"
            )
    return np.concatenate(values)

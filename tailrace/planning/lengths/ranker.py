"""What a predictor has learned, as bytes: the file of `tailrace rank fit`, and a part of a checkpoint."""

import msgspec

from tailrace.errors import UNREADABLE
from tailrace.planning.lengths.base import LengthPredictor


class _Ranker(msgspec.Struct, frozen=True, kw_only=True):
    tailrace_ranker: int
    """The version of the format."""
    knowledge: str
    """See `LengthPredictor`."""
    name: str = ""
    """Of the predictor; earlier files have none."""
    state: bytes


_FORMAT = 1


def pack(predictor: LengthPredictor) -> bytes:
    """Return what a predictor has learned."""
    ranker = _Ranker(
        tailrace_ranker=_FORMAT, knowledge=predictor.knowledge, name=predictor.name, state=predictor.state()
    )
    return msgspec.msgpack.encode(ranker)


def unpack(packed: bytes, predictor: LengthPredictor) -> None:
    """Have a predictor go on from what another one has learned.

    Raises:
        ValueError: it is no ranker, or one of another kind, tokenizer or model.
    """
    try:
        ranker = msgspec.msgpack.decode(packed, type=_Ranker)
    except UNREADABLE:
        raise ValueError("it is no ranker, which tailrace rank fit writes") from None
    if ranker.tailrace_ranker != _FORMAT:
        raise ValueError(f"it has the format {ranker.tailrace_ranker}; this version reads {_FORMAT}")
    if ranker.name and _kind(ranker.knowledge) != _kind(predictor.knowledge):
        raise ValueError(f"it is of type {ranker.name}, and the recipe says {predictor.name}")
    if ranker.knowledge != predictor.knowledge:
        raise ValueError(f"it has learned from {ranker.knowledge}, and not from {predictor.knowledge}")
    predictor.restore(ranker.state)


def _kind(knowledge: str) -> str:
    """What a predictor learns from, without what differs between those of a type."""
    return knowledge.partition(",")[0].partition(" of the model ")[0]

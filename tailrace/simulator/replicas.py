"""The replicas of a simulated engine, and their arrangement anew at another TP degree.

Sequences go where `planning.tp_merge` has them go, as in `engine.scheduling.transplant`.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from itertools import groupby

from tailrace.planning.tp_merge import merge
from tailrace.simulator.agenda import Entry
from tailrace.simulator.batch import Batch, Sequence
from tailrace.simulator.samples import Response
from tailrace.simulator.scenario import EngineKind


@dataclass(eq=False, slots=True)
class Replica:
    """One copy of the model."""

    batch: Batch
    since: float = 0.0
    """When the stretch under way began."""
    entry: Entry | None = None
    """Its end; None while there is none."""
    responses: dict[Sequence, Response] = field(default_factory=dict)
    is_ending: bool = False
    """Whether what has ended with a stretch is being taken in: it may bring other work for the next one."""

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait."""
        return self.batch.running + self.batch.waiting


def replicas_of(kind: EngineKind, tp: int) -> list[Replica]:
    """The replicas of an engine at a degree, without work."""
    number = kind.tp * kind.dp // tp
    return [Replica(_batch(kind, tp, number)) for _ in range(number)]


def _batch(kind: EngineKind, tp: int, number: int) -> Batch:
    adaptive = kind.adaptive_tp
    return Batch(
        times=kind.times,
        slots=kind.slots,
        cache_tokens=kind.cache_tokens if adaptive is None or tp == kind.tp else adaptive.cache_tokens[tp],
        tp=tp,
        replicas=number,
        prefill_tokens=kind.prefill_tokens,
        counts_decoding=kind.counts_decoding,
        block=kind.block,
        most_steps=None if adaptive is None else adaptive.config.steps_between,
    )


def emptiest(replicas: List[Replica]) -> Replica:
    """The replica with the fewest responses."""
    return min(replicas, key=lambda each: len(each.responses))


def rearranged(old: List[Replica], kind: EngineKind, *, source: int, target: int, move: bool) -> list[Replica]:
    """The replicas at another degree, with all that the old ones had; no step may be under way.

    `move`: whether keys and values move. If not, all sequences wait, and so does what finds no room.
    """
    decoding = [[sequence for sequence in replica.responses if sequence.is_decoding and move] for replica in old]
    responses = {sequence: response for replica in old for sequence, response in replica.responses.items()}
    waiting = dict.fromkeys(sequence for replica in old for sequence in replica.batch.clear())
    new = replicas_of(kind, target)
    for replica, going_on in zip(new, merge(decoding, source, target, tokens=_tokens), strict=True):
        for sequence in sorted(going_on, key=_order):
            if replica.batch.resume(sequence):
                replica.responses[sequence] = responses[sequence]
                del waiting[sequence]
    for _, group in groupby(sorted(waiting, key=_order), key=lambda sequence: responses[sequence].group):
        replica = emptiest(new)
        for sequence in group:
            sequence.cached = 0
            replica.responses[sequence] = responses[sequence]
            replica.batch.add(sequence)
    return new


def _tokens(sequence: Sequence) -> int:
    return sequence.prompt + sequence.made


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order

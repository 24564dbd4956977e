"""The replicas of a simulated engine, and their arrangement anew at another TP degree.

Sequences go where `planning.tp_merge` has them go, as in `engine.scheduling.transplant`.
"""

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from tailrace.planning.replicas import Dispatcher
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
    def running(self) -> int:
        """Sequences that run."""
        return self.batch.running

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return self.batch.waiting

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait."""
        return self.running + self.waiting

    def take_waiting(self, count: int) -> list[tuple[Sequence, Response]]:
        """Hand over up to `count` waiting sequences with their responses."""
        return [(sequence, self.responses.pop(sequence)) for sequence in self.batch.take_waiting(count)]

    def give(self, sequences: Iterable[tuple[Sequence, Response]]) -> None:
        """Have sequences of another replica wait here, where nothing of them is cached."""
        for sequence, response in sequences:
            sequence.cached = 0
            self.responses[sequence] = response
            self.batch.add(sequence)


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


def rearranged(old: List[Replica], kind: EngineKind, *, source: int, target: int, move: bool) -> Dispatcher[Replica]:
    """The replicas at another degree, with all that the old ones had; no step may be under way.

    `move`: whether keys and values move. If not, all sequences wait, and so does what finds no room.
    """
    decoding = [[sequence for sequence in replica.responses if sequence.is_decoding and move] for replica in old]
    responses = {sequence: response for replica in old for sequence, response in replica.responses.items()}
    waiting = dict.fromkeys(sequence for replica in old for sequence in replica.batch.clear())
    new = replicas_of(kind, target)
    for replica, going_on in zip(new, merge(decoding, source, target, tokens=_tokens).replicas, strict=True):
        for sequence in sorted(going_on, key=_order):
            if replica.batch.resume(sequence):
                replica.responses[sequence] = responses[sequence]
                del waiting[sequence]
    dispatcher = Dispatcher(new)
    for sequence in sorted(waiting, key=_order):
        response = responses[sequence]
        dispatcher.choose(response.group).give([(sequence, response)])
    return dispatcher


def _tokens(sequence: Sequence) -> int:
    return sequence.prompt + sequence.made


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order

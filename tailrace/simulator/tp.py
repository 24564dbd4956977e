"""The TP degree of a simulated engine: it asks, decides and tells as a real one does.

    replicas ──what they run, and their steps──▶ StagedTP ──Decision──▶ Wanted ──▶ the engine ──▶ the event

A question takes no time. A switch takes what the decision says that it costs.
"""

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from math import lcm

from tailrace.events import EventLog
from tailrace.planning.dispatch.base import Degree
from tailrace.planning.latency import DecodedStep
from tailrace.planning.remaining import Unfinished
from tailrace.planning.tp_decision import Decision, SwitchTerms
from tailrace.planning.tp_merge import counted_once, sent_bytes
from tailrace.planning.tp_stage import StagedTP, chosen
from tailrace.planning.tp_verdict import SwitchReport, Verdict, adaptive_tp_event
from tailrace.simulator.batch import Decoded, Sequence
from tailrace.simulator.replicas import Replica
from tailrace.simulator.samples import Response
from tailrace.simulator.scenario import EngineKind, Rearranging


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A switch that is to be made."""

    target: int
    terms: SwitchTerms
    decision: Decision | None
    """None for the return at the end of a stage."""
    asked_at: float
    kv_bytes: int
    """See `SwitchReport`."""

    @property
    def moves(self) -> bool:
        """Whether keys and values move. Otherwise they are computed again, by the steps that follow."""
        return self.terms.state != "recompute"

    @property
    def seconds(self) -> float:
        """Seconds of the switch, without such steps."""
        return self.terms.sum_s() - (0.0 if self.moves else min(self.terms.move_s, self.terms.recompute_s))


class SimulatedTP:
    """The degree of one engine."""

    def __init__(self, kind: EngineKind, setup: Rearranging, log: EventLog) -> None:
        """`log`: one whose `at` takes the times that `wanted` and `switched` are given."""
        self._kind = kind
        self._setup = setup
        self._log = log
        self.restart()

    def restart(self) -> None:
        """Begin as a new process does."""
        setup = self._setup
        self.degree = self._kind.tp
        """The present one."""
        self._groups = frozenset({self.degree})
        """Degrees whose communication groups exist."""
        self._staged = StagedTP(
            setup.config,
            setup.profile,
            max_batch_size=self._kind.slots,
            cache_tokens=setup.cache_tokens.__getitem__,
            kv_bytes_per_token=setup.kv_bytes_per_token,
        )

    def begin(self) -> None:
        """Note that a request comes to the engine, which has nothing unfinished."""
        if not self._staged.in_stage:
            self._staged.begin()

    def stepped(self, decoded: Decoded | None, beside: int) -> None:
        """Learn from steps of one replica, with so many at work beside each other."""
        if decoded is not None:
            steps, step_s, sequences, context = decoded
            for step in range(steps):
                self._staged.stepped(DecodedStep(self.degree, sequences, context + step * sequences, beside, step_s))

    def ended(self, tokens: int) -> None:
        """Learn from the length of a response."""
        self._staged.ended(tokens)

    def other_degrees(self) -> list[Degree]:
        """See `StagedTP`."""
        return self._staged.other_degrees(self.degree)

    def wanted(self, replicas: List[Replica], now: float) -> Wanted | None:
        """Ask, if a question is due, or end the stage. Return a switch that is to be made."""
        unfinished = sum(replica.unfinished for replica in replicas)
        if not unfinished:
            return self._closed(now) if self._staged.in_stage else None
        if not self._staged.asks(unfinished, self.degree):
            return None
        running = [list(self._running(replica, now)) for replica in replicas]
        waiting = [entry for replica in replicas for entry in replica.responses.items() if not entry[0].is_decoding]
        waiting.sort(key=lambda entry: entry[0].order)
        decision = self._staged.decide(
            self.degree,
            tuple(map(tuple, running)),
            tuple(self._unfinished(*entry, made=entry[0].made) for entry in waiting),
            self._groups,
        )
        if decision.switch:
            return self._decided(decision, running, now)
        self._staged.went_on(decision, self.degree)
        self._tell_kept(decision, now)
        return None

    def _running(self, replica: Replica, now: float) -> Iterator[Unfinished]:
        for sequence, response in replica.responses.items():
            if sequence.is_decoding:
                yield self._unfinished(sequence, response, made=replica.batch.made(sequence, now - replica.since))

    def _unfinished(self, sequence: Sequence, response: Response, *, made: int) -> Unfinished:
        return self._staged.unfinished(
            sequence.prompt,
            made,
            self._setup.limit,
            response.expected.tokens,
            group=sequence.group,
            block=self._kind.block,
        )

    def _decided(self, decision: Decision, running: List[List[Unfinished]], now: float) -> Wanted:
        terms = chosen(decision)
        cached = [counted_once(own, [1] * len(own)) for own in running]
        moved = sent_bytes(cached, self.degree, self._setup.kv_bytes_per_token) if terms.state == "move" else 0
        return Wanted(target=decision.chosen, terms=terms, decision=decision, asked_at=now, kv_bytes=int(moved))

    def _closed(self, now: float) -> Wanted | None:
        """End the stage. Return the switch back to the degree of the full batch, if it has another one."""
        home = self._staged.home_of(self.degree)
        if home == self.degree:
            self._tell_kept(None, now)
            self._staged.close()
            return None
        terms = self._staged.return_cost(self.degree, self._groups)
        return Wanted(target=home, terms=terms, decision=None, asked_at=now, kv_bytes=0)

    def switched(self, switch: Wanted, now: float, waited_s: float) -> None:
        """Note that a switch has been made, for whose beginning it waited so long."""
        source, decision, terms = self.degree, switch.decision, switch.terms
        groups = frozenset({switch.target, lcm(source, switch.target)})
        report = SwitchReport(
            groups_s=terms.groups_s,
            weights_s=terms.reshard_s,
            kv_s=terms.move_s if terms.state == "move" else 0.0,
            total_s=switch.seconds,
            kv_bytes=switch.kv_bytes,
            made_groups=tuple(sorted(groups - self._groups - {1})),
        )
        self.degree, self._groups = switch.target, self._groups | groups
        if decision is None:
            self._staged.close()
        else:
            self._staged.switched(decision, report)
            self._staged.went_on(decision, self.degree)
        self._tell(
            Verdict(
                began_at=switch.asked_at,
                ended_at=now,
                waited_s=waited_s,
                decision=decision,
                source_tp=source,
                target_tp=switch.target,
                report=report,
            )
        )

    def dropped(self, decision: Decision, asked_at: float, now: float) -> None:
        """Note that all responses had ended before the decided switch began."""
        self._staged.went_on(decision, self.degree)
        self._tell(Verdict.dropped(decision, began_at=asked_at, ended_at=now, waited_s=now - asked_at))

    def _tell_kept(self, decision: Decision | None, now: float) -> None:
        tp = self.degree
        self._tell(Verdict(began_at=now, ended_at=now, decision=decision, source_tp=tp, target_tp=tp))

    def _tell(self, verdict: Verdict) -> None:
        self._log.emit(adaptive_tp_event(verdict, self._log))

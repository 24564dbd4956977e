"""The operations of a client on a queue of several controllers, each of which has every so-many-th group.

    put    rows ──by group──▶ their controllers, one after the other
    claim  ─▶ one controller after the other, which answer at once ─▶ those that may have rows soon, until one answers
    ack    rows ──by id──▶ the controllers that have leased them

A claim is of one controller's rows, so that a call costs one controller alone and several serve more calls. Only a task
that gathers rows, such as those of a training step, has its claim put together from parts of all controllers. Its parts
are renewed while others are waited for. One client at a time should claim for such a task.

Windows of the run, such as training steps, are handed out one after the other here as well. A client asks for rows up
to the window that was the first one when it last looked. When no controller has such rows, it goes on to the next
window that one has; see `Policy.next_window`. It does so when two rounds of asking have found the same one: in the
first, rows may have entered at a controller that had just been asked. A claim of several parts has those of one window:
the earliest that any controller has, since rows of it may have come again.

Waiting: a claim waits on all controllers at once. The first to grant it wins, and what others have granted meanwhile is
given back. A controller that is silent holds up no claims of rows that others have, but for rows of a later window.
"""

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tailrace.errors import GroupExists, LeaseError, PeerLost, QueueError, QueueTimeout, TailraceError, on_failure
from tailrace.transfer.queue.base import Claim, NewRow, QueueStats, RowId
from tailrace.transfer.queue.client.ack import ack_rows, checked_outputs, nack_rows, remake_groups
from tailrace.transfer.queue.client.claim import fetch_or_give_back
from tailrace.transfer.queue.client.operations import Operations
from tailrace.transfer.queue.client.put import put_rows
from tailrace.transfer.queue.client.session import PASSING, Session, Tries
from tailrace.transfer.queue.client.shards import Part, PartedClaim, Shards
from tailrace.transfer.queue.client.snapshots import read_all, write_all
from tailrace.transfer.queue.client.states import join_states, split_state
from tailrace.transfer.queue.client.writing import Batch
from tailrace.transfer.queue.messages import (
    Advance,
    Claimed,
    Close,
    Counted,
    Dismiss,
    Groups,
    Later,
    Lost,
    Nack,
    ReadTable,
    Renew,
    Stats,
    pack,
    unpack,
)
from tailrace.transfer.queue.messages import Claim as ClaimMessage
from tailrace.transfer.queue.rows.schema import check_limit
from tailrace.transfer.queue.snapshot import decode_snapshot, encode_snapshot
from tailrace.transfer.wire.calls import Call, Operation, Outcome, Step, expect
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Message
from tailrace.types import Value, WeightVersion

A = TypeVar("A", bound=Message)

_AT_ONCE_S = 1.0
"""Seconds for a controller to say whether it has rows. After that the others are asked as well."""
_AVOID_S = 10.0
"""Seconds in which a controller that did not say so is not asked before others."""
_AGAIN_S = 60.0
"""Seconds of waiting after which all controllers are asked again: one that was lost may be back."""
_SOON_S = 1.0
"""The same where a controller has rows of a later window."""
_MOMENT_S = 1e-3
"""Seconds that a claim without time waits: one that does not wait is told at once that there are no rows."""
_ONE_CONTROLLER = "rows are leased and fetched apart at one controller alone; give queue.controllers=1"
_UNFINISHED = 2**16
"""The number of groups that are remembered because others of their put were refused."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The rows that a claim is for."""

    task: str
    limit: int | None
    rank: int | None
    gathers: bool
    """Whether the task gathers rows; see `Policy.gathers`."""

    def message(self, wait_s: float, window: int) -> ClaimMessage:
        """The request to a controller that may wait `wait_s` seconds."""
        return ClaimMessage(self.task, self.limit, self.rank, wait_s, window)


@dataclass(frozen=True, slots=True)
class _Entered:
    """A group that has entered."""

    ids: Sequence[RowId]
    digest: bytes
    """Of its rows; see `_digest`."""


class SeveralControllers(Operations):
    """The operations of a client with several controllers. Each controller has a session of its own."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        """`sessions`: in the order of the controllers."""
        self._sessions = sessions
        self._shards = Shards(len(sessions))
        self._turn = os.getpid()  # so that clients begin with different controllers
        self._windows: dict[str, int] = {}
        """By task, the last window whose rows are asked for."""
        self._avoid_until = [0.0] * len(sessions)
        """The time until which each controller is not asked before others."""
        self._entered: dict[int, _Entered] = {}
        """Each group that one controller took of a put that another one did not take."""

    def prepared(self) -> Operation[Session]:
        """See `Operations.prepared`. The session is that of the first controller that has answered."""
        known = next((session for session in self._sessions if session.is_prepared), None)
        if known is not None:
            return known
        first = yield from _first_reply(self._calls(ReadTable()), (), is_last=True)
        assert first is not None, "no other try is due"
        session = self._sessions[first[0]]
        yield from session.prepare()
        return session

    # Put

    def put(self, rows: Sequence[NewRow], *, timeout: float) -> Operation[list[RowId]]:
        """See `Operations.put`. Each controller takes its rows, all or none.

        Groups that some controllers took while others did not are in the queue. They may be put again with this client,
        together with the others: they are not sent again. Other rows under their ids are sent, and so refused.
        """
        session = yield from self.prepared()
        session.schema.check_new(rows)
        groups: dict[int, list[NewRow]] = {}
        for row in rows:
            groups.setdefault(row.group_id, []).append(row)
        before = {group_id: self._entered[group_id] for group_id in groups.keys() & self._entered.keys()}
        lost = (yield from self._lost_at({self._shards.of_group(group_id) for group_id in before})) if before else set()
        for group_id in before:
            self._entered.pop(group_id, None)
        entered = {
            group_id: iter(own.ids)
            for group_id, own in before.items()
            if group_id not in lost and own.digest == _digest(session, groups[group_id])
        }
        ids: dict[int, RowId] = {}
        missing: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            if row.group_id in entered:
                ids[place] = next(entered[row.group_id])
            else:
                missing.setdefault(self._shards.of_group(row.group_id), []).append(place)
        with on_failure(self._remember, session, groups, rows, ids):
            yield from self._put(rows, missing, ids, session.tries(timeout))
        # a lost one that is put alone is put again with the others of its first put
        self._remember(session, {group_id: groups[group_id] for group_id in before}, rows, ids)
        return [ids[place] for place in range(len(rows))]

    def _lost_at(self, controllers: Collection[int]) -> Operation[set[int]]:
        """The lost groups of these controllers, as far as they say so now."""
        calls = [Call(self._sessions[controller].controller, Lost(0.0)) for controller in sorted(controllers)]
        lost: set[int] = set()
        for outcome in (yield Step(calls)):
            if not isinstance(outcome, (QueueTimeout, PeerLost)):
                lost |= {group_id for group_id, _ in unpack(expect(outcome, Groups).ids, 2).tolist()}
        return lost

    def _put(
        self, rows: Sequence[NewRow], missing: Mapping[int, Sequence[int]], ids: dict[int, RowId], tries: Tries
    ) -> Operation[None]:
        """Put the rows at the places `missing`, by controller, and enter their ids into `ids`.

        All controllers are asked, whatever others say: a producer that starts again puts what is there already.
        """
        errors: list[QueueError] = []
        for controller, places in missing.items():
            own = [rows[place] for place in places]
            try:
                taken = yield from put_rows(self._sessions[controller], own, timeout=tries.left_s)
            except QueueError as error:
                errors.append(error)
            else:
                ids |= zip(places, (self._shards.row_outside(row, controller) for row in taken), strict=True)
        if errors:
            raise next((error for error in errors if not isinstance(error, GroupExists)), errors[0])

    def _remember(
        self,
        session: Session,
        groups: Mapping[int, Sequence[NewRow]],
        rows: Sequence[NewRow],
        ids: Mapping[int, RowId],
    ) -> None:
        """Remember those of `groups` that have entered, for when their put is repeated. `ids`: by places of `rows`."""
        taken: dict[int, list[RowId]] = {}
        for place in sorted(ids):
            if rows[place].group_id in groups:
                taken.setdefault(rows[place].group_id, []).append(ids[place])
        for group_id, own in taken.items():
            self._entered[group_id] = _Entered(own, _digest(session, groups[group_id]))
        while len(self._entered) > _UNFINISHED:
            del self._entered[next(iter(self._entered))]

    # Claim

    def claim(self, task: str, *, limit: int | None, rank: int | None, timeout: float) -> Operation[Claim]:
        """See `Operations.claim`."""
        check_limit(limit)
        session = yield from self.prepared()
        session.schema.task(task)
        tries = session.tries(timeout)
        wanted = _Wanted(task, limit, rank, gathers=task in session.gathering)
        if wanted.gathers and limit is not None:
            return (yield from self._gather(wanted, limit, tries))
        part = yield from self._part(wanted, tries, ())
        assert part is not None, "no part of it is held"
        return self._shards.join([part])

    def _gather(self, wanted: _Wanted, limit: int, tries: Tries) -> Operation[Claim]:
        """Claim parts of one window until there are `limit` rows, the next group does not fit, or it has no more."""
        for session in self._sessions:
            yield from session.prepare()
        parts: list[Part] = []
        left = limit
        while left:
            try:
                part = yield from self._part(replace(wanted, limit=left), tries, parts)
            except TailraceError as error:
                if parts and type(error) is QueueError:  # not one of its kinds: the limit has no room for a group
                    break
                yield Step(self._give_back(parts))
                raise
            if part is None:
                break
            if parts and part.window < parts[0].window:  # rows of an earlier window are a claim of their own
                yield Step(self._give_back(parts), self._give_back([*parts, part]))
                parts, left = [], limit
            parts.append(part)
            left -= len(part.claim.rows)
        return self._shards.join(parts)

    def _part(self, wanted: _Wanted, tries: Tries, held: Sequence[Part]) -> Operation[Part | None]:
        """Claim rows of one controller, with their cells. `held`: parts of the same claim, which are renewed.

        None: there are parts, and their window of the run has no more.
        """
        while True:
            leased = yield from self._lease(wanted, tries, held)
            if leased is None:
                return None
            controller, claimed = leased
            otherwise = self._give_back(held)
            session = self._sessions[controller]
            try:
                claim = yield from fetch_or_give_back(session, wanted.task, claimed, otherwise=otherwise)
                return Part(controller, claim, claimed.window)
            except PASSING as error:
                yield from tries.again(error, otherwise=otherwise)

    def _lease(self, wanted: _Wanted, tries: Tries, held: Sequence[Part]) -> Operation[tuple[int, Claimed] | None]:
        next_window: int | None = None
        while True:
            window = held[0].window if held else self._windows.get(wanted.task, 0)
            waits_at: list[int] = []
            later: list[int] = []
            may_have_rows = False
            for controller in self._in_turn(gathers=wanted.gathers):
                outcome = yield from self._ask_at_once(controller, wanted, window, held)
                if isinstance(outcome, Claimed):
                    return controller, outcome
                if outcome is not None and outcome.window is not None:
                    later.append(outcome.window)
                else:
                    waits_at.append(controller)
                    may_have_rows |= outcome is None
            if later and not may_have_rows:
                if min(later) == next_window:
                    if held:
                        return None
                    self._windows[wanted.task] = next_window
                next_window = min(later)
                continue
            # where rows of a later window are ready, another client may take what is left of this one
            again_s = _SOON_S if later else _AGAIN_S
            granted = yield from self._wait(waits_at, wanted, window, tries, held, again_s=again_s)
            if granted is not None:
                return granted

    def _in_turn(self, *, gathers: bool) -> list[int]:
        """The controllers in the order in which they are asked: for a task that gathers rows, always the same one."""
        count = len(self._sessions)
        if gathers:
            return list(range(count))
        self._turn += 1
        return [(self._turn + place) % count for place in range(count)]

    def _ask_at_once(
        self, controller: int, wanted: _Wanted, window: int, held: Sequence[Part]
    ) -> Operation[Claimed | Later | None]:
        """Ask a controller for rows that it has now. None: it may have some soon, or is silent."""
        session = self._sessions[controller]
        if session.now < self._avoid_until[controller]:
            return None
        started = session.now
        call = Call(session.controller, wanted.message(0.0, window))
        [outcome] = yield Step([call], self._give_back(held), limit_s=_AT_ONCE_S)
        if session.now >= started + _AT_ONCE_S:
            self._avoid_until[controller] = session.now + _AVOID_S
        if isinstance(outcome, (QueueTimeout, PeerLost)):
            return None
        return _granted(outcome)

    def _wait(
        self,
        controllers: Sequence[int],
        wanted: _Wanted,
        window: int,
        tries: Tries,
        held: Sequence[Part],
        *,
        again_s: float,
    ) -> Operation[tuple[int, Claimed] | None]:
        """Wait until one of the controllers grants the claim. None: all are to be asked again, at the latest after
        `again_s`.

        Raises:
            QueueTimeout: no time is left.
        """
        left_s = tries.left_s
        wait_s = min([max(left_s, _MOMENT_S), again_s, *(part.claim.lease_s / 3 for part in held)])
        sessions = [self._sessions[controller] for controller in controllers]
        calls = [Call(one.controller, wanted.message(wait_s, window), wait_s=wait_s) for one in sessions]
        first = yield from _first_reply(calls, self._give_back(held), is_last=wait_s >= left_s)
        granted: tuple[int, Claimed] | None = None
        otherwise = self._give_back(held)
        if first is not None:
            place, reply = first
            self._avoid_until[controllers[place]] = 0.0
            if isinstance(claimed := _granted(reply), Claimed):
                granted = controllers[place], claimed
                otherwise.append(Call(sessions[place].controller, Nack(claimed.lease_id, None)))
        if held:
            yield Step(self._renewals(held), otherwise)  # a lease that has ended is noticed at the ack
        return granted

    def _give_back(self, parts: Sequence[Part]) -> list[Call]:
        return [Call(self._controller(part), Nack(part.claim.lease_id, None)) for part in parts]

    def _renewals(self, parts: Sequence[Part]) -> list[Call]:
        return [Call(self._controller(part), Renew(part.claim.lease_id)) for part in parts]

    def _controller(self, part: Part) -> str:
        return self._sessions[part.controller].controller

    def lease(self, task: str, *, limit: int | None, rank: int | None, timeout: float) -> Operation[Claimed]:
        """Refuse: see `Operations.lease`.

        Raises:
            QueueError: always.
        """
        raise QueueError(_ONE_CONTROLLER)

    def fetch(self, task: str, claimed: Claimed) -> Operation[Claim]:
        """Refuse: see `Operations.fetch`.

        Raises:
            QueueError: always.
        """
        raise QueueError(_ONE_CONTROLLER)

    # Claimed rows

    def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]], *, timeout: float) -> Operation[None]:
        """See `Operations.ack`. The rows of each controller are acked in one step.

        Before rows of several are acked, all outputs are checked, and each controller says that it has leased its rows.
        So an ack that fails has changed nothing, unless a process of the queue died meanwhile, a unit stayed full, or
        the call was cancelled.
        """
        session = yield from self.prepared()
        tries = session.tries(timeout)
        split: dict[int, dict[RowId, Mapping[str, Value]]] = {}
        parts = _parts(claim)
        owners = self._owners(parts)
        for row, cells in outputs.items():
            split.setdefault(self._owner(row, owners, parts), {})[self._shards.row_inside(row)] = cells
        if len(split) > 1:
            checked_outputs(session, claim.task, outputs)
            renewals = [
                Call(self._controller(parts[place]), Renew(parts[place].claim.lease_id, pack(own)))
                for place, own in split.items()
            ]
            for outcome in (yield Step(renewals)):
                expect(outcome, Accepted)
        for place, own in split.items():
            part = parts[place]
            yield from ack_rows(self._sessions[part.controller], part.claim, own, timeout=tries.left_s)

    def nack(self, claim: Claim, rows: Sequence[RowId] | None) -> Operation[None]:
        """See `Operations.nack`."""
        parts = _parts(claim)
        split: dict[int, list[RowId] | None] = dict.fromkeys(range(len(parts)))
        if rows is not None:
            owners, split = self._owners(parts), {}
            for row in rows:
                own = split.setdefault(self._owner(row, owners, parts), [])
                assert own is not None
                own.append(self._shards.row_inside(row))
        errors: list[TailraceError] = []
        for place, own in split.items():
            part = parts[place]
            try:
                yield from nack_rows(self._sessions[part.controller], part.claim, own)
            except TailraceError as error:  # the other controllers get their rows back all the same
                errors.append(error)
        if errors:
            raise errors[0]

    def renew(self, claim: Claim) -> Operation[None]:
        """See `Operations.renew`. A lease of one controller may end, by its last ack, before that of another."""
        outcomes = yield Step(self._renewals(_parts(claim)))
        errors = [outcome for outcome in outcomes if isinstance(outcome, TailraceError)]
        ended = [error for error in errors if isinstance(error, LeaseError)]
        if len(ended) == len(outcomes):
            raise ended[0]
        for error in errors:
            if not isinstance(error, LeaseError):
                raise error

    def remake(self, claim: Claim, groups: Collection[int], most: int) -> Operation[list[int]]:
        """See `Operations.remake`."""
        parts = _parts(claim)
        holders = {row.group_id: place for place, part in enumerate(parts) for row in part.claim.rows}
        split: dict[int, list[int]] = {}
        for group_id in groups:
            split.setdefault(holders.get(group_id, 0), []).append(group_id)
        taken: list[int] = []
        for place, own in split.items():
            part = parts[place]
            taken += yield from remake_groups(self._sessions[part.controller], part.claim, own, most)
        return taken

    def _owners(self, parts: Sequence[Part]) -> dict[RowId, int]:
        """The place of each row's part, by the row's id outside."""
        return {
            self._shards.row_outside(row.id, part.controller): place
            for place, part in enumerate(parts)
            for row in part.claim.rows
        }

    def _owner(self, row: RowId, owners: Mapping[RowId, int], parts: Sequence[Part]) -> int:
        """The place of a row's part; that of another part of its controller refuses the row.

        Raises:
            LeaseError: the claim has no rows of that controller.
        """
        if row in owners:
            return owners[row]
        for place, part in enumerate(parts):
            if part.controller == self._shards.of_row(row):
                return place
        raise LeaseError(f"{row} is not under the claim of task {parts[0].claim.task!r}")

    # The whole queue

    def advance(self, version: WeightVersion) -> Operation[None]:
        """See `Operations.advance`."""
        yield from self._all(Advance(version), Accepted)

    def dismiss(self, name: str) -> Operation[None]:
        """See `Operations.dismiss`."""
        yield from self._all(Dismiss(name), Accepted)

    def lost_groups(self, *, timeout: float) -> Operation[dict[int, int]]:
        """See `Operations.lost_groups`. They are those of the first controller that has some."""
        tries = self._sessions[0].tries(timeout)
        while True:
            left_s = tries.left_s
            wait_s = min(left_s, _AGAIN_S)
            first = yield from _first_reply(self._calls(Lost(wait_s), wait_s), (), is_last=wait_s == left_s)
            if first is not None:
                return dict(unpack(expect(first[1], Groups).ids, 2).tolist())

    def stats(self) -> Operation[QueueStats]:
        """See `Operations.stats`."""
        counted = yield from self._all(Stats(), Counted)
        return self._shards.join_stats([one.stats for one in counted])

    def snapshot(self, *, timeout: float) -> Operation[bytes]:
        """See `Operations.snapshot`. The rows of each controller are those of one moment."""
        states = []
        for session in self._sessions:
            states.append((yield from read_all(session, timeout=timeout)))
        session = yield from self.prepared()
        state, parts = join_states(self._shards, states)
        return encode_snapshot(session.schema.tasks, session.columns, state, parts)

    def restore(self, snapshot: bytes) -> Operation[None]:
        """See `Operations.restore`. If it fails, some controllers may have their rows; serve another queue then."""
        session = yield from self.prepared()
        state, parts = decode_snapshot(snapshot, session.schema.tasks, session.columns)
        for own, (of_controller, cells) in zip(self._sessions, split_state(self._shards, state, parts), strict=True):
            yield from own.prepare()
            yield from write_all(own, of_controller, cells)

    def close(self) -> Operation[None]:
        """See `Operations.close`."""
        yield from self._all(Close(), Accepted)

    def due(self) -> list[Call]:
        """See `Operations.due`."""
        return [call for session in self._sessions for call in session.due()]

    def signs_of_life(self, limit_s: float) -> list[Call]:
        """See `Operations.signs_of_life`."""
        return [call for session in self._sessions for call in session.signs_of_life(limit_s)]

    def release(self) -> None:
        """See `Operations.release`."""
        for session in self._sessions:
            session.memory.close()

    def _calls(self, message: Message, wait_s: float = 0.0) -> list[Call]:
        return [Call(session.controller, message, wait_s=wait_s) for session in self._sessions]

    def _all(self, message: Message, kind: type[A]) -> Operation[list[A]]:
        """Ask all controllers at once.

        Raises:
            TailraceError: that of the first one that did not answer; others may have carried it out.
        """
        outcomes = yield Step(self._calls(message))
        return [expect(outcome, kind) for outcome in outcomes]


def _first_reply(
    calls: Sequence[Call], otherwise: Sequence[Call], *, is_last: bool
) -> Operation[tuple[int, Reply] | None]:
    """Wait for the first reply to one of the calls. Return its place and itself; None where another try is due.

    `is_last`: whether no other try is due.

    Raises:
        TailraceError: the error of a call, where all have one and another try is not due or would not help.
    """
    outcomes = yield Step(calls, otherwise, first=True)
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, Reply):
            return place, outcome
    errors = [outcome for outcome in outcomes if isinstance(outcome, TailraceError)]
    lasting = [error for error in errors if not isinstance(error, (QueueTimeout, PeerLost))]
    lost = [error for error in errors if isinstance(error, PeerLost)]
    if is_last or lasting or len(lost) == len(errors):
        raise [*lasting, *lost, *errors][0]
    return None


def _digest(session: Session, rows: Sequence[NewRow]) -> bytes:
    """What tells the rows of a group from others."""
    batch = Batch(session.codec.measure_rows(row.cells for row in rows))
    runs = [(run.rows, run.columns, run.lengths) for run in batch.runs]
    heads = [(row.group_size, row.order) for row in rows]
    return hashlib.sha256(repr((runs, heads)).encode() + batch.to_bytes()).digest()


def _parts(claim: Claim) -> tuple[Part, ...]:
    """The parts of a claim.

    Raises:
        LeaseError: it was not claimed from several controllers.
    """
    if not isinstance(claim, PartedClaim):
        raise LeaseError(f"the claim of task {claim.task!r} was not made by a client of this queue")
    return claim.parts


def _granted(outcome: Outcome) -> Claimed | Later:
    """The answer to a claim.

    Raises:
        TailraceError: the error that came instead.
    """
    if isinstance(outcome, Reply) and isinstance(outcome.answer, Later):
        return outcome.answer
    return expect(outcome, Claimed)

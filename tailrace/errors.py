"""The exception tree.

TailraceError
├── UserError (ValueError)      bad input: one clear line, exit code 2, nothing half-written
│   ├── ConfigError             a recipe or an override
│   ├── ModelError              a model reference, its files or its family
│   │   └── ModelNotHere        an id of the hub whose model cannot be had from there
│   ├── PromptError             a prompt source, its columns, its split
│   ├── TraceError              a trace of a workload, or a file that is to become one
│   ├── PlanError               a cluster, a device or a model that cannot be planned for
│   └── CheckpointError         a checkpoint that is missing, corrupt or cannot be written
├── QueueError (RuntimeError)   the transfer queue
│   ├── ColumnError             an unknown column, a wrong dtype or shape, a missing output
│   ├── StaleRowError           a row id whose row is gone
│   ├── LeaseError              an ack or nack without a live lease
│   ├── GroupExists             a group that was put before
│   ├── StorageFull             no room for a write now
│   ├── QueueTimeout            a put or claim that waited its limit
│   ├── WireError               a message between its processes that cannot be read, a peer that is refused
│   │   └── PeerLost            a peer that did not answer in time
│   └── QueueClosed             the queue was closed while waiting or before the call
├── WeightsError (RuntimeError) the weight transfer
│   ├── EngineStuck             an engine that new weights wait for stands still
│   ├── WeightsTimeout          weights that did not come, or were not installed, in time
│   └── SenderLost              a sender of weights that is gone, or gave no sign of life in time
├── EngineError (RuntimeError)  generation
│   └── RequestError            a request that can never be served
├── ClusterError (RuntimeError) worker processes
│   ├── ClusterLost             the Ray of a run has ended, or was ended because it stood still
│   ├── WorkerError             a worker raised an error that is not of this tree
│   └── WorkerDied              a worker's process ended, or was killed because it hung
├── RewardError (RuntimeError)  a grader failed, timed out or died
│   ├── JudgeUnavailable        a judge could not be reached, or was too busy
│   ├── JudgeRefused            a judge does not serve such requests
│   ├── JudgeNonsense           a judge's answer has no score
│   └── NothingGraded           all gradings of a step, or of the first evaluation, failed
├── BenchError (RuntimeError)   a benchmark that was not played as asked, or an adapter that failed
├── AlgorithmError (RuntimeError) the code of an algorithm failed, or returned what it may not
└── TrainingError (RuntimeError)
    └── NonFiniteError          a loss or gradient that stayed non-finite

Below it are the phrases that messages share.
"""

import difflib
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, Self

import msgspec

_Args = ParamSpec("_Args")

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for malformed bytes, including undecodable text and values nested too deep."""


class TailraceError(Exception):
    """Base of every error that Tailrace raises on purpose."""


class UserError(TailraceError, ValueError):
    """Bad input. Its message is one line: the value, what was expected, the fix."""


class ConfigError(UserError):
    """A recipe or an override is not valid."""


class ModelError(UserError):
    """A model cannot be found, read or served."""


class ModelNotHere(ModelError):
    """A model of the hub is not on this machine, and cannot be had."""


class PromptError(UserError):
    """A prompt source cannot be read or split as asked."""


class TraceError(UserError):
    """A trace cannot be read or written, or holds what cannot be."""


class PlanError(UserError):
    """A cluster, a device or a model cannot be planned for, or fits nowhere."""


class CheckpointError(UserError):
    """A checkpoint is missing, corrupt, of another run, or cannot be written."""


class QueueError(TailraceError, RuntimeError):
    """A transfer queue call was refused."""


class ColumnError(QueueError):
    """A column is unknown, missing, or has the wrong dtype or shape."""


class StaleRowError(QueueError):
    """A row id names a row that is gone; its slot may hold another row by now."""


class LeaseError(QueueError):
    """An ack or nack names rows that the claim does not hold, or no longer holds."""


class GroupExists(QueueError):
    """A group was put before: it is in the queue, or its rows have left it."""


class StorageFull(QueueError):
    """There is no room for a write now."""


class QueueTimeout(QueueError):
    """A put or a claim waited up to its limit."""


class WireError(QueueError):
    """A message between processes of the queue cannot be read or sent, or one of them does not know the token."""


class PeerLost(WireError):
    """A process of the queue did not answer in time. The requested work may have happened or not."""


class QueueClosed(QueueError):
    """The queue is closed: no rows go in, and none will become ready."""


class WeightsError(TailraceError, RuntimeError):
    """Weights cannot be published or received."""


class EngineStuck(WeightsError):
    """An engine that new weights wait for has work and stands still. Only another process has a chance."""


class WeightsTimeout(WeightsError):
    """Weights did not come, or were not installed, within the time allowed."""


class SenderLost(WeightsError):
    """The sender of weights was closed, or gives no sign of life."""


class EngineError(TailraceError, RuntimeError):
    """Generation failed."""


class RequestError(EngineError):
    """A request can never be served by this engine."""


class ClusterError(TailraceError, RuntimeError):
    """Worker processes cannot be started or kept."""


class ClusterLost(ClusterError):
    """The Ray of a run's workers has ended, or was ended because it stood still; all workers ended with it."""


class WorkerError(ClusterError):
    """A worker raised an error that is not of this tree; that error is the cause of this one."""


class WorkerDied(ClusterError):
    """A worker's process ended, or was killed because it hung. Made by `of`."""

    worker = ""
    pid = 0
    """Process id; 0 where it had none yet."""
    how = ""
    """The signal, the exit code, or the work that it had not done in time."""

    @classmethod
    def of(cls, worker: str, pid: int, how: str) -> Self:
        """Make the error for the death of `worker`; see the attributes."""
        death = cls(f"worker {worker}{f' (process {pid})' if pid else ''} died: {how}")
        death.worker, death.pid, death.how = worker, pid, how
        return death


class RewardError(TailraceError, RuntimeError):
    """A grader failed, timed out, or its process died."""


class JudgeUnavailable(RewardError):
    """A judge could not be reached, or answered with an error that may pass."""


class JudgeRefused(RewardError):
    """A judge answered that it does not serve such requests."""


class JudgeNonsense(RewardError):
    """A judge's answer cannot be read, or has no score within its bounds."""


class NothingGraded(RewardError):
    """All gradings of a step, or of the first evaluation, have failed. Made by `check`."""

    @classmethod
    def check(cls, errors: Sequence[str | None], what: str) -> None:
        """Check that not all of the gradings with `errors` have failed. `what`: the step or evaluation they belong to.

        Raises:
            NothingGraded: there are some, and all have failed; it quotes the error that most of them have.
        """
        if errors and all(errors):
            failed = Counter(line for error in errors for line in (error or "").splitlines())
            (error, count) = failed.most_common(1)[0]
            raise cls(
                f"all {len(errors)} gradings of {what} have failed, {count} of them with: {error}; mend the grader "
                "(rewards), and have it return a number for whatever a response may be"
            )


class BenchError(TailraceError, RuntimeError):
    """A benchmark was not played as asked, or an adapter has failed."""


class AlgorithmError(TailraceError, RuntimeError):
    """A function of an algorithm has failed, or has not returned what it must."""


class TrainingError(TailraceError, RuntimeError):
    """Training cannot go on."""


class NonFiniteError(TrainingError):
    """Losses or gradients stayed non-finite for too many steps in a row."""


@contextmanager
def on_failure(undo: Callable[_Args, object], *args: _Args.args, **kwargs: _Args.kwargs) -> Iterator[None]:
    """Call `undo` with these arguments if anything stops the block before its end."""
    with ExitStack() as failed:
        failed.callback(undo, *args, **kwargs)
        yield
        failed.pop_all()


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show of tasks that failed together.

    A death comes before the errors that it has caused, and so does what is wrong with a worker; an error raised on
    purpose comes before any other.
    """
    leaves = list(_leaves(group))
    known = [
        leaf
        for kind in (ClusterLost, WorkerDied, ClusterError, TailraceError)
        for leaf in leaves
        if isinstance(leaf, kind)
    ]
    return next(iter(known), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def counted(count: int, noun: str) -> str:
    """Write a count with its noun: 1 step, 1,000 steps."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def one_line(error: BaseException) -> str:
    """The message of an error on one line, without control characters; its type's name where the message is empty."""
    return printable(" ".join(str(error).split())) or type(error).__name__


def printable(text: str) -> str:
    """`text` made safe for a terminal: control characters, and those it cannot show, are escaped as Python does."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def quoted(value: object, limit: int = 100) -> str:
    """`value` as Python writes it, on one line without control characters, cut after `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def how_ended(code: int | None) -> str:
    """Describe a process's end: its exit code, or the signal where `code` is negative."""
    if code is None or code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name + (", out of memory?" if code == -signal.SIGKILL else "")


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, if their likeness is at least `cutoff` (0 to 1): the probable intention."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the end of a message; empty where no known name is near."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"


class TailraceWarning(UserWarning):
    """A wish could not be fulfilled, and the work goes on without it."""

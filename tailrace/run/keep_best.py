"""`checkpoint.keep_best`: which figures a run's evaluations make, and their way into the checkpoints.

evaluation of a version ──figures──▶ EvaluationNotes ──▶ the checkpoint of that version, if there is one
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError, did_you_mean
from tailrace.run.evaluation import Way, prefixes, ways_of
from tailrace.statistics.attempts import sizes
from tailrace.trainer.checkpoint import CheckpointStore

TAG = "eval/"
"""What the names of figures of evaluations begin with, in checkpoints and in TensorBoard."""
_MOST_SHOWN = 8


def check_keep_best(config: RunConfig, sets: Sequence[str]) -> None:
    """Check that the run's evaluations can make the figure that decides which checkpoint is kept.

    Whether they make `accuracy` or the parts of a reward depends on the grader. The first evaluation tells.

    Args:
        config: that of the run.
        sets: the names of the sets of prompts that are evaluated.

    Raises:
        ConfigError: they cannot.
    """
    figure = config.checkpoint.keep_best
    if figure is None:
        return
    if not sets:
        raise ConfigError(
            f"checkpoint.keep_best is {figure}, and the run evaluates nothing; set prompts.held_out or "
            "prompts.validation, or leave keep_best out"
        )
    names = list(_figures(sets, ways_of(config.evaluation, config.sampling)))
    parts = "|".join(re.escape(name) for name in names if name.endswith("/reward"))
    if figure not in names and not re.fullmatch(f"(?:{parts})/.+", figure):
        raise _unknown(figure, names)


def _figures(sets: Sequence[str], ways: Sequence[Way]) -> Iterator[str]:
    samples = {way.name: way.samples for way in ways}
    for prefix, way, _ in prefixes(sets, list(samples)):
        several = [f"{kind}@{k}" for k in sizes(samples[way]) for kind in ("pass", "maj")]
        yield from (f"{TAG}{prefix}{name}" for name in ("accuracy", "reward", *several))


def _unknown(figure: str, names: Sequence[str]) -> ConfigError:
    more = ", …" if len(names) > _MOST_SHOWN else ""
    return ConfigError(
        f"checkpoint.keep_best is {figure}, which the run's evaluations do not make; they make "
        f"{', '.join(islice(names, _MOST_SHOWN))}{more}{did_you_mean(figure, names)}"
    )


class EvaluationNotes:
    """Writes the figures of evaluations into the checkpoints of the evaluated weights."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._is_first = True

    def take(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of an evaluation after `step` training steps.

        Raises:
            ConfigError: the first evaluation has not made the figure that decides which checkpoint is kept.
            CheckpointError: they cannot be written.
        """
        tagged = {f"{TAG}{name}": value for name, value in figures.items()}
        wanted = self._store.keep_best
        if self._is_first and wanted is not None and wanted not in tagged:
            raise _unknown(wanted, list(tagged))
        self._is_first = False
        self._store.note_evaluation(step, tagged)

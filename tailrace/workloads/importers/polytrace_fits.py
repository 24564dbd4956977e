"""The distributions that PolyTrace publishes of its largest workloads (task_distribution_parameters.json), two formats.

    polytrace-math    mathematics: a mixture of normal distributions, of the tokens of prompt and response together
    polytrace-tools   tool use: how many sessions have so many turns; for each number of turns the means and covariances
                      of the tokens that come to the context before each turn, and that each turn generates

They hold no samples. So samples are drawn, with a fixed seed. Their groups are unknown: each sample is a group of its
own, in one step.

Tool use is a mixture as well, whose components the file leaves out. Normal distributions with its means and covariances
would have up to a fifth of the lengths below zero. So the tokens are lognormal, with these means and covariances. The
file's other figures agree: the longest of three turns has 319 tokens in the mean; drawn so it has 338, and 458 if drawn
from normal distributions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import polars as pl

from tailrace.errors import UNREADABLE, TraceError, one_line
from tailrace.workloads.importers.base import Count, Importer, read_bytes
from tailrace.workloads.marginals.base import Array
from tailrace.workloads.parts import as_lists
from tailrace.workloads.trace import TOOL_CALL, TURN, Provenance, Trace

_SAMPLES = 50_000
_SEED = 0
_Part = TypeVar("_Part", bound=msgspec.Struct)
_Row = list[float]


class _Mixture(msgspec.Struct):
    weights: Annotated[list[Annotated[float, msgspec.Meta(gt=0.0)]], msgspec.Meta(min_length=1)]
    means: list[_Row]
    covariances: list[list[_Row]]


class _Mathematics(msgspec.Struct):
    gmm_parameters: _Mixture


class _MathFile(msgspec.Struct):
    math_task: _Mathematics


class _Sessions(msgspec.Struct):
    """Sessions of one number of turns."""

    feature_names: list[str]
    mean_vector: _Row
    covariance_matrix: list[_Row]


class _Tools(msgspec.Struct):
    call_count_distribution: dict[Annotated[int, msgspec.Meta(ge=1, le=100)], Count]
    sequence_models: dict[Annotated[int, msgspec.Meta(ge=1, le=100)], _Sessions]


class _ToolsFile(msgspec.Struct):
    tool_calling_task: _Tools


class _Fits(Importer):
    """Reads one task of the file, which its first line does not tell."""

    def reads(self, first: bytes) -> bool:
        """See `Importer`."""
        return False

    def _part(self, files: Sequence[Path], kind: type[_Part]) -> _Part:
        if len(files) > 1:
            raise TraceError(f"{files[1]} is a second file; {self.name} reads one")
        try:
            return msgspec.json.decode(read_bytes(files[0]), type=kind)
        except UNREADABLE as error:
            raise TraceError(f"{files[0]}: {one_line(error)}") from None


class Mathematics(_Fits):
    """Reads the distribution of mathematics. Lengths below 1 are drawn again; those above `max_new_tokens` are cut."""

    name = "polytrace-math"

    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """See `Importer`."""
        mixture = self._part(files, _MathFile).math_task.gmm_parameters
        random = np.random.default_rng(_SEED)
        where = f"{files[0]}, math_task.gmm_parameters"
        parts = [
            _above_zero(mean, covariance, count, random, f"{where}, component {number}")
            for number, (mean, covariance, count) in enumerate(_components(mixture, where), 1)
        ]
        tokens = np.rint(np.concatenate(parts))
        limit = np.inf if provenance.max_new_tokens is None else provenance.max_new_tokens
        frame = pl.DataFrame({"prompt_tokens": tokens[:, 0], "response_tokens": np.minimum(tokens[:, 1], limit)})
        return Trace.of(_alone(frame), provenance)


def _components(mixture: _Mixture, where: str) -> list[tuple[_Row, list[_Row], int]]:
    """Return the mean, the covariance and the number of samples of each component."""
    if not len(mixture.weights) == len(mixture.means) == len(mixture.covariances):
        raise TraceError(f"{where}: weights, means and covariances are not as many")
    counts = [round(_SAMPLES * weight / sum(mixture.weights)) for weight in mixture.weights]
    return list(zip(mixture.means, mixture.covariances, counts, strict=True))


def _above_zero(mean: _Row, covariance: list[_Row], count: int, random: np.random.Generator, where: str) -> Array:
    """Draw [count, 2] normal lengths, all of them 1 or more."""
    center, spread = _moments(mean, covariance, 2, where)
    root = _root(spread)
    if not np.allclose(root @ root, spread):
        raise TraceError(f"{where}: expected a covariance that is symmetric and has no negative eigenvalue")
    drawn = center + random.standard_normal((2 * count, 2)) @ root
    whole = drawn[(drawn >= 1).all(axis=1)]
    if len(whole) < count:
        raise TraceError(f"{where}: most lengths are below 1; expected means of tokens")
    return whole[:count]


class ToolUse(_Fits):
    """Reads the distribution of tool use. What a turn reads beyond the turns before it, a tool has returned."""

    name = "polytrace-tools"

    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """See `Importer`."""
        tools = self._part(files, _ToolsFile).tool_calling_task
        random = np.random.default_rng(_SEED)
        total = sum(tools.call_count_distribution.values())
        frames = []
        for turns, sessions in sorted(tools.call_count_distribution.items()):
            where = f"{files[0]}, tool_calling_task.sequence_models.{turns}"
            if (model := tools.sequence_models.get(turns)) is None:
                raise TraceError(f"{where} is missing, and call_count_distribution has {sessions} of them")
            if count := round(_SAMPLES * sessions / total):
                tokens = _lognormal(*_of_turns(model, turns, where), count, random)
                frames.append(_conversations(tokens[:, :turns], tokens[:, turns:]))
        if not frames:
            raise TraceError(f"{files[0]}, tool_calling_task.call_count_distribution, has no sessions")
        return Trace.of(_alone(pl.concat(frames)), provenance)


def _of_turns(model: _Sessions, turns: int, where: str) -> tuple[Array, Array]:
    """Return the mean and the covariance of the tokens that turns read, and then of those that they generate."""
    wanted = [f"{kind}_{turn}" for kind in ("input", "output") for turn in range(1, turns + 1)]
    if missing := [name for name in wanted if name not in model.feature_names]:
        raise TraceError(f"{where}: feature_names has no {missing[0]}")
    mean, covariance = _moments(model.mean_vector, model.covariance_matrix, len(model.feature_names), where)
    places = [model.feature_names.index(name) for name in wanted]
    mean, covariance = mean[places], covariance[np.ix_(places, places)]
    if not (mean > 0).all() or not (np.diag(covariance) > 0).all():
        raise TraceError(f"{where}: a mean or a variance of tokens is not above 0")
    return mean, covariance


def _moments(mean: _Row, covariance: list[_Row], size: int, where: str) -> tuple[Array, Array]:
    """Return the mean [size] and the covariance [size, size] as arrays."""
    if len(mean) != size or [len(row) for row in covariance] != [size] * size:
        raise TraceError(f"{where}: expected a mean of {size} numbers, and a covariance of {size} times {size}")
    return np.array(mean), np.array(covariance)


def _lognormal(mean: Array, covariance: Array, count: int, random: np.random.Generator) -> Array:
    """Draw [count, n] lognormal lengths of 1 or more with a mean [n] and a covariance [n, n].

    The covariance of their logarithms is log(1 + covariance / mean meanᵀ). Where that is no covariance, the nearest one
    is taken: its negative eigenvalues become 0.
    """
    logs = np.log1p(np.maximum(covariance / np.outer(mean, mean), -0.95))
    variances, root = np.diag(logs), _root(logs)
    root *= np.sqrt(variances / (root**2).sum(axis=0))
    drawn = np.log(mean) - variances / 2 + random.standard_normal((count, len(mean))) @ root
    return np.maximum(1, np.rint(np.exp(drawn)))


def _root(covariance: Array) -> Array:
    """Return the symmetric root of a covariance [n, n], whose negative eigenvalues count as 0.

    Other roots, such as numpy's for its own draws, depend on the signs of eigenvectors, which differ between machines.
    """
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T)


def _conversations(inputs: Array, outputs: Array) -> pl.DataFrame:
    """Return sessions from the tokens [sessions, turns] that come before turns, and those that turns generate."""
    sessions, turns = inputs.shape
    reads = np.cumsum(inputs, axis=1) + np.cumsum(outputs, axis=1) - outputs
    of_turns = {"prompt_tokens": reads.ravel(), "generated_tokens": outputs.ravel()}
    of_calls = {"turn": np.tile(np.arange(turns - 1), sessions), "returned_tokens": inputs[:, 1:].ravel()}
    return pl.DataFrame(
        {
            "prompt_tokens": inputs[:, 0],
            "response_tokens": outputs.sum(axis=1),
            "turns": as_lists(of_turns, TURN, [turns] * sessions),
            "tool_calls": as_lists(of_calls, TOOL_CALL, [turns - 1] * sessions),
        }
    )


def _alone(samples: pl.DataFrame) -> pl.DataFrame:
    """Make a group of each sample, in one step."""
    return samples.with_columns(
        pl.lit(0).alias("step"), pl.int_range(pl.len()).alias("group"), pl.lit(0).alias("sample")
    )

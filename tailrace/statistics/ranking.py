"""How well a prediction finds the greatest of some values."""

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def recall_of_greatest(values: npt.ArrayLike, predicted: npt.ArrayLike, percent: float) -> float | None:
    """The share of the greatest `percent` that is among as many with the greatest predictions.

    Between equal values chance decides which are the greatest, and between equal predictions which are predicted. So
    chance alone finds about `percent` also where many values are equal. Where the greatest are no whole number, the
    recalls of the two numbers next to it are interpolated. None where they are fewer than one.

    Args:
        values: [n]
        predicted: [n] in any unit: only the order counts.
    """
    array, guessed = np.asarray(values, np.float64), np.asarray(predicted, np.float64)
    wanted = len(array) * percent / 100
    if wanted < 1:
        return None
    low, high = (_recall(array, guessed, number) for number in (math.floor(wanted), math.ceil(wanted)))
    return low + (wanted - math.floor(wanted)) * (high - low)


def mean_of_others(values: npt.ArrayLike, groups: npt.ArrayLike) -> Array:
    """[n] the mean of the other values of each value's group; NaN where there are none.

    Args:
        values: [n]
        groups: [n] the number of each value's group.
    """
    array = np.asarray(values, np.float64)
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    others = counts[index] - 1
    sums = np.bincount(index, array)[index] - array
    return np.asarray(np.divide(sums, others, out=np.full(len(array), np.nan), where=others > 0))


def _recall(values: Array, predicted: Array, wanted: int) -> float:
    return float(_greatest(values, wanted) @ _greatest(predicted, wanted)) / wanted


def _greatest(values: Array, wanted: int) -> Array:
    """The chance of each of [n] values to be among the `wanted` greatest, of which equal ones have the same."""
    least = np.partition(values, -wanted)[-wanted]
    above, equal = values > least, values == least
    return np.asarray(np.where(equal, (wanted - above.sum()) / equal.sum(), above))

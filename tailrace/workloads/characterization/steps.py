"""How a step drains: its samples begin together, and the longest ones run alone at the end."""

import numpy as np
import numpy.typing as npt


def tail_share(lengths: npt.ArrayLike, *, running: float = 0.1) -> float:
    """The share of a step's generation in which fewer than `running` of its samples still run.

    All samples begin together, and a token takes the same time however many run: a lower bound, since tokens of few
    samples take less time.

    Args:
        lengths: [n] tokens of the samples of one step, one or more.
    """
    array = np.sort(np.asarray(lengths, np.float64))
    left = len(array) - np.arange(1, len(array) + 1)  # that run on when the sample at this place has ended
    begins = array[np.argmax(left < running * len(array))]
    return float(1 - begins / array[-1])

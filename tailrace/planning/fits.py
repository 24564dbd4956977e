"""Fits by least squares."""

from itertools import product

import numpy as np

from tailrace.planning.curves import Floats


def non_negative(gram: Floats, moment: Floats) -> tuple[float, float, float]:
    """The best three coefficients of which none is negative: of each choice of columns, those that are allowed.

    Args:
        gram: [3, 3], the sums of products of the columns.
        moment: [3], the sums of products of the columns with what they are to add up to.
    """
    scale = 1 / np.sqrt(np.maximum(np.diag(gram), 1e-300))  # columns differ by orders of magnitude
    gram, moment = gram * np.multiply.outer(scale, scale), moment * scale
    best, least = np.zeros(3), 0.0
    for chosen in product((False, True), repeat=3):
        columns = np.flatnonzero(chosen)
        if not len(columns):
            continue
        found = np.zeros(3)
        found[columns] = np.linalg.lstsq(gram[np.ix_(columns, columns)], moment[columns], rcond=1e-9)[0]
        error = float(found @ gram @ found - 2 * found @ moment)
        if (found >= 0).all() and error < least:
            best, least = found, error
    base, each, context = best * scale
    return float(base), float(each), float(context)

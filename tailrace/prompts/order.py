"""The order of prompts and the seeds of samples: pure functions of the run's seed, so that a resumed run agrees."""

from functools import lru_cache
from hashlib import blake2b

import numpy as np

from tailrace.types import IntArray


class PromptOrder:
    """`order[k]` is the index of the run's k-th prompt. Each epoch visits every prompt once.

    It keeps no position: a run that resumes at `k` reads on at `order[k]`.
    """

    def __init__(self, *, count: int, seed: int, shuffle: bool) -> None:
        """`shuffle`: take another permutation in each epoch; otherwise keep the order of the source."""
        assert count > 0, "an order needs prompts"
        self._count = count
        self._seed = seed
        self._shuffle = shuffle

    def __getitem__(self, position: int) -> int:
        if position < 0:
            raise IndexError(f"position {position} is before the start of the run")
        epoch, offset = divmod(position, self._count)
        return int(permutation(self._count, self._seed, epoch)[offset]) if self._shuffle else offset


def sample_seed(run_seed: int, position: int, index: int) -> int:
    """The 63-bit seed of sample `index` of the run's prompt at `position`; well mixed in all three arguments."""
    return _mix("sample", run_seed, position, index) >> 1


def evaluation_seed(run_seed: int, number: int, index: int) -> int:
    """The 63-bit seed of answer `index` to prompt `number` of an evaluation: the same in each evaluation."""
    return _mix("evaluation", run_seed, number, index) >> 1


@lru_cache(maxsize=8)
def permutation(count: int, seed: int, epoch: int) -> IntArray:
    """The numbers 0 … count - 1 in a shuffled order, `[count]`.

    The numbers are sorted by raw random words, whose stream never changes. Numpy's own shuffle may change between
    releases.
    """
    words = np.random.PCG64(_mix("order", seed, epoch)).random_raw(count)
    return np.argsort(words, kind="stable")


def _mix(purpose: str, *values: int) -> int:
    """A 64-bit hash of the values, for one purpose."""
    text = ":".join([purpose, *map(str, values)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

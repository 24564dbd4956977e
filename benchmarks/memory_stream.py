"""Reads memory as a decode step reads weights, on one thread: MIB. No step of one token can be faster."""

import sys
import time

import gate
import torch

PASSES = 20


def main(mib: int) -> None:
    """Read all of it, several times, in each turn."""
    torch.set_num_threads(1)
    data = torch.ones(mib * 2**20 // 4)
    for _ in gate.turns():
        start = time.perf_counter()
        for _ in range(PASSES):
            data.sum()
        gate.done(seconds=(time.perf_counter() - start) / PASSES)


if __name__ == "__main__":
    main(int(sys.argv[1]))

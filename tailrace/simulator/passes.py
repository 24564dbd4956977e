"""Seconds in which ranks pass over the micro-batches of what they are handed at once."""

from collections.abc import Callable, Sequence

from tailrace.planning.packing import GroupPart, Lengths, rank_micro_batches


def passes_s(
    stage_s: Callable[[Sequence[GroupPart]], float],
    samples: Sequence[Lengths],
    budget: int,
    *,
    ranks: int,
    stages: int = 1,
) -> float:
    """Return the seconds of the slowest rank. Its longest micro-batch fills and empties the pipeline.

    Args:
        stage_s: seconds of a stage for a micro-batch.
        samples: what the ranks share.
        budget: tokens of a micro-batch.
        stages: of the pipeline of each rank.
    """
    shares = rank_micro_batches(samples, ranks, budget)
    seconds = [list(map(stage_s, batches)) for batches in shares]
    return max(sum(each) + (stages - 1) * max(each, default=0.0) for each in seconds)

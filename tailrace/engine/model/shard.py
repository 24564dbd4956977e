"""Shards of a model, and the layout of replicas and shards on ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `degree` equal parts of a model under tensor parallelism."""

    index: int
    degree: int

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.degree, f"no shard {self.index} of {self.degree}"


WHOLE = Shard(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """DP × TP ranks. The ranks of a replica are neighbours: rank = replica · tp + shard index."""

    dp: int
    tp: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp

    def shard(self, rank: int) -> Shard:
        """The part of the model that `rank` holds."""
        return Shard(rank % self.tp, self.tp)

    def members(self, replica: int) -> range:
        """The ranks of a replica, in the order of their shards."""
        return range(replica * self.tp, (replica + 1) * self.tp)

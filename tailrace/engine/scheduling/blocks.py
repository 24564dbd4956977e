"""The blocks of the cache: their holders, and the tokens whose keys and values they still have.

Keys and values of a token depend on all tokens before it. So blocks are found along a tree: a node is a block, and its
path from the root has the tokens up to its end. A lookup walks down the full blocks, which it may share. It ends at the
child that has most of the next tokens in common, which it may copy. Tokens themselves are compared, never their hashes.

A block without a holder stays in the tree until its room is needed, least recently held first. Every holder of a block
holds all blocks before it, and releases the last one first. So a node has no children left when its turn comes.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

TokenKey = tuple[int, ...]
_tokens = attrgetter("tokens")


@dataclass(slots=True, eq=False)
class Node:
    """A block in the tree, which can be found."""

    block: int
    tokens: TokenKey
    """The tokens of a full block, or the first ones of a block that still fills up or ended early."""
    parent: "Node | None"
    """The full block before it; the root's is None."""
    children: list["Node"] = field(default_factory=list)
    """The children in the order of their tokens, no two alike, so that the most alike are neighbours."""

    def nearest(self, tokens: TokenKey) -> tuple["Node | None", int]:
        """Return the child that begins with most of `tokens`, and how many tokens these are."""
        index = bisect_left(self.children, tokens, key=_tokens)
        best, most = None, 0
        for child in self.children[max(0, index - 1) : index + 1]:
            common = _common(child.tokens, tokens)
            if common > most:
                best, most = child, common
        return best, most

    def detach(self) -> None:
        """Leave the tree."""
        assert self.parent is not None
        assert not self.children, f"block {self.block} is dropped before those after it"
        del self.parent.children[bisect_left(self.parent.children, self.tokens, key=_tokens)]

    def attach(self) -> None:
        """Enter the tree, among the parent's children."""
        assert self.parent is not None
        self.parent.children.insert(bisect_left(self.parent.children, self.tokens, key=_tokens), self)


@dataclass(frozen=True, slots=True)
class Match:
    """Cached blocks that begin as a sequence does. Unless shared, they stay valid until the next `allocate`."""

    blocks: list[int]
    """The full blocks, to share."""
    tip: Node
    """The node of the last of them, or the root."""
    source: int | None
    """A block to copy for the tokens after them."""
    tail: int
    """Tokens that the copy has in common."""


class BlockManager:
    """References to each block, and the tree of the blocks that can be found."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total = blocks
        self.block_size = block_size
        self.root = Node(-1, (), None)
        self._references: Counter[int] = Counter()
        self._nodes: dict[int, Node] = {}
        self._taken = 0
        """The number of blocks that were ever taken, which are the first ones. Only these need bookkeeping."""
        self._empty: list[int] = []
        """Taken blocks that have no holder and are not in the tree."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that have no holder but are in the tree; the least recently held first."""

    @property
    def free(self) -> int:
        """The number of blocks without a holder."""
        return self.total - self._taken + len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """The number of blocks with a holder."""
        return self.total - self.free

    @property
    def cached(self) -> int:
        """The number of free blocks whose tokens can still be found."""
        return len(self._idle)

    def references(self, block: int) -> int:
        """The number of holders of `block`."""
        return self._references[block]

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, with one reference each. So many must be free."""
        assert 0 <= count <= self.free, f"{count} blocks wanted, {self.free} free"
        return [self._take() for _ in range(count)]

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which are held or found by `match`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of these consecutive blocks of a sequence, given in its order."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} has no holder to release it"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._nodes:
                    self._idle[block] = None
                else:
                    self._empty.append(block)

    def match(self, tokens: Sequence[int], limit: int) -> Match:
        """Find the cached beginning of these tokens, within the first `limit` of them."""
        blocks: list[int] = []
        tip, size = self.root, self.block_size
        while True:
            start = len(blocks) * size
            child, common = tip.nearest(tuple(tokens[start : min(start + size, limit)]))
            if child is None or common < size:
                return Match(blocks, tip, None if child is None else child.block, common)
            blocks.append(child.block)
            tip = child

    def index(self, parent: Node, block: int, tokens: Sequence[int]) -> Node:
        """Let `block` be found after `parent`. Its first tokens, which are in the cache, are `tokens`.

        This may be called again with more tokens. Where another full block has the same tokens, the caller's reference
        to `block` becomes one to that block.

        Returns:
            The node of these tokens. After a full block it is the parent of the next one, and its block is the
            caller's.
        """
        key = tuple(tokens)
        own, (twin, common) = self._nodes.get(block), parent.nearest(key)
        if twin is not None and common == len(key):
            if twin is not own and len(key) == self.block_size:
                self.share([twin.block])
                self._drop(block)
                self.release([block])
            return twin
        self._drop(block)
        node = self._nodes[block] = Node(block, key, parent)
        node.attach()
        return node

    def forget(self) -> None:
        """Let nothing that is cached now be found. Nodes handed out before are void; holders keep their blocks."""
        self.root = Node(-1, (), None)
        self._nodes.clear()
        self._empty += self._idle
        self._idle.clear()

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        elif self._taken < self.total:
            block = self._taken
            self._taken += 1
        else:
            block, _ = self._idle.popitem(last=False)
            self._drop(block)
        self._references[block] = 1
        return block

    def _drop(self, block: int) -> None:
        node = self._nodes.pop(block, None)
        if node is not None:
            node.detach()


def _common(one: TokenKey, other: TokenKey) -> int:
    """The length of the common prefix."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])

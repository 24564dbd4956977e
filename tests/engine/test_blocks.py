"""The block manager against a plain record of the holders of blocks and of what was written to them."""

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tailrace.engine.scheduling.blocks import BlockManager, Match, Node
from tests.helpers.effort import effort

BOOKS = effort(100, 20)
OPERATIONS = 10_000


@dataclass(eq=False)
class Holder:
    """A sequence, as the block manager sees it."""

    tokens: list[int]
    blocks: list[int]
    tip: Node | None
    indexed: int


class Books:
    """A record of sequences that start, grow, are found and end. A slot holds its token and all tokens before it."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.manager = BlockManager(blocks, block_size)
        self.size = block_size
        self.holders: list[Holder] = []
        self.written: dict[tuple[int, int], tuple[int, ...]] = {}
        """The tokens up to and including the one whose keys and values lie at (block, offset)."""
        self.held = [0] * blocks
        self.operations = 0
        """The number of operations of the manager."""

    def start(self, tokens: list[int]) -> None:
        found = self.match(tokens)
        self.share(found.blocks)
        needed = self.manager.blocks_for(len(tokens)) - len(found.blocks)
        if needed > self.manager.free:
            self.release(found.blocks)
            return
        holder = Holder(tokens, found.blocks + self.allocate(needed), found.tip, len(found.blocks))
        self.holders.append(holder)
        for position in range(len(found.blocks) * self.size, len(tokens)):
            self.write(holder, position)
        self.index(holder)

    def grow(self, holder: Holder, token: int) -> None:
        if len(holder.tokens) == len(holder.blocks) * self.size:
            if not self.manager.free:
                return
            holder.blocks += self.allocate(1)
        holder.tokens.append(token)
        self.write(holder, len(holder.tokens) - 1)
        self.index(holder)

    def end(self, index: int) -> None:
        self.release(self.holders.pop(index).blocks)

    def forget(self) -> None:
        self.operations += 1
        self.manager.forget()
        for holder in self.holders:
            holder.tip = None
        assert self.manager.cached == 0
        found = self.manager.match([0] * self.size, self.size)
        assert (found.blocks, found.source) == ([], None)

    def match(self, tokens: list[int]) -> Match:
        """Match, and assert that all that is found was written, and that no full block that is held is missed."""
        self.operations += 1
        found = self.manager.match(tokens, len(tokens) - 1)
        cached = len(found.blocks) * self.size
        assert cached + found.tail < len(tokens)
        for position in range(cached + found.tail):
            block = found.blocks[position // self.size] if position < cached else found.source
            assert block is not None
            assert self.written[block, position % self.size] == tuple(tokens[: position + 1])
        following = tokens[: cached + self.size]
        if cached + self.size < len(tokens):
            assert not any(h.tip is not None and h.tokens[: len(following)] == following for h in self.holders)
        return found

    def index(self, holder: Holder) -> None:
        """Index as a scheduler does: the full blocks, then the written part of the last one."""
        while holder.tip is not None and holder.indexed * self.size < len(holder.tokens):
            start = holder.indexed * self.size
            tokens, own = holder.tokens[start : start + self.size], holder.blocks[holder.indexed]
            self.operations += 1
            node = self.manager.index(holder.tip, own, tokens)
            if len(tokens) < self.size:
                break
            self.held[own] -= 1
            self.held[node.block] += 1
            holder.blocks[holder.indexed] = node.block
            holder.indexed, holder.tip = holder.indexed + 1, node

    def write(self, holder: Holder, position: int) -> None:
        block = holder.blocks[position // self.size]
        assert self.held[block] == 1, "nobody writes to a shared block"
        self.written[block, position % self.size] = tuple(holder.tokens[: position + 1])

    def allocate(self, count: int) -> list[int]:
        self.operations += bool(count)
        blocks = self.manager.allocate(count)
        assert len(set(blocks)) == count
        for block in blocks:
            assert self.held[block] == 0, "a held block is not handed out"
            self.held[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        self.operations += bool(blocks)
        self.manager.share(blocks)
        for block in blocks:
            self.held[block] += 1

    def release(self, blocks: list[int]) -> None:
        self.operations += bool(blocks)
        self.manager.release(blocks)
        for block in blocks:
            self.held[block] -= 1

    def check(self) -> None:
        """Assert that every reference has a holder."""
        counts = range(self.manager.total)
        assert [self.manager.references(block) for block in counts] == self.held
        assert self.held == [sum(holder.blocks.count(block) for holder in self.holders) for block in counts]
        assert self.manager.free == self.held.count(0)
        assert self.manager.used == self.manager.total - self.held.count(0)

    def close(self) -> None:
        """Assert that all blocks are free once no holder is left, and that none is found once all are allocated."""
        self.check()
        while self.holders:
            self.end(-1)
        assert self.manager.used == 0
        assert sorted(self.manager.allocate(self.manager.total)) == list(range(self.manager.total))
        assert not self.manager.root.children


class BooksMachine(RuleBasedStateMachine):
    """A machine whose steps hypothesis chooses, so that a failure is shown with the fewest steps."""

    @initialize(blocks=st.integers(1, 12), block_size=st.integers(1, 4))
    def open(self, blocks: int, block_size: int) -> None:
        self.books = Books(blocks, block_size)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def start(self, tokens: list[int]) -> None:
        self.books.start(tokens)

    @precondition(lambda self: self.books.holders)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        holder = data.draw(st.sampled_from(self.books.holders))
        for token in tokens:
            self.books.grow(holder, token)

    @precondition(lambda self: self.books.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.books.end(data.draw(st.integers(0, len(self.books.holders) - 1)))

    @rule()
    def forget(self) -> None:
        self.books.forget()

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        self.books.check()

    def teardown(self) -> None:
        if hasattr(self, "books"):
            self.books.close()


TestBlockManager = BooksMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=30)


def live(books: Books, chance: random.Random, *, greed: float, alphabet: int, forgetful: float) -> None:
    """Do random operations, OPERATIONS in all. A larger `greed` fills the cache more."""
    while books.operations < OPERATIONS:
        draw = chance.random()
        if draw < forgetful:
            books.forget()
        elif not books.holders or draw < 0.4 * greed:
            books.start(chance.choices(range(alphabet), k=chance.randrange(1, 20)))
        elif draw < 0.8:
            books.grow(chance.choice(books.holders), chance.randrange(alphabet))
        else:
            books.end(chance.randrange(len(books.holders)))


def test_very_many_random_operations_leak_no_block_and_find_no_wrong_token() -> None:
    operations = []

    @settings(max_examples=BOOKS, database=None)
    @given(
        st.integers(2, 60), st.integers(1, 8), st.integers(0, 2**64), st.floats(0, 1), st.integers(1, 3), st.booleans()
    )
    def run(blocks: int, block_size: int, seed: int, greed: float, alphabet: int, forgets: bool) -> None:
        books = Books(blocks, block_size)
        live(books, random.Random(seed), greed=greed, alphabet=alphabet, forgetful=0.01 * forgets)
        books.close()
        operations.append(books.operations)

    run()
    assert sum(operations) >= BOOKS * OPERATIONS


def manager_with(*sequences: list[int], blocks: int = 8) -> tuple[BlockManager, list[list[int]]]:
    """A manager with blocks of 4 tokens after each of these sequences has come and gone, and the sequences' blocks."""
    books = Books(blocks, 4)
    tables = []
    for tokens in sequences:
        books.start(tokens)
        tables.append(books.holders[-1].blocks)
        books.end(-1)
    return books.manager, tables


def test_full_blocks_are_shared_and_the_most_alike_tail_is_copied() -> None:
    manager, (first, second) = manager_with([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8])
    assert second[0] == first[0]
    found = manager.match([1, 2, 3, 4, 5, 7, 9, 9], 7)
    assert (found.blocks, found.source, found.tail) == ([first[0]], second[1], 2)
    found = manager.match([1, 2, 3, 4], 3)
    assert (found.blocks, found.source, found.tail) == ([], first[0], 3), "the last token must be left to compute"


def test_equal_blocks_are_kept_once() -> None:
    manager = BlockManager(4, 2)
    one, other = manager.allocate(1), manager.allocate(1)
    manager.index(manager.root, other[0], [7])
    manager.index(manager.root, one[0], [7, 8])
    assert manager.index(manager.root, other[0], [7, 8]).block == one[0]
    assert (manager.references(one[0]), manager.references(other[0])) == (2, 0)
    assert manager.cached == 0


def test_the_least_recently_held_blocks_go_first_and_the_ends_of_sequences_before_their_beginnings() -> None:
    manager, (old, new) = manager_with([1] * 8, [2] * 8, blocks=4)
    for gone in (old[1], old[0], new[1], new[0]):
        assert manager.cached == manager.free
        assert manager.allocate(1) == [gone]


def test_what_followed_a_block_that_was_handed_out_is_not_found_after_another() -> None:
    manager, (table,) = manager_with([1, 1, 1, 1, 5, 6, 7, 8], blocks=2)
    manager.allocate(1)
    assert manager.match([1, 1, 1, 1, 5, 6, 7, 8], 8).blocks == [table[0]]
    manager.allocate(1)
    assert manager.match([1, 1, 1, 1, 5, 6, 7, 8], 8).blocks == []


def test_what_is_kept_of_blocks_grows_with_their_use() -> None:
    manager = BlockManager(2**40, 4)
    held = manager.allocate(3)
    manager.release(held[2:])
    assert (manager.total, manager.used, manager.free) == (2**40, 2, 2**40 - 2)
    manager.forget()
    assert manager.free == 2**40 - 2

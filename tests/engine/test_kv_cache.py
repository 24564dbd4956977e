"""The block manager."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tailrace.engine.architecture import Architecture, Rope
from tailrace.engine.kv_cache import BlockManager, KVCache, blocks_that_fit

BLOCKS = 12


class BlockManagerMachine(RuleBasedStateMachine):
    """Holders take, share and release; a plain list of what each holds is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(BLOCKS)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, BLOCKS), prompt=st.booleans())
    def allocate(self, count: int, prompt: bool) -> None:
        count = min(count, self.manager.free)
        held = {block for holder in self.holders for block in holder}
        free = sorted(set(range(BLOCKS)) - held)
        taken = self.manager.allocate(count, prompt=prompt)
        assert sorted(taken) == (free[len(free) - count :] if prompt else free[:count])
        self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.holders)))
        self.manager.share(blocks)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.manager.release(self.holders.pop(index))

    @invariant()
    def counts_agree_with_the_holders(self) -> None:
        held = [block for holder in self.holders for block in holder]
        assert [self.manager.references(block) for block in range(BLOCKS)] == [held.count(b) for b in range(BLOCKS)]
        assert self.manager.used == len(set(held))
        assert self.manager.free == BLOCKS - len(set(held))


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

TINY = Architecture(
    family="llama",
    layers=2,
    hidden_size=8,
    intermediate_size=8,
    query_heads=2,
    kv_heads=2,
    head_dim=4,
    vocab_size=10,
    norm_eps=1e-5,
    max_positions=64,
    rope=Rope(type="default", theta=1e4),
    tied=True,
    qkv_bias=False,
    out_bias=False,
    qk_norm=False,
    eos_ids=(),
)


def test_written_vectors_are_found_in_their_block_and_survive_a_copy() -> None:
    cache = KVCache(TINY, blocks=5, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    slots = torch.tensor([2 * 4 + 3, 4 * 4 + 0])
    k = torch.randn(2, 2, 4)
    cache.write(1, cache.rows(slots), k, -k)
    assert torch.equal(cache.keys(1)[2, :, 3], k[0])
    assert torch.equal(cache.values(1)[4, :, 0], -k[1])
    assert not cache.keys(0).any()
    cache.copy([(2, 0)])
    assert torch.equal(cache.keys(1)[0, :, 3], k[0])


def test_the_cache_takes_no_more_memory_than_it_was_given() -> None:
    block_bytes = 2 * 2 * 2 * 4 * 4 * 2
    assert blocks_that_fit(TINY, gib=10.5 * block_bytes / 2**30, block_size=4, dtype=torch.bfloat16) == 10

"""Which cached blocks later sequences find, and the prompts for which they wait."""

from tailrace.engine.scheduling.blocks import BlockManager, Node
from tailrace.engine.scheduling.sequence import Sequence


class PrefixIndex:
    """Lets the blocks of running sequences be found by their tokens."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def being_computed(self, sequence: Sequence) -> tuple[int, ...]:
        """Prefixes that others should wait for. A follower computes a prompt's last token only, and delays none."""
        if sequence.tip is None or sequence.cached >= sequence.prompt_length - 1:
            return ()
        return sequence.prefixes if sequence.cached < self._blocks.block_size else sequence.prefixes[1:]

    def add_computed(self, sequence: Sequence, start: int) -> None:
        """Let the blocks be found that are full now, and the end of the prompt, once the cache has it.

        start: The number of tokens that were cached before.
        """
        if sequence.tip is None:
            return
        self._add_full(sequence, sequence.tip)
        if start < sequence.prompt_length <= sequence.cached:
            self.add_tail(sequence)

    def add_again(self, sequence: Sequence) -> None:
        """Let the blocks be found of a sequence that has come from another scheduler, unless they are outdated."""
        if sequence.tip is not None:
            sequence.tip, sequence.indexed = self._blocks.root, 0
            self.add_computed(sequence, 0)

    def add_tail(self, sequence: Sequence) -> None:
        """Let the sequence's block be found that is not full yet."""
        tokens = sequence.tokens[sequence.indexed * self._blocks.block_size : sequence.cached]
        if sequence.tip is not None and tokens:
            self._blocks.index(sequence.tip, sequence.blocks[sequence.indexed], tokens)

    def _add_full(self, sequence: Sequence, tip: Node) -> None:
        size = self._blocks.block_size
        while (sequence.indexed + 1) * size <= sequence.cached:
            index = sequence.indexed
            tokens = sequence.tokens[index * size : (index + 1) * size]
            tip = self._blocks.index(tip, sequence.blocks[index], tokens)
            sequence.blocks[index] = tip.block
            sequence.indexed += 1
        sequence.tip = tip

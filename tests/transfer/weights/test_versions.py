"""A payload: the places of tensors in it, and how they are written there."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.transfer.weights.segments import Pool
from tailrace.transfer.weights.versions import (
    ALIGNMENT,
    StoredVersion,
    Writer,
    encode_manifest,
    pieces_by_chunk,
    plan_payload,
    sum_of,
)

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool])
sizes = st.one_of(st.integers(0, 100), st.integers(0, 2**18))


@given(st.lists(st.tuples(dtypes, sizes), max_size=6), st.sampled_from([None, torch.bfloat16]), st.integers(1, 2**14))
def test_every_element_gets_to_its_place_and_every_chunk_has_its_own_sum(
    kinds: list[tuple[torch.dtype, int]], wire: torch.dtype | None, blocks: int
) -> None:
    source = torch.Generator().manual_seed(0)
    sources = {
        str(number): torch.randint(0, 2, (size,), generator=source).to(dtype)
        for number, (dtype, size) in enumerate(kinds)
    }
    manifest = plan_payload(1, 0, sources, dtype=wire, chunk_bytes=blocks * ALIGNMENT)
    pool = Pool()
    try:
        segment = pool.take(manifest.nbytes, manifest.serial, busy=())
        segment.payload[: manifest.nbytes] = b"\xff" * manifest.nbytes  # left by an older version
        stored = StoredVersion(manifest, encode_manifest(manifest), segment)
        writer = Writer(stored, list(sources.values()))
        for chunk, pieces in enumerate(pieces_by_chunk(manifest)):
            writer.write(chunk, pieces)
        assert stored.whole
        for chunk in range(manifest.chunks):
            assert stored.sum(chunk) == sum_of(stored.memory[manifest.span(chunk)])
        for name, tensor in stored.tensors().items():
            assert torch.equal(tensor, sources[name].to(tensor.dtype))
    finally:
        pool.close()

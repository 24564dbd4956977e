"""The handling of spoilt chunks by each medium."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tailrace.errors import WeightsError, WireError
from tailrace.transfer.weights.media.base import Arrival
from tailrace.transfer.weights.media.factory import make_medium
from tailrace.transfer.weights.messages import (
    AnswerOrError,
    ChunkReply,
    GetChunk,
    GetSums,
    ManifestReply,
    SumsReply,
    WeightsQuestion,
)
from tailrace.transfer.weights.segments import Attachments, Pool, Segment
from tailrace.transfer.weights.versions import (
    Manifest,
    StoredVersion,
    decode_manifest,
    encode_manifest,
    plan_payload,
    sum_of,
)

TRIES = 3


class ParentFake:
    """A parent that has a version, and a child that fetches it. `spoil` changes the parent's next `left` answers."""

    def __init__(self, pool: Pool, attachments: Attachments) -> None:
        source = torch.arange(1000.0)
        self.manifest = plan_payload(1, 0, {"w": source}, dtype=None, chunk_bytes=512)
        segment = pool.take(self.manifest.nbytes, 1, busy=())
        self.source = StoredVersion(self.manifest, encode_manifest(self.manifest), segment)
        self.source.tensors()["w"].copy_(source)
        for chunk in range(self.manifest.chunks):
            self.source.add(chunk, sum_of(self.source.memory[self.manifest.span(chunk)]))
        self.pool, self.attachments = pool, attachments
        self.left = 0
        self.spoil: Callable[[AnswerOrError], AnswerOrError] = lambda answer: answer
        self.complaints: list[int] = []
        self.stored: StoredVersion

    def attach(self, path: Path) -> Segment:
        return self.attachments.attach(path, 1, self.manifest.nbytes)

    def fetch(self, *, mapped: bool) -> bool:
        """Fetch the version, and return whether it came whole."""
        segment = (
            self.attach(self.source.segment.path)
            if mapped
            else self.pool.take(self.manifest.nbytes, 1, busy=(self.source.segment,))
        )
        self.stored = StoredVersion(self.manifest, self.source.encoded, segment)
        medium = make_medium(self.stored, mapped=mapped, retry_s=1.0)
        pending = list(medium.requests())
        while pending:
            request = pending.pop(0)
            answer = self._answer(request.question)
            if self.left:
                self.left -= 1
                answer = self.spoil(answer)
            if not self._take_in(request.read(answer)):
                return False
            pending += medium.requests()
        return self.stored.whole

    def _take_in(self, arrivals: Iterator[Arrival]) -> bool:
        """Take in chunks, and return whether to go on."""
        for arrival in arrivals:
            if arrival.sum is None:
                self.complaints.append(arrival.chunk)
                return self.complaints.count(arrival.chunk) < TRIES
            self.stored.add(arrival.chunk, arrival.sum)
        return True

    def _answer(self, question: WeightsQuestion) -> AnswerOrError:
        match question:
            case GetChunk(_, chunk):
                value = self.source.sum(chunk)
                assert value is not None
                return ChunkReply(value), self.source.memory[self.manifest.span(chunk)]
            case GetSums(_, have, _):
                return SumsReply(self.source.sums(have)), None
        raise AssertionError(question)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[ParentFake]:
    pool, attachments = Pool(tmp_path), Attachments()
    yield ParentFake(pool, attachments)
    attachments.close()
    pool.close()


def flipped(heard: AnswerOrError) -> AnswerOrError:
    assert isinstance(heard, tuple)
    reply, frame = heard
    if isinstance(reply, SumsReply):
        return SumsReply(bytes([reply.sums[0] ^ 1]) + reply.sums[1:]), None
    assert frame is not None
    data = bytearray(frame)
    data[len(data) // 2] ^= 64
    return reply, memoryview(data)


def truncated(heard: AnswerOrError) -> AnswerOrError:
    assert isinstance(heard, tuple)
    reply, frame = heard
    return reply, None if frame is None else frame[:-1]


def too_many(heard: AnswerOrError) -> AnswerOrError:
    assert isinstance(heard, tuple)
    reply, frame = heard
    if isinstance(reply, SumsReply):
        return SumsReply(bytes(8) * 1000), None
    assert frame is not None
    return reply, memoryview(bytes(frame) + b"more")


def uneven(heard: AnswerOrError) -> AnswerOrError:
    assert isinstance(heard, tuple)
    reply, _ = heard
    return (SumsReply(reply.sums[:-1]) if isinstance(reply, SumsReply) else reply), None


def foreign(heard: AnswerOrError) -> AnswerOrError:
    return ManifestReply(b"", ""), None


def an_error(heard: AnswerOrError) -> AnswerOrError:
    return WireError("not a reply")


SPOILT = {f.__name__: f for f in (flipped, truncated, too_many, uneven, foreign, an_error)}
MEDIA = pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "shared memory"])


@MEDIA
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_chunk_that_is_spoilt_is_fetched_again(parent: ParentFake, mapped: bool, spoil: str) -> None:
    parent.spoil, parent.left = SPOILT[spoil], TRIES - 1
    assert parent.fetch(mapped=mapped)
    assert torch.equal(parent.stored.tensors()["w"], torch.arange(1000.0))
    assert parent.complaints or (spoil == "truncated" and mapped)  # sums alone have no frame


@MEDIA
@pytest.mark.parametrize("spoil", ["flipped", "foreign", "an_error"])
def test_one_that_stays_spoilt_is_given_up(parent: ParentFake, mapped: bool, spoil: str) -> None:
    parent.spoil, parent.left = SPOILT[spoil], 10**6
    assert not parent.fetch(mapped=mapped)
    assert max(parent.complaints.count(chunk) for chunk in parent.complaints) == TRIES
    assert len(parent.complaints) <= TRIES * parent.manifest.chunks


def test_memory_whose_bytes_were_changed_is_not_taken(parent: ParentFake) -> None:
    parent.source.memory[1500] ^= 1
    assert not parent.fetch(mapped=True)
    assert parent.stored.ready == 1500 // 512


@pytest.mark.parametrize("path", ["/nowhere", "/dev/null", "\0", "/"])
def test_a_path_without_such_memory_is_an_error(parent: ParentFake, path: str) -> None:
    with pytest.raises(WeightsError, match="shared memory"):
        parent.attach(Path(path))


def test_memory_that_was_used_again_is_not_attached(parent: ParentFake) -> None:
    path = parent.source.segment.path
    assert parent.source.segment.renew(2)
    with pytest.raises(WeightsError, match="has version 2 by now, not 1"):
        parent.attach(path)
    assert parent.source.segment.renew(3), "the failed reader has let go of it"


def test_memory_is_not_used_again_while_somebody_reads_it(parent: ParentFake) -> None:
    segment = parent.attachments.attach(parent.source.segment.path, 1, parent.manifest.nbytes)
    assert not parent.source.segment.renew(2)
    assert parent.pool.take(10, 2, busy=()) is not parent.source.segment
    segment.release()
    assert parent.source.segment.renew(3)


def test_a_manifest_that_was_changed_or_does_not_hold_is_refused(parent: ParentFake) -> None:
    encoded, right = parent.source.encoded, sum_of(parent.source.encoded)
    assert decode_manifest(encoded, right) == parent.manifest
    for data in (encoded[:-1], encoded + b"\0", bytes([encoded[0] ^ 1]) + encoded[1:], b""):
        with pytest.raises(WeightsError, match="arrived corrupt"):
            decode_manifest(data, right)
    entry = parent.manifest.entries[0]
    for wrong in (
        Manifest(1, 0, 64, 512, (entry,)),
        Manifest(1, 0, parent.manifest.nbytes, 512, (type(entry)("w", "float8", entry.shape, 0),)),
        Manifest(1, 0, parent.manifest.nbytes, 512, (type(entry)("w", "float32", (2**62, 2**62), 0),)),
        Manifest(1, 0, parent.manifest.nbytes, 512, (type(entry)("w", "float32", (4,), 3),)),
    ):
        data = encode_manifest(wrong)
        with pytest.raises(WeightsError, match="does not lie in its payload"):
            decode_manifest(data, sum_of(data))
    for data in (b"\xc1", encode_manifest(parent.manifest)[:-1]):
        with pytest.raises(WeightsError, match="are not a manifest"):
            decode_manifest(data, sum_of(data))

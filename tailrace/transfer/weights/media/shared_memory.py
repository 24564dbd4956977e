"""The parent's own memory, on the same host: nothing is copied.

parent writes ──▶ tells how many chunks are there, and their sums ──▶ this reads them in place, to verify them

It asks for half of what is lacking each time: each message stops the thread that writes, and after few of them little
is left to verify when the last chunk is written.
"""

from pathlib import Path

from tailrace.transfer.weights.media.base import Medium, Placed
from tailrace.transfer.weights.messages import SUM_BYTES, AnswerOrError, GetSums, ManifestReply, SumsReply, error_in
from tailrace.transfer.weights.versions import Manifest, StoredVersion, packed_sums, sum_of

_LAST = 4
"""What is still to be verified when the last chunk is written: this part of a version."""


class SharedMemoryMedium(Medium):
    """Maps what the parent has."""

    def place(self, manifest: Manifest, described: ManifestReply, then: Placed) -> None:
        """See `Medium.place`: the parent's memory, kept from being overwritten."""
        self._errand.attach(Path(described.segment), manifest, then)

    def bring(self, stored: StoredVersion) -> None:
        """See `Medium.bring`."""
        if not stored.whole:
            chunks = stored.manifest.chunks
            lacking = chunks - stored.ready
            want = min(chunks, stored.ready + max(lacking // 2, -(-chunks // _LAST)))
            question = GetSums(stored.manifest.serial, stored.ready, want)
            self._errand.ask(question, lambda heard: self._verify(stored, heard))

    def _verify(self, stored: StoredVersion, heard: AnswerOrError) -> None:
        start = stored.ready
        match heard:
            case (SumsReply(sums), _) if len(sums) % SUM_BYTES == 0:
                for chunk, value in enumerate(packed_sums(sums)[: stored.manifest.chunks - start], start):
                    if sum_of(stored.memory[stored.manifest.span(chunk)]) == value:
                        self._errand.arrived(chunk, value, nbytes=0)
                    elif self._errand.corrupt(chunk):
                        break
                    else:
                        return
            case _:
                if not self._errand.corrupt(start, error_in(heard)):
                    return
        self.bring(stored)

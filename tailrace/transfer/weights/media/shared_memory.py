"""The parent's own memory, on the same host: nothing is copied.

parent writes ──▶ tells how many chunks are there, and their sums ──▶ this reads them in place, to verify them
"""

from pathlib import Path

from tailrace.transfer.weights.media.base import Medium
from tailrace.transfer.weights.messages import Described, Heard, Progress, Ready
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.versions import Holding, Manifest, packed_sums, sum_of

_STEPS = 16
"""Messages for one version: so often verifying keeps up with writing, and the parent is seldom interrupted."""


class SharedMemoryMedium(Medium):
    """Maps what the parent has."""

    def place(self, manifest: Manifest, described: Described) -> Segment:
        """See `Medium.place`: the parent's memory, kept from being overwritten."""
        return self._errand.attach(Path(described.segment), manifest)

    def bring(self, holding: Holding) -> None:
        """See `Medium.bring`."""
        if not holding.whole:
            chunks = holding.manifest.chunks
            want = min(chunks, holding.ready + -(-chunks // _STEPS))
            question = Progress(holding.manifest.serial, holding.ready, want)
            self._errand.ask(question, lambda heard: self._verify(holding, heard))

    def _verify(self, holding: Holding, heard: Heard) -> None:
        start = holding.ready
        match heard:
            case (Ready(sums), _):
                for chunk, value in enumerate(packed_sums(sums)[: holding.manifest.chunks - start], start):
                    if sum_of(holding.memory[holding.manifest.span(chunk)]) == value:
                        self._errand.arrived(chunk, value, nbytes=0)
                    elif self._errand.corrupt(chunk):
                        break
                    else:
                        return
            case _:
                if not self._errand.corrupt(start):
                    return
        self.bring(holding)

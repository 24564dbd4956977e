"""The text of a response as its tokens come.

The text of a token may need the next one: bytes of one character, or a space that a tokenizer drops at the start. So
the newest tokens are decoded together with some before them, and an unfinished character is kept until it is whole.
What could be the beginning of a stop string is kept, too, until it is clear that it is none.
"""

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"


class TextStream:
    """Turns tokens into text that never has to be taken back."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        """`decode`: the text of tokens. `stops`: strings that end the text, and are no part of it."""
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._start = 0
        """The first token that is decoded again with new ones."""
        self._read = 0
        """The tokens whose text is known."""
        self._pending = ""
        """Text that may be the beginning of a stop string."""
        self.ended = False
        """Whether a stop string has come."""

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Take in tokens, and return the text that is certain by now. `last`: no more come."""
        self._tokens += tokens
        if self.ended:
            return ""
        before = self._decode(self._tokens[self._start : self._read])
        now = self._decode(self._tokens[self._start :])
        if last or not now.endswith(_UNFINISHED):
            self._pending += now[len(before) :]
            self._start, self._read = self._read, len(self._tokens)
        return self._released(last=last)

    def _released(self, *, last: bool) -> str:
        text = self._pending
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.ended, self._pending = True, ""
            return text[: min(found)]
        kept = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)

"""How many whole groups one claim of a trainer hands out, for the queue's policy `token_budget` and for simulations."""


class Claim:
    """Groups that are gathered one after the other, by the next-fit rule by which micro-batches are packed.

    A claim is complete when its rows reach `rows`, when its tokens reach `tokens`, or when the next group does not fit.
    Its first group always fits.
    """

    def __init__(self, *, tokens: int | None, rows: int | None) -> None:
        """`tokens`, `rows`: None sets no bound."""
        self._tokens = tokens
        self._rows = rows
        self._taken_tokens = self._taken_rows = 0

    def fits(self, tokens: int, rows: int) -> bool:
        """Whether a further group of so many tokens and rows fits."""
        return not self._taken_rows or not (
            _exceeds(self._taken_tokens + tokens, self._tokens) or _exceeds(self._taken_rows + rows, self._rows)
        )

    def add(self, tokens: int, rows: int) -> None:
        """Take a group in."""
        self._taken_tokens += tokens
        self._taken_rows += rows

    @property
    def is_complete(self) -> bool:
        """Whether it reaches a bound."""
        return self.is_reached_by(self._taken_tokens, self._taken_rows)

    def is_reached_by(self, tokens: int, rows: int) -> bool:
        """Whether so many tokens and rows reach a bound."""
        return (self._tokens is not None and tokens >= self._tokens) or (self._rows is not None and rows >= self._rows)


def _exceeds(value: int, most: int | None) -> bool:
    return most is not None and value > most

"""The policy `token_budget`: whole groups in micro-batches that fit a number of tokens, or in the order of the run."""

from collections.abc import Sequence

from tailrace.errors import QueueError
from tailrace.planning.claims import Claim
from tailrace.transfer.queue.policies.base import RowMeta, at_least_one
from tailrace.transfer.queue.policies.groups import Group, GroupLine, GroupPolicy, check_fits


class TokenBudget(GroupPolicy):
    """Gathers whole groups until the next one would exceed `tokens`, or the rows reach the caller's limit.

    The rule is that of `Claim`: groups are added one after the other, and none is skipped. Until a claim is complete,
    it waits. A single group over the budget is handed out alone. A group costs the tokens of its prompt, once, and of
    all its responses. That is at least one token, so a claim waits for no further group once its budget is used up.

    Groups come in the order in which they became whole. With a `window`, such as the rows of a training step, groups of
    an earlier window of `order` come first, and a slow group holds back all later windows. In a window of 1 it holds
    back every group after it. With `tokens=None` there is no budget, and a claim gathers `limit` rows of any size. With
    a window of 1, that is the next mini-batch of a synchronous run.

    One of several controllers has a part of each window. There a claim is also complete with the last group of a window
    that is to be handed out: the rest of the window is at other controllers. So is a claim without a budget, whose
    window has several groups, where some of these were handed out before. The rest was lost and has come again.
    """

    name = "token_budget"

    def __init__(
        self,
        tokens: int | None,
        *,
        window: int | None,
        prompt_column: str = "prompt_ids",
        response_column: str = "response_ids",
        ends_with_window: bool = False,
    ) -> None:
        """`ends_with_window`: whether this is a policy of one of several controllers."""
        super().__init__(GroupLine(window=window, cost=len if tokens is None else self._cost))
        if window is not None:
            at_least_one("token_budget.window", window)
        self._tokens = None if tokens is None else at_least_one("token_budget.tokens", tokens)
        self._prompt_column = prompt_column
        self._response_column = response_column
        self._ends_with_window = ends_with_window
        self._of_windows = tokens is None and window is not None and window > 1

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Policy.columns`."""
        return () if self._tokens is None else (self._prompt_column, self._response_column)

    @property
    def gathers(self) -> bool:
        """See `Policy.gathers`."""
        return self._tokens is None

    @property
    def next_window(self) -> int | None:
        """See `Policy.next_window`."""
        return self._line.window

    def take(self, limit: int | None, rank: int | None = None) -> list[RowMeta]:
        """See `Policy.take`."""
        self.check_rank(rank)
        if self._tokens is None and limit is None:
            raise QueueError("a claim without a token budget needs a limit: pass the rows that it is to gather")
        ends_with_window = self._ends_with_window or (self._of_windows and self._line.window_was_begun)
        is_reached = self._claim(limit).is_reached_by(self._line.whole_cost, self._line.whole_rows)
        if not is_reached and not (ends_with_window and self._line.window_is_whole):
            return []
        groups, complete = self._gather(limit, ends_with_window=ends_with_window)
        if not complete:
            self._line.put_back(groups)
            return []
        return [row for group in groups for row in self._line.take(group)]

    def _gather(self, limit: int | None, *, ends_with_window: bool) -> tuple[list[Group], bool]:
        """Pop groups until the claim is complete or the next group is not whole. Return them, and whether it is."""
        groups: list[Group] = []
        claim = self._claim(limit)
        while (group := self._line.first()) is not None:
            if not groups:
                check_fits(group, limit)
            elif not claim.fits(group.cost, len(group.ready)):
                return groups, True
            groups.append(self._line.pop())
            claim.add(group.cost, len(group.ready))
            ends = ends_with_window and self._line.window != group.window
            if claim.is_complete or ends:
                return groups, True
        return groups, False

    def _claim(self, limit: int | None) -> Claim:
        return Claim(tokens=self._tokens, rows=limit)

    def _cost(self, rows: Sequence[RowMeta]) -> int:
        responses = sum(row.lengths[self._response_column] for row in rows)
        return rows[0].lengths[self._prompt_column] + responses

"""A server carries each request out once, and remembers no more than it must."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.transfer.queue.messages import Joined
from tailrace.transfer.wire.answers import Answers, ClientAnswers
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Waiting


def test_a_repetition_gets_the_first_answer_until_the_client_says_that_it_has_it() -> None:
    answers = ClientAnswers()
    answers.open(5, b"route")
    answers.keep(5)
    assert answers.waits(5)
    assert answers.put(5, Reply(Joined(3, {}))) == b"route"
    assert (answers.waits(5), answers.kept(5)) == (False, Reply(Joined(3, {})))
    answers.forget(5)
    assert answers.kept(5) == Reply(Joined(3, {}))
    answers.forget(6)
    assert (answers.kept(5), answers.is_old(5), answers.is_old(6)) == (None, True, False)


def test_an_answer_goes_to_the_connection_that_asked_last() -> None:
    answers = ClientAnswers()
    answers.open(5, b"old")
    answers.keep(5)
    answers.open(5, b"new")
    assert answers.put(5, Reply(Accepted())) == b"new"
    assert answers.kept(5) is not None


def test_the_answer_of_a_request_that_changes_nothing_is_not_kept() -> None:
    answers = ClientAnswers()
    answers.open(5, b"route")
    answers.put(5, Reply(Accepted()))
    assert answers.kept(5) is None


def test_a_long_answer_is_not_kept() -> None:
    answers = ClientAnswers()
    answers.open(5, b"route")
    answers.keep(5)
    assert answers.put(5, Reply(Accepted(), [b"cells"])) == b"route"
    assert answers.kept(5) is None
    assert not answers.waits(5)


def test_a_cancelled_request_gets_no_answer() -> None:
    answers = ClientAnswers()
    answers.open(5, b"route")
    answers.cancel(5)
    answers.cancel(6)
    assert answers.put(5, Reply(Accepted())) is None


def test_the_answers_of_all_clients_are_found_by_ticket_and_clients_by_their_names() -> None:
    answers = Answers()
    answers.recall(("rollout-1a", 5), Accepted())
    answers.of("reward-2b").open(7, b"route")
    answers.of("reward-2b").keep(7)
    assert (answers.get(("rollout-1a", 5)), answers.get(("reward-2b", 7))) == (Accepted(), None)
    assert answers.put(("reward-2b", 7), Reply(Waiting())) == b"route"
    assert answers.put(("nobody-3c", 1), Reply(Waiting())) is None
    assert list(answers.items()) == [(("rollout-1a", 5), Accepted()), (("reward-2b", 7), Waiting())]
    assert answers.clients_named("reward") == ["reward-2b"]
    answers.forget("reward-2b")
    assert (answers.get(("reward-2b", 7)), [*answers.clients]) == (None, ["rollout-1a"])


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=60))
@settings(max_examples=200)
def test_what_is_kept_is_what_was_answered_and_not_forgotten(steps: list[tuple[int, int]]) -> None:
    answers, kept, oldest = ClientAnswers(), set[int](), 0
    for number, floor in steps:
        oldest = max(oldest, floor)
        answers.forget(floor)
        kept = {other for other in kept if other >= oldest}
        if not answers.is_old(number) and answers.kept(number) is None:
            answers.open(number, b"route")
            answers.keep(number)
            answers.put(number, Reply(Joined(number, {})))
            kept.add(number)
        assert {other for other in range(31) if answers.kept(other) is not None} == kept

"""The choice of the replica that serves a request."""

from tailrace.conformance.requests import make_request
from tailrace.engine.scheduling.blocks import BlockManager
from tailrace.engine.scheduling.scheduler import Scheduler
from tailrace.engine.scheduling.stopping import StopRule
from tailrace.planning.replicas import Dispatcher


def make_schedulers(count: int) -> list[Scheduler]:
    return [Scheduler(BlockManager(100, 4), max_batch_size=2, prefill_tokens=64) for _ in range(count)]


def add(dispatcher: Dispatcher[Scheduler], number: int, group: int) -> Scheduler:
    request = make_request(number, group_id=group)
    scheduler = dispatcher.choose(group)
    scheduler.add(request, StopRule(request.sampling, eos_ids=(), room=100, detokenize=None))
    return scheduler


def test_a_group_stays_together_and_groups_are_spread() -> None:
    schedulers = make_schedulers(2)
    dispatcher = Dispatcher(schedulers)
    chosen = [add(dispatcher, number, group=number // 3) for number in range(12)]
    assert [len({id(scheduler) for scheduler in chosen[i : i + 3]}) for i in range(0, 12, 3)] == [1, 1, 1, 1]
    assert [scheduler.waiting for scheduler in schedulers] == [6, 6]


def test_what_one_replica_has_not_come_to_another_takes_when_it_has_none_waiting() -> None:
    one, other = make_schedulers(2)
    dispatcher = Dispatcher([one, other])
    for number in range(8):
        add(dispatcher, number, group=0)
    assert (one.waiting, other.waiting) == (8, 0)
    dispatcher.balance()
    assert (one.waiting, other.waiting) == (4, 4)
    one.schedule()
    other.schedule()
    dispatcher.balance()
    assert one.waiting + one.running == other.waiting + other.running == 4


def test_a_single_replica_gets_everything() -> None:
    (only,) = make_schedulers(1)
    dispatcher = Dispatcher([only])
    for number in range(4):
        assert add(dispatcher, number, group=number) is only
    dispatcher.balance()
    assert only.waiting == 4

import pytest

from tailrace.transfer.queue.client.session import Session
from tests.transfer.client.servers import Make, arena, memory
from tests.transfer.client.sessions import Clock, informed_session


@pytest.fixture(params=[arena, memory], ids=["arena", "memory"])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def session(clock: Clock) -> Session:
    return informed_session(clock)

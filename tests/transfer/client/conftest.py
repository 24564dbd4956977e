import pytest

from tests.transfer.client.servers import Make, arena, memory


@pytest.fixture(params=[arena, memory], ids=["arena", "memory"])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen

"""A network that is slow, stalls and loses connections costs time, but no row is lost or doubled."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tailrace.transfer.queue.client import control
from tailrace.transfer.queue.client.ack import ack_rows
from tailrace.transfer.queue.client.claim import claim_rows
from tailrace.transfer.queue.client.put import put_rows
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import QUEUE
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.wire.aio import AsyncClient
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.server import Server
from tailrace.transfer.wire.sync import SyncClient
from tests.transfer.client.servers import TOKEN, memory, serving
from tests.transfer.remote.proxy import Proxy
from tests.transfer.tables import group, one_task, outputs

LIMIT_S = 20.0
PATIENCE = Patience(limit_s=10.0, retry_s=0.1, max_retry_s=0.4)
TCP = ("tcp://127.0.0.1:*",)
LONG = 2_000


class FarServer(Server):
    """A server that all clients reach through a proxy."""

    def __init__(self, *args: Any, proxies: ExitStack, seed: int, **options: Any) -> None:
        super().__init__(*args, patience=PATIENCE, **options)
        [endpoint] = super().endpoints
        self.proxy = proxies.enter_context(Proxy(endpoint, seed=seed))

    @property
    def endpoints(self) -> list[str]:
        return [self.proxy.endpoint]


class Far:
    """A queue at the other end of a network."""

    def __init__(self, directory: Path, *, seed: int = 0) -> None:
        self._directory = directory
        self._seed = seed
        self.proxies: list[Proxy] = []

    def __enter__(self) -> "Far":
        with ExitStack() as stack:
            running = serving(
                self._directory,
                make=memory,
                units=2,
                tasks=one_task(FirstIn(2)),
                endpoints=TCP,
                listen=partial(self._listen, stack),
                unit_limit_s=60.0,
            )
            self.controller = stack.enter_context(running).address.endpoints[0]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _listen(self, stack: ExitStack, *args: Any, **options: Any) -> Server:
        server = FarServer(*args, proxies=stack, seed=self._seed, **options)
        self.proxies.append(server.proxy)
        return server

    @property
    def cuts(self) -> int:
        return sum(proxy.cuts for proxy in self.proxies)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    with Far(tmp_path) as running:
        yield running


@pytest.mark.parametrize("seed", range(2))
async def test_every_row_is_consumed_once_over_a_network_that_loses_connections(tmp_path: Path, seed: int) -> None:
    lossy = Far(tmp_path, seed=seed)
    groups, claimed = 8, Counter[int]()

    async def produce(client: AsyncClient, numbers: range) -> None:
        session = Session(lossy.controller, shared_memory=False)
        for number in numbers:
            await client.run(put_rows(session, group(number, 2, prompt=LONG), timeout=LIMIT_S))

    async def consume(client: AsyncClient) -> None:
        session = Session(lossy.controller, shared_memory=False)
        while True:
            claim = await client.run(claim_rows(session, "only", limit=None, rank=None, timeout=LIMIT_S))
            await client.run(ack_rows(session, claim, outputs(claim), timeout=LIMIT_S))
            claimed.update(row.order for row in claim.rows)

    with lossy:
        for proxy in lossy.proxies:
            proxy.worsen(delay_s=0.005, cut_every=60)
        async with asyncio.timeout(LIMIT_S):
            clients = [AsyncClient(f"client-{number}", TOKEN, QUEUE, patience=PATIENCE) for number in range(4)]
            consumers = [asyncio.create_task(consume(client)) for client in clients[:2]]
            await asyncio.gather(produce(clients[2], range(groups)), produce(clients[3], range(groups, 2 * groups)))
            while claimed.total() < 4 * groups:
                await asyncio.sleep(0)
            stats = await clients[2].run(control.stats(Session(lossy.controller, shared_memory=False)))
            for consumer in consumers:
                consumer.cancel()
            await asyncio.wait(consumers)
            for client in clients:
                client.close()
        assert set(claimed.values()) == {1}
        assert stats.tasks["only"].expired == 0
        assert lossy.cuts > 0


@pytest.mark.parametrize("word", [b"Hello", b"Prove", b"Admit", b"Write", b"Claim", b"Read", b"Ack", b"ReadTable"])
def test_a_request_whose_answer_is_lost_is_carried_out_once(far: Far, word: bytes) -> None:
    session = Session(far.controller, shared_memory=False)
    with SyncClient("tester", TOKEN, QUEUE, patience=PATIENCE) as client:
        for proxy in far.proxies:
            proxy.cut_after(bytes([0xA0 + len(word)]) + word, times=2)  # a string of msgpack
        before = far.cuts
        [row] = client.run(put_rows(session, group(1, prompt=LONG), timeout=LIMIT_S))
        claim = client.run(claim_rows(session, "only", limit=None, rank=None, timeout=LIMIT_S))
        assert [(own.id, len(own.cells["prompt_ids"])) for own in claim.rows] == [(row, LONG)]  # type: ignore[arg-type]
        client.run(ack_rows(session, claim, outputs(claim), timeout=LIMIT_S))
        stats = client.run(control.stats(session))
    assert far.cuts > before
    assert (stats.rows, stats.bytes, stats.tasks["only"].consumed, stats.tasks["only"].expired) == (0, 0, 1, 0)


def test_a_claim_whose_answer_is_lost_is_not_handed_to_another(far: Far) -> None:
    session = Session(far.controller, shared_memory=False)
    with SyncClient("tester", TOKEN, QUEUE, patience=PATIENCE) as client:
        for number in range(5):
            client.run(put_rows(session, group(number, 2, prompt=10), timeout=LIMIT_S))
            far.proxies[0].cut_after(b"Claim", times=1)
            claim = client.run(claim_rows(session, "only", limit=1, rank=None, timeout=LIMIT_S))
            rest = client.run(claim_rows(session, "only", limit=1, rank=None, timeout=LIMIT_S))
            assert [row.order for row in (*claim.rows, *rest.rows)] == [100 * number, 100 * number + 1]
        assert client.run(control.stats(session)).tasks["only"].leased == 10

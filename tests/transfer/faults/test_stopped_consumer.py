"""A consumer that is stopped while it holds rows blocks no other client, and its rows come back."""

import os
import signal
from pathlib import Path

from tailrace.config.transfer import ServiceQueueConfig
from tailrace.transfer.queue.client.look import read_stats
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tests.helpers.waiting import until
from tests.transfer.faults.auditor import Auditor
from tests.transfer.faults.rows import TABLE
from tests.transfer.faults.worker import TIMEOUT_S
from tests.transfer.faults.workers import Workers

GROUPS = 20
SILENCE_S = 4.0
"""The silence limit. Only the stopped consumer may be silent for so long."""


def test_rows_of_a_stopped_consumer_go_to_another_and_its_late_ack_is_refused(tmp_path: Path) -> None:
    with (
        QueueProcesses(ServiceQueueConfig(), TABLE, tmp_path) as processes,
        Workers(
            processes.connection, {"producer": f"produce {GROUPS}", "stopped": "stop"}, silence_s=SILENCE_S
        ) as workers,
    ):
        until(lambda: read_stats(processes.address, name="test", limit_s=TIMEOUT_S).tasks["work"].leased == 1)
        workers.start("consumer", "consume")
        auditor = Auditor(processes.address, silence_s=SILENCE_S)
        while len(auditor.groups) < GROUPS:
            auditor.audit()
        auditor.close()
        work = read_stats(processes.address, name="test", limit_s=TIMEOUT_S).tasks["work"]
        assert (work.expired, work.leased) == (1, 0)
        os.kill(workers.pids["stopped"], signal.SIGCONT)
        until(lambda: not workers.is_alive("stopped"))


def test_a_consumer_that_was_stopped_while_it_waited_gets_rows_when_it_goes_on(tmp_path: Path) -> None:
    with (
        QueueProcesses(ServiceQueueConfig(), TABLE, tmp_path) as processes,
        Workers(processes.connection, {"consumer": "consume"}, silence_s=SILENCE_S) as workers,
    ):

        def waiting() -> int:
            return read_stats(processes.address, name="test", limit_s=TIMEOUT_S).tasks["work"].claims

        until(lambda: waiting() == 1)
        os.kill(workers.pids["consumer"], signal.SIGSTOP)
        until(lambda: waiting() == 0)
        workers.start("producer", f"produce {GROUPS}")
        os.kill(workers.pids["consumer"], signal.SIGCONT)
        auditor = Auditor(processes.address, silence_s=SILENCE_S)
        while len(auditor.groups) < GROUPS:
            auditor.audit()
        auditor.close()

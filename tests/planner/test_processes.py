"""Candidates are simulated by processes, whose death is one line."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, cast

import pytest

from tailrace.errors import PlanError
from tailrace.planner.processes import Trial, _simulated_by


class Deadly:
    """Ends the process that reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_a_simulating_process_that_dies_is_one_line() -> None:
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(PlanError, match=r"^a process that simulated has died: this machine may have too little memory$"),
    ):
        _simulated_by(pool, [cast(Trial, Deadly())])

"""From an algorithm's configuration to the algorithm."""

from collections.abc import Callable
from typing import Any

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.table import Generate, Train
from tailrace.config.algorithm import AdapterAlgorithmConfig, AlgorithmConfig
from tailrace.config.columns import COLUMNS, PROMPT_COLUMNS
from tailrace.errors import UserError
from tailrace.host.user_code import check_call, load_callable

_KEY = "algorithm.path"


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that `config` describes.

    Raises:
        UserError: what an adapter's path names is not there, cannot be called, or makes no algorithm of this group size
            with one task that generates and one that trains.
    """
    if not isinstance(config, AdapterAlgorithmConfig):
        return Grpo(config)
    algorithm = load_algorithm_factory(config)(group_size=config.group_size, **config.options)
    if not isinstance(algorithm, Algorithm):
        raise UserError(
            f"{_KEY} {config.path!r} made a {type(algorithm).__name__}; it must make a "
            "tailrace.algorithms.base.Algorithm"
        )
    _check(algorithm, config)
    return algorithm


def load_algorithm_factory(config: AdapterAlgorithmConfig) -> Callable[..., Any]:
    """What `config` names, if it can be called as `make_algorithm` calls it.

    Raises:
        UserError: it cannot, or is not there.
    """
    factory = load_callable(_KEY, config.path)
    check_call(_KEY, config.path, factory, group_size=None, **config.options)
    return factory


def _check(algorithm: Algorithm, config: AdapterAlgorithmConfig) -> None:
    what = f"{_KEY} {config.path!r} made an algorithm"
    if algorithm.group_size != config.group_size:
        raise UserError(
            f"{what} of groups of {algorithm.group_size}, and algorithm.group_size is {config.group_size}; "
            "have it keep the group_size that it is given"
        )
    for work, pool in ((Generate, "rollout"), (Train, "trainer")):
        pools = [task.pool for task in algorithm.tasks if isinstance(task.work, work)]
        if len(pools) != 1:
            raise UserError(f"{what} with {len(pools)} tasks of work {work.__name__}; one task must do that")
        if pools != [pool]:
            raise UserError(f"{what} whose task of work {work.__name__} is in pool {pools[0]!r}; put it into {pool!r}")
    for name, kind in algorithm.columns.items():
        if COLUMNS.get(name, kind) != kind:
            raise UserError(
                f"{what} whose column {name!r} holds {kind}, and there is one that holds {COLUMNS[name]}; rename it"
            )
    written = {*PROMPT_COLUMNS, *(column for task in algorithm.tasks for column in task.writes)}
    for task in algorithm.tasks:
        for column in task.reads:
            if column not in written and column in {*COLUMNS, *algorithm.columns}:
                raise UserError(
                    f"{what} whose task {task.name!r} reads {column!r}, and no task writes it; add one that does"
                )

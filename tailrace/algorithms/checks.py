"""Checks that a run can work through an algorithm's table, which may be anybody's."""

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.table import TRAINED_ON, Generate, Score
from tailrace.config.columns import COLUMNS, PROMPT_COLUMNS
from tailrace.errors import UserError


def check_algorithm(algorithm: Algorithm, *, group_size: int, what: str) -> None:
    """Check an algorithm's table.

    `group_size`: the one that it was given. `what`: the beginning of an error message, which names its origin.

    Raises:
        UserError: the group size is another; the number of tasks that generate, or that train the policy, is not one;
            the policy's task does not read what every step needs; a task is in a pool where it cannot be; a column has
            two meanings, or no task writes it.
    """
    if algorithm.group_size != group_size:
        raise UserError(
            f"{what} of groups of {algorithm.group_size}, and algorithm.group_size is {group_size}; "
            "have it keep the group_size that it is given"
        )
    _check_policy(algorithm, what)
    _check_models(algorithm, what)
    _check_columns(algorithm, what)


def _check_policy(algorithm: Algorithm, what: str) -> None:
    generate = [task for task in algorithm.tasks if isinstance(task.work, Generate)]
    train = [task for task, work in algorithm.trained() if work.make_trainer is None]
    for does, tasks, pool in (("generate", generate, "rollout"), ("train the policy", train, "trainer")):
        if len(tasks) != 1:
            raise UserError(f"{what} with {len(tasks)} tasks that {does}; one task must do that")
        if tasks[0].pool != pool:
            raise UserError(f"{what} with task {tasks[0].name!r} in the pool {tasks[0].pool!r}; put it into {pool!r}")
    if missing := [column for column in TRAINED_ON if column not in train[0].reads]:
        raise UserError(
            f"{what} whose task {train[0].name!r} trains the policy and does not read {', '.join(missing)}; add them, "
            "or make it with tailrace.algorithms.table.actor"
        )


def _check_models(algorithm: Algorithm, what: str) -> None:
    pools = {task.name: task.pool for task, _ in algorithm.trained()}
    for task, _ in algorithm.other_models():
        if task.pool == "rollout" or list(pools.values()).count(task.pool) > 1:
            raise UserError(
                f"{what} whose task {task.name!r} trains a model in the pool {task.pool!r}, where another one is; "
                "give it a pool of its own"
            )
    for task in algorithm.tasks:
        if not isinstance(task.work, Score):
            continue
        if len(task.writes) != 1:
            raise UserError(f"{what} whose task {task.name!r} scores and writes {list(task.writes)}; name one column")
        if task.work.of is not None and pools.get(task.work.of) != task.pool:
            raise UserError(
                f"{what} whose task {task.name!r} scores with the model of {task.work.of!r}, and no task of that name "
                f"trains one in the pool {task.pool!r}"
            )


def _check_columns(algorithm: Algorithm, what: str) -> None:
    for name, kind in algorithm.columns.items():
        if COLUMNS.get(name, kind) != kind:
            raise UserError(
                f"{what} whose column {name!r} holds {kind}, and there is one that holds {COLUMNS[name]}; rename it"
            )
    known = {*COLUMNS, *algorithm.columns}
    written = {*PROMPT_COLUMNS, *(column for task in algorithm.tasks for column in task.writes)}
    for task in algorithm.tasks:
        for column in task.reads:
            if column in known - written:
                raise UserError(
                    f"{what} whose task {task.name!r} reads {column!r}, and no task writes it; add one that does"
                )

"""An algorithm's table: each task with the columns it reads and writes, its work, how it claims rows, and its pool.

A run knows an algorithm's tasks by the table alone. It makes the queue's columns and policies, the pools of worker
processes and the services in them from it. A task is one `TableTask`; its work is one of

    Generate      the engine makes a response            Grade     the recipe's grader judges a response
    Score         a model scores each token              Compute   a function of the rows of a group
    Train         the updates of a model                 Serve     a service of the algorithm's own
    AddUp         the sum of several rewards by name
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.config.algorithm import CriticConfig
from tailrace.config.queue_policies import FirstInConfig, PolicyConfig, TokenBudgetConfig, WholeGroupsConfig
from tailrace.config.run import RunConfig
from tailrace.types import TaskSpec

Cells = Mapping[str, Any]
"""Cells of one row, by column; each is a `Value`."""


@dataclass(frozen=True, slots=True)
class Generate:
    """The recipe's engine makes responses. A table has one task of this work, in the pool `rollout`."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The recipe's grader (`rewards`) makes rewards."""

    reward: str = ""
    """The reward of `rewards.graders`. Empty: that of `rewards.grader`, or of all `rewards.graders` together, for which
    a run has a task each (algorithms/rewards.py)."""


@dataclass(frozen=True, slots=True)
class AddUp:
    """The rewards of `rewards.graders`, which the task reads, are added up with their weights."""


@dataclass(frozen=True, slots=True)
class Score:
    """A model scores each token of a response. The task writes one column."""

    of: str | None = None
    """The task of work `Train`, in the same pool, whose trainer's `log_probs` makes the scores, such as the values of a
    critic. None: log-probabilities under the initial weights, which stay frozen.
    """


@dataclass(frozen=True, slots=True)
class Remake:
    """When a group is thrown away, and another prompt takes its place in the training step.

    The new group is generated while everything else goes on, so nothing waits for a second round.
    """

    wanted: Callable[[Sequence[Cells]], bool]
    """Whether a group is to be remade, from the cells that the task reads."""
    most: int
    """How often a place is remade. After that its group stays as it is."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A function computes columns of rows that belong together."""

    function: Callable[[Sequence[Cells]], Sequence[Cells]]
    """The function gets the cells that the task reads, of rows in the order of the run, so those of a group are
    adjacent. It returns the cells that the task writes, of the same rows. It is called in a thread, by one claim at a
    time.
    """
    of: Literal["group", "step"] = "group"
    """The rows that the function gets: each claimed row of one group, or all rows of a training step. The latter need
    `whole_steps` as `claims`. With `pipeline.streaming`, training then waits for the last response of its step.
    """
    remake: Remake | None = None
    """Groups that are remade, and not computed. With `of: group` alone."""


@dataclass(frozen=True, slots=True)
class Train:
    """A model is updated once for each training step, on the rows of that step, which are acked afterwards."""

    loss: Callable[[LossInputs], LossOutput]
    """The loss of a micro-batch."""
    make_trainer: Callable[[RunConfig, Path], Any] | CriticConfig | None = None
    """Makes the model's `tailrace.trainer.base.Trainer` from the run's configuration and the directory of its model. A
    `CriticConfig`: the model is Tailrace's own critic. None: the task trains the policy with the recipe's trainer
    (`trainer`). A table has one such task, in the pool `trainer`.
    """


@dataclass(frozen=True, slots=True)
class Serve:
    """A service of any other kind, which claims and acks rows itself."""

    make: "Callable[[Any, TableTask], Any]"
    """Called with a `tailrace.tasks.context.TaskContext` and the `TableTask`, in the process of the task. Returns (or
    is a coroutine that returns) an object whose `async run()` serves until the queue is closed.
    """
    uses_device: bool = False
    """Whether the service computes on the run's device."""


Work = Generate | Grade | AddUp | Score | Compute | Train | Serve

Claims = Callable[[RunConfig], PolicyConfig]
"""Chooses the policy by which a task claims rows, in a run of this configuration."""


def single_rows(config: RunConfig) -> PolicyConfig:
    """Claim each row as soon as it is ready."""
    return FirstInConfig(max_rows=1)


def one_group(config: RunConfig) -> PolicyConfig:
    """Claim one group as soon as it is ready as a whole."""
    return WholeGroupsConfig(max_groups=1)


def whole_groups(config: RunConfig) -> PolicyConfig:
    """Claim groups that are ready as a whole, at most a training step's worth."""
    return WholeGroupsConfig(max_groups=config.groups_per_step)


def shared_groups(config: RunConfig) -> PolicyConfig:
    """Claim whole groups, at most a rollout worker's share of a training step."""
    return WholeGroupsConfig(max_groups=config.groups_per_claim)


def whole_steps(config: RunConfig) -> PolicyConfig:
    """Claim all rows of a training step at once, one step after the other."""
    return TokenBudgetConfig(window=config.trainer.train_batch_size)


def training_batches(config: RunConfig) -> PolicyConfig:
    """Claim whole groups in the run's order: a training step's, or with `pipeline.streaming` a micro-batch's worth."""
    streaming = config.pipeline.streaming
    in_order = config.pipeline.in_order or not streaming
    return TokenBudgetConfig(
        tokens=config.trainer.micro_batch_tokens if streaming else None,
        window=1 if in_order else config.trainer.train_batch_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTask:
    """A task of an algorithm's table."""

    name: str
    """Unique in the table; also the task of its events."""
    reads: tuple[str, ...]
    """Columns that a row must have before the task can claim it."""
    writes: tuple[str, ...] = ()
    """Columns that its acks write."""
    work: Work
    claims: Claims = field(default=whole_groups)
    pool: str
    """The kind of its worker processes, with `pipeline.placement: separated`."""

    @property
    def spec(self) -> TaskSpec:
        """The part of the task that the queue knows."""
        return TaskSpec(name=self.name, reads=self.reads, writes=self.writes)


ROLLOUT = TableTask(
    name="rollout",
    reads=("prompt_ids", "task", "seed"),
    writes=("response_ids", "response_mask", "rollout_log_probs", "weight_versions", "response", "finish_reason"),
    work=Generate(),
    claims=shared_groups,
    pool="rollout",
)
REWARD = TableTask(
    name="reward",
    reads=("prompt", "question", "answer", "metadata", "response", "response_ids", "finish_reason"),
    writes=("reward", "reward_error", "reward_parts"),
    work=Grade(),
    claims=single_rows,
    pool="reward",
)
REFERENCE = TableTask(
    name="reference",
    reads=("prompt_ids", "response_ids"),
    writes=("ref_log_probs",),
    work=Score(),
    pool="reference",
)
TRAINED_ON = ("prompt_ids", "prompt", "answer", *ROLLOUT.writes, *REWARD.writes, "advantages")
"""Columns that the task of the policy reads: for the loss, the metrics, and people who look at samples."""


def compute(name: str, function: Callable[[Sequence[Cells]], Sequence[Cells]], **fields: Any) -> TableTask:
    """A task of work `Compute`, in the pool `reward` by default. `fields`: further fields of `TableTask`."""
    return TableTask(name=name, work=Compute(function), **{"pool": "reward", **fields})


def actor(loss: Callable[[LossInputs], LossOutput], *columns: str) -> TableTask:
    """The task that trains the policy. `columns`: further columns for the loss, each with a number per token."""
    return TableTask(
        name="actor", reads=(*TRAINED_ON, *columns), work=Train(loss), claims=training_batches, pool="trainer"
    )

"""An algorithm's table: each task with the columns it reads and writes, its work, how it claims rows, and its pool.

The table is all that a run knows of an algorithm's tasks: the queue's columns and policies, the pools of worker
processes and what serves in them are made from it. A task is one `TableTask`; its work is one of

    Generate      the engine makes a response            Grade     the recipe's grader judges a response
    Score         what a model says of each token        Compute   a function of the rows of a group
    Train         the updates of a model                 Serve     a service of the algorithm's own
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.config.queue_table import FirstInConfig, PolicyConfig, TokenBudgetConfig, WholeGroupsConfig
from tailrace.config.run import RunConfig
from tailrace.types import TaskSpec

Cells = Mapping[str, Any]
"""Cells of one row, by column; each is a `Value`."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Responses of the recipe's engine. A table has one task of this work, in the pool `rollout`."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Rewards of the recipe's grader (`rewards`)."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a model says of each token of a response, into the one column that the task writes."""

    of: str | None = None
    """The task of work `Train`, in the same pool, whose trainer's `log_probs` says it, such as the values of a critic.
    None: log-probabilities under the initial weights, which stay frozen."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A function of rows that belong together."""

    function: Callable[[Sequence[Cells]], Sequence[Cells]]
    """Called with the cells that the task reads, of each claimed row of one group, in the order of the run; returns
    the cells that it writes, of the same rows. It is called in a thread, by one claim at a time."""


@dataclass(frozen=True, slots=True)
class Train:
    """The updates of a model: one for each training step, on the rows of that step, which are acked when it is done."""

    loss: Callable[[LossInputs], LossOutput]
    """Of a micro-batch."""
    make_trainer: Callable[[RunConfig, Path], Any] | None = None
    """Makes the model's `tailrace.trainer.base.Trainer` from the run's configuration and the directory of its model.
    None: the policy's, which is the recipe's (`trainer`). A table has one task that trains the policy, in the pool
    `trainer`."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Whatever else: a service that claims and acks rows itself."""

    make: "Callable[[Any, TableTask], Any]"
    """Called with a `tailrace.tasks.context.TaskContext` and the `TableTask`, in the process that the task is in;
    returns (or is a coroutine that returns) an object whose `async run()` serves until the queue is closed."""
    uses_device: bool = False
    """Whether it computes on the run's device."""


Work = Generate | Grade | Score | Compute | Train | Serve

Claims = Callable[[RunConfig], PolicyConfig]
"""How a task chooses rows, in a run of this configuration."""


def single_rows(config: RunConfig) -> PolicyConfig:
    """Each row as soon as it is ready."""
    return FirstInConfig(max_rows=1)


def whole_groups(config: RunConfig) -> PolicyConfig:
    """Groups that are ready as a whole, a training step's worth at most."""
    return WholeGroupsConfig(max_groups=config.groups_per_step)


def shared_groups(config: RunConfig) -> PolicyConfig:
    """Whole groups, at most a rollout worker's share of a training step."""
    return WholeGroupsConfig(max_groups=config.groups_per_claim)


def training_batches(config: RunConfig) -> PolicyConfig:
    """Whole groups in the order of the run: a training step's, or with `pipeline.streaming` a micro-batch's worth."""
    streaming = config.pipeline.streaming
    in_order = config.pipeline.in_order or not streaming
    return TokenBudgetConfig(
        tokens=config.trainer.micro_batch_tokens if streaming else None,
        window=1 if in_order else config.trainer.train_batch_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTask:
    """One task of an algorithm."""

    name: str
    """Unique in the table; also the task of its events."""
    reads: tuple[str, ...]
    """Columns that a row has before the task is handed it."""
    writes: tuple[str, ...] = ()
    """Columns that its acks bring."""
    work: Work
    claims: Claims = field(default=whole_groups)
    pool: str
    """The kind of worker process that it is in, with `pipeline.placement: separated`."""

    @property
    def spec(self) -> TaskSpec:
        """What the queue knows of it."""
        return TaskSpec(name=self.name, reads=self.reads, writes=self.writes)


ROLLOUT = TableTask(
    name="rollout",
    reads=("prompt_ids", "seed"),
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
_TRAINED_ON = ("prompt_ids", "prompt", "answer", *ROLLOUT.writes, *REWARD.writes, "advantages")
"""Columns of every training task: for the loss, the metrics, and people who look at samples."""


def compute(name: str, function: Callable[[Sequence[Cells]], Sequence[Cells]], **fields: Any) -> TableTask:
    """A task of work `Compute`, in the pool `reward` unless `fields` say otherwise; they are those of `TableTask`."""
    return TableTask(name=name, work=Compute(function), **{"pool": "reward", **fields})


def actor(loss: Callable[[LossInputs], LossOutput], *columns: str) -> TableTask:
    """The task that trains the policy. `columns`: read beside the usual ones, for the loss, each a number per token."""
    return TableTask(
        name="actor", reads=(*_TRAINED_ON, *columns), work=Train(loss), claims=training_batches, pool="trainer"
    )

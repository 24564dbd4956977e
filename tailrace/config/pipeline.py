"""Schemas of the main loop and of its observation."""

from typing import Annotated, Literal

from pydantic import Field

from tailrace.config.base import Config, PathText


class PipelineConfig(Config):
    """The placement of tasks, and how they overlap."""

    placement: Literal["colocated", "separated"] = "colocated"
    """Colocated: engine and trainer share the device of one process, in turns. Separated: each kind of task has worker
    processes of its own; see `cluster`."""
    max_staleness: Annotated[int, Field(ge=0, le=10000)] = 0
    """Maximum staleness of a response: the number of actor updates by which the weights that train on it may be newer
    than the oldest that made it. 0 waits for each update before generating for the next."""
    streaming: bool = False
    """Off: the actor update waits for the whole batch. On: it takes each micro-batch as it fills, so
    `trainer.micro_batch_tokens` must be less than a batch has."""
    in_order: bool = False
    """For streaming only: train groups in the order of their prompts, not in the order in which they finish. The update
    is then bit-identical to the synchronous one. Needs one controller of the queue."""
    replay: PathText | None = None
    """A trace to play (`tailrace bench`): the responses of group k are as long as those of its group k, whatever the
    model says; waits of the recorded lengths stand for tools and graders. Evaluations are not touched. All machines
    read the file at this path."""


class ObserveConfig(Config):
    """The destinations of metrics, beside events.jsonl and the live display."""

    tensorboard: bool = True
    """Write TensorBoard files into the run's directory."""
    wandb_project: str | None = Field(default=None, min_length=1)
    """Log to this Weights & Biases project; needs `pip install wandb`."""
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Serve metrics to Prometheus at http://127.0.0.1:PORT/metrics while the run lasts; by default they are not
    served."""
    trace: bool = False
    """Write the lengths and times of all samples into workload.jsonl while the run goes on, as a trace of its workload
    without texts. `tailrace trace export` makes the same of any run afterwards."""
    breakdown: bool = True
    """Write events that divide the time of each worker into phases, and its memory by purpose; less than 1 % of a
    step."""
    plan: PathText | None = None
    """What `tailrace plan --output` has foretold of the run. The run takes the file along as plan.json, and its report
    compares the two. A relative path in the file of a recipe begins at the directory of that file."""
    sample_groups: Annotated[int, Field(ge=0, le=1000)] = 2
    """Number of groups of every step, and of prompts of each set of every evaluation, whose texts are kept in
    samples.jsonl; 0 keeps none."""
    sample_characters: Annotated[int, Field(ge=100, le=10_000_000)] = 20_000
    """Characters that are kept of a prompt, a response or an answer; longer ones keep their beginning and their end."""

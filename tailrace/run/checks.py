"""The checks of a recipe before anything is started or written, in this order.

    lengths     a trace is there, where its lengths are to be known             _check_lengths
    algorithm   its table, and the pools that the recipe gives for it           make_algorithm, run_pools
    device      it exists, and pools that compute on a GPU reserve one          check_gpus, prepare_torch
    sinks       the sinks that observe the run can be opened                    check_sinks
    queue       it can be served here, or the running one has this table        check_queue, check_whole_steps
    inputs      engine, sampling, model, trainer, prompts, room in the cache    load_inputs
    best        the run's evaluations can say which checkpoint is the best      check_keep_best

The grader's answers are checked later, when graders have started; see `tailrace.rewards.answers`.
"""

from collections.abc import Mapping

import torch

from tailrace.cluster.room import check_this_machine
from tailrace.config.cluster import PoolConfig
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError
from tailrace.host.compute import prepare_torch
from tailrace.report.sinks import check_sinks
from tailrace.run.inputs import Inputs, load_inputs
from tailrace.run.keep_best import check_keep_best
from tailrace.run.queue import check_queue, run_table
from tailrace.run.workers.pools import check_whole_steps, run_pools
from tailrace.run.workers.settings import check_gpus
from tailrace.transfer.weights.segments import check_shared_memory


def check_recipe(config: RunConfig, lent: Mapping[str, PoolConfig] | None = None, *, here: bool = True) -> Inputs:
    """Check that a run of `config` can begin on this machine, and load its inputs.

    Args:
        lent: the pools of a training loop of the caller's own. Such a loop has no sinks but files.
        here: whether this machine has the run's device; another machine's cannot be checked.

    Raises:
        UserError: the run cannot begin. The message says which key to change.
    """
    _check_lengths(config)
    pools = run_pools(config) if lent is None else lent
    if config.pipeline.placement == "separated":
        check_gpus(config, pools)
    elif here:
        prepare_torch(config.device, config.threads)
    if lent is None:
        check_sinks(config.observe)
    check_whole_steps(config, check_queue(config.queue, run_table(config)))
    inputs = load_inputs(config, here=here)
    if lent is None:
        check_keep_best(config, list(inputs.prompts.evaluated))
    return inputs


def _check_lengths(config: RunConfig) -> None:
    """Check that the lengths of a trace are there, where they are asked for. A benchmark or a simulation plays one."""
    lengths = config.rollout.lengths
    if lengths is not None and lengths.type == "oracle" and config.pipeline.replay is None:
        raise ConfigError(
            "rollout.lengths.type oracle takes the lengths of a trace, and pipeline.replay gives none; use siblings, "
            "history or features"
        )


def check_place(config: RunConfig) -> None:
    """Check that this machine can hold the workers of a run, where they are to be here. A run asks Ray for that.

    Raises:
        UserError: it cannot.
    """
    if config.pipeline.placement == "separated" and config.cluster.address is None:
        check_this_machine(run_pools(config), gpus=torch.cuda.device_count())
        check_shared_memory()

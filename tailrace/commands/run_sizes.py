"""The sizes of what a recipe names, for arithmetic without a search."""

from collections.abc import Sequence

from tailrace.config.run import RunConfig
from tailrace.engine.factory import make_backend
from tailrace.planner.sized_run import Prompts, SizedRun
from tailrace.planning.model_shape.base import ModelShape
from tailrace.run.workers.pools import run_pools


def sized(config: RunConfig, shape: ModelShape, prompt_tokens: Sequence[int]) -> SizedRun:
    """Return a recipe with its sizes. `prompt_tokens`: of each prompt to train on.

    Raises:
        UserError: an engine cannot be made here, or `cluster.pools` does not go with the algorithm.
    """
    return SizedRun(
        config=config,
        shape=shape,
        engines={pool: make_backend(engine).size for pool, engine in config.engines.items()},
        prompts=Prompts.of(prompt_tokens),
        pools=run_pools(config),
    )

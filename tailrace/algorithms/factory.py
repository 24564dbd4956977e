"""Makes an algorithm from its configuration."""

from collections.abc import Callable, Mapping
from typing import Any

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.checks import check_algorithm
from tailrace.algorithms.cispo import Cispo
from tailrace.algorithms.dapo import Dapo
from tailrace.algorithms.dr_grpo import DrGrpo
from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.gspo import Gspo
from tailrace.algorithms.max_rl import MaxRl
from tailrace.algorithms.ppo import Ppo
from tailrace.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from tailrace.algorithms.rewards import WithRewards
from tailrace.algorithms.rloo import Rloo
from tailrace.config.algorithm import (
    AdapterAlgorithmConfig,
    AlgorithmConfig,
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    MaxRlConfig,
    PolicyGradientConfig,
    PpoConfig,
    ReinforcePlusPlusConfig,
    RlooConfig,
)
from tailrace.config.run import RunConfig
from tailrace.errors import UserError
from tailrace.host.user_code import check_made, load_factory, making

_KEY = "algorithm.path"
_MADE: Mapping[type[PolicyGradientConfig], Callable[[Any], Algorithm]] = {
    GrpoConfig: Grpo,
    DrGrpoConfig: DrGrpo,
    RlooConfig: Rloo,
    ReinforcePlusPlusConfig: ReinforcePlusPlus,
    GspoConfig: Gspo,
    CispoConfig: Cispo,
    DapoConfig: Dapo,
    MaxRlConfig: MaxRl,
    PpoConfig: Ppo,
}
"""The algorithms of the package, by the schema of their section."""


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Make the algorithm that `config` describes.

    Raises:
        UserError: an adapter's path names nothing, or something that cannot be called or makes no algorithm; or see
            `check_algorithm`.
    """
    if isinstance(config, AdapterAlgorithmConfig):
        return _open_adapter(config)
    return _MADE[type(config)](config)


def make_run_algorithm(config: RunConfig) -> Algorithm:
    """Make the algorithm of a run, with the tasks of the recipe's rewards. A replay has those of the trace alone.

    Raises:
        UserError: see `make_algorithm`.
    """
    algorithm = make_algorithm(config.resolved_algorithm)
    return WithRewards(algorithm, config.rewards) if config.pipeline.replay is None else algorithm


def _open_adapter(config: AdapterAlgorithmConfig) -> Algorithm:
    make = load_algorithm_factory(config)
    with making(f"{_KEY} {config.path!r}", UserError):
        made = make(group_size=config.group_size, **config.options)
    algorithm = check_made(_KEY, config.path, made, Algorithm)  # type: ignore[type-abstract]
    check_algorithm(algorithm, group_size=config.group_size, what=f"{_KEY} {config.path!r} made an algorithm")
    return algorithm


def load_algorithm_factory(config: AdapterAlgorithmConfig) -> Callable[..., Any]:
    """Load the function that `config` names, if `make_algorithm` can call it.

    Raises:
        UserError: it is missing, or cannot be called so.
    """
    return load_factory(_KEY, config.path, group_size=None, **config.options)

"""Draws the training steps that are simulated, and checks that the model and the recipe let them be made."""

from tailrace.config.cluster import ROLLOUT, pool_key
from tailrace.config.engine import NativeEngineConfig, VllmEngineConfig
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError
from tailrace.planning.model_shape.base import ModelShape
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.base import Workload


def draw_steps(workload: Workload, config: RunConfig, shape: ModelShape, *, steps: int) -> Replay:
    """Draw so many training steps of a recipe, by its seed.

    Raises:
        PlanError: a sample is longer than the model's context or an engine's `max_model_len`, or a response than the
            recipe lets it be. A cut one would be of another workload.
        TraceError: the workload has no such groups.
    """
    trace = workload.sample(
        steps=steps, groups=config.groups_per_step, group_size=config.algorithm.group_size, seed=config.seed
    )
    drawn = Replay.of(trace)
    longest = drawn.longest_sample
    if longest > shape.context:
        raise PlanError(
            f"the workload {workload.name!r} has a sample of {longest} tokens, and the context of {shape.name} is "
            f"{shape.context}; use a model with a longer context, or another workload"
        )
    for name, engine in config.engines.items():
        most = engine.max_model_len if isinstance(engine, NativeEngineConfig | VllmEngineConfig) else None
        if most is not None and longest > most:
            key = "engine" if name == ROLLOUT else f"{pool_key(name)}.engine"
            raise PlanError(
                f"the workload {workload.name!r} has a sample of {longest} tokens, and {key}.max_model_len is {most}; "
                "raise it, or use another workload"
            )
    response, limit = drawn.longest_response, config.sampling.max_new_tokens
    if response > limit:
        raise PlanError(
            f"the workload {workload.name!r} has a response of {response} tokens, and sampling.max_new_tokens is "
            f"{limit}; raise it, such as sampling.max_new_tokens={1 << (response - 1).bit_length()}, or use another "
            "workload"
        )
    return drawn

"""What a workload may ask of a model and a recipe."""

from tailrace.config.run import RunConfig
from tailrace.errors import PlanError
from tailrace.planning.model_shape.base import ModelShape
from tailrace.workloads.replay import Replay


def check_lengths(replay: Replay, workload: str, config: RunConfig, shape: ModelShape) -> None:
    """Check that every sample of a workload can be made: a cut one would be another workload.

    Raises:
        PlanError: one is longer than the model's context, or a response than the recipe lets it be.
    """
    scripts = [script for group in replay.groups for script in group]
    longest = max(script.prompt_tokens + script.tokens for script in scripts)
    if longest > shape.context:
        raise PlanError(
            f"the workload {workload!r} has a sample of {longest} tokens, and the context of {shape.name} is "
            f"{shape.context}; use a model with a longer context, or another workload"
        )
    response, limit = max(script.tokens for script in scripts), config.sampling.max_new_tokens
    if response > limit:
        raise PlanError(
            f"the workload {workload!r} has a response of {response} tokens, and sampling.max_new_tokens is {limit}; "
            "raise it, or use another workload"
        )

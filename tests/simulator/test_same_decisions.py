"""A simulated run decides by the very functions of a real one: there is no second copy of any."""

import pytest

from tailrace.rollout import service
from tailrace.run import generation
from tailrace.simulator import run, setup
from tailrace.simulator import service as simulated_service
from tailrace.tasks import prompts, rollout
from tailrace.trainer import packing
from tailrace.transfer.weights import sender_service

SHARED = {
    "admission of prompts": (prompts.oldest_version, run.oldest_version),
    "weights that may begin a response": (rollout.oldest_version, run.oldest_version),
    "placement of prompts": (generation.make_policy, run.make_policy),
    "when a placement is outdated": (service.is_outdated, simulated_service.is_outdated),
    "moves of running responses": (service.moves, simulated_service.moves),
    "how often responses may move": (service.EVERY_S, simulated_service.EVERY_S),
    "samples of a micro-batch": (packing.packing.plan_micro_batches, run.plan_micro_batches),
    "the tree of weights": (sender_service.broadcast_tree, setup.broadcast_tree),
}


@pytest.mark.parametrize("decision", SHARED)
def test_a_decision_is_one_object_in_both(decision: str) -> None:
    real, simulated = SHARED[decision]
    assert real is simulated

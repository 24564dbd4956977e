"""A simulated run decides by the very functions of a real one: there is no second copy of any."""

from types import ModuleType

import pytest

from tailrace.engine import arrangement
from tailrace.engine.adaptive_tp import adaptive
from tailrace.engine.backends import native
from tailrace.engine.scheduling import transplant, waiting
from tailrace.rollout import jobs, service
from tailrace.run import fleet, generation, lengths
from tailrace.simulator import batch, engines, passes, replicas, run, scorer, setup, tp
from tailrace.simulator import fleet as simulated_fleet
from tailrace.simulator import lengths as simulated_lengths
from tailrace.simulator import service as simulated_service
from tailrace.simulator import trainer as simulated_trainer
from tailrace.tasks import prompts, rollout
from tailrace.trainer import packing
from tailrace.transfer.queue.policies import token_budget
from tailrace.transfer.weights import sender_service

SHARED: list[tuple[str, ModuleType, ModuleType]] = [
    ("oldest_version", prompts, run),
    ("oldest_version", rollout, run),
    ("make_policy", generation, run),
    ("is_outdated", service, simulated_service),
    ("is_cheap_to_split", service, simulated_service),
    ("moves", service, simulated_service),
    ("at_once", service, simulated_service),
    ("recompute_s", service, simulated_service),
    ("transfer_s", service, simulated_service),
    ("EVERY_S", service, simulated_service),
    ("broadcast_tree", sender_service, setup),
    ("priority", service, simulated_service),
    ("SCOUT", service, simulated_service),
    ("make_predictor", lengths, simulated_lengths),
    ("StepWatch", fleet, simulated_fleet),
    ("Elasticity", fleet, simulated_fleet),
    ("predicted", fleet, simulated_fleet),
    ("decided", fleet, simulated_fleet),
    ("scale_event", fleet, simulated_fleet),
    ("StagedTP", adaptive, tp),
    ("adaptive_tp_event", native, tp),
    ("merge", transplant, replicas),
    ("Dispatcher", arrangement, engines),
    ("handed_on", waiting, batch),
    ("in_engine", jobs, engines),
    ("Claim", token_budget, simulated_trainer),
]
"""Decisions by name, where a real run and where a simulated one takes them."""


@pytest.mark.parametrize(("decision", "real", "simulated"), SHARED)
def test_a_decision_is_one_object_in_both(decision: str, real: ModuleType, simulated: ModuleType) -> None:
    assert getattr(real, decision) is getattr(simulated, decision)


def test_micro_batches_are_planned_by_one_function() -> None:
    assert vars(packing)["packing"].plan_micro_batches is vars(scorer)["plan_micro_batches"]
    assert vars(packing)["packing"].rank_micro_batches is vars(passes)["rank_micro_batches"]

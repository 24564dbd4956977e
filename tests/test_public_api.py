"""The names that users may import. To remove or move one breaks their programs: change this list on purpose only."""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest

import tailrace

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PUBLIC = {
    "tailrace": {"FitResult", "Trainer"},
    # for programs beside a run
    "tailrace.errors": {"QueueClosed", "QueueError", "StorageFull", "TailraceError", "UserError"},
    "tailrace.types": {"FinishReason", "Prompt", "Request", "Sample"},
    "tailrace.transfer.queue.address": {"QueueAddress"},
    "tailrace.transfer.queue.base": {"Claim", "NewRow", "Row", "TransferQueue"},
    "tailrace.transfer.queue.client.remote": {"RemoteQueue"},
    "tailrace.transfer.queue.client.sync_queue": {"SyncQueue"},
    "tailrace.transfer.queue.adapters.dataset": {"StreamingDataset"},
    "tailrace.transfer.queue.adapters.experience": {"Experience"},
    "tailrace.transfer.queue.adapters.group": {"GroupLoader"},
    "tailrace.transfer.queue.adapters.tensors": {"Pad"},
    "tailrace.transfer.queue.processes.added": {"add_unit", "remove_unit"},
    "tailrace.conformance.storage": {"StorageContract"},
    "tailrace.transfer.queue.storage.adapter": {"StorageArgs"},
    "tailrace.transfer.queue.storage.keyed": {"KeyedStorage"},
    # algorithms
    "tailrace.algorithms.advantages": {"group_normalized"},
    "tailrace.algorithms.base": {"Algorithm"},
    "tailrace.algorithms.grpo": {"Grpo"},
    "tailrace.algorithms.loss_inputs": {"LossInputs", "LossOutput"},
    "tailrace.algorithms.losses": {"policy_loss", "masked_sum"},
    "tailrace.algorithms.surrogates": {"clipped"},
    "tailrace.algorithms.table": {
        "REFERENCE",
        "REWARD",
        "ROLLOUT",
        "Compute",
        "Generate",
        "Grade",
        "Score",
        "Serve",
        "TableTask",
        "Train",
        "actor",
        "compute",
        "shared_groups",
        "single_rows",
        "training_batches",
        "whole_groups",
    },
    "tailrace.config.algorithm": {"GrpoConfig"},
    "tailrace.config.columns": {"ColumnKind"},
    # plans
    "tailrace.config.load": {"load_config"},
    "tailrace.planner": {"Problem", "plan"},
    "tailrace.planning.hardware.clusters": {"open_cluster"},
    "tailrace.planning.model_shape.catalogue": {"find_shape"},
    "tailrace.workloads.samplers.factory": {"open_workload"},
    # tasks
    "tailrace.tasks.base": {"Task"},
    "tailrace.tasks.context": {"TaskContext"},
    # engines and trainers
    "tailrace.config.engine": {"AdapterEngineConfig", "NativeEngineConfig", "SamplingConfig"},
    "tailrace.config.trainer": {"AdapterTrainerBackend", "TrainerConfig"},
    "tailrace.conformance.engine": {"EngineContract"},
    "tailrace.conformance.loss": {"LossContract", "PolicyLossContract"},
    "tailrace.conformance.loss_cases": {"ClosedForm"},
    "tailrace.conformance.trainer": {"TrainerContract"},
    "tailrace.engine.base": {"Engine", "EngineArgs"},
    "tailrace.engine.driver": {"Core", "DrivenEngine"},
    "tailrace.engine.factory": {"make_engine"},
    "tailrace.engine.model.weights": {"read_weights"},
    "tailrace.engine.one_by_one": {"End", "OneByOneCore"},
    "tailrace.trainer.base": {"Trainer", "TrainerArgs", "TrainSample", "UpdateResult"},
    "tailrace.trainer.backends.single": {"SingleTrainer"},
}


def test_the_package_exports_what_a_program_starts_with() -> None:
    assert set(tailrace.__all__) == PUBLIC["tailrace"]
    assert all(getattr(tailrace, name).__module__ == "tailrace.api" for name in tailrace.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        tailrace.Trainr  # noqa: B018


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_public_names_are_where_they_were(module: str) -> None:
    assert [name for name in sorted(PUBLIC[module]) if not hasattr(importlib.import_module(module), name)] == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_pages_import_public_names_only(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(textwrap.dedent(code))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tailrace":
                names = {alias.name for alias in node.names}
                assert names <= PUBLIC.get(node.module or "", set()), f"{page.name}: {node.module}"

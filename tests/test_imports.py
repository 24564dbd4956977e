"""Imports point one way, and modules that must start fast import nothing heavy."""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tools.layers import ROOMS, picture, room_of, type_only

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tailrace").rglob("*.py"))
NO_TORCH = {
    "errors",
    "events",
    "activity",
    "config",
    "registers",
    "types",
    "rewards",
    "prompts",
    "planner",
    "planning",
    "workloads",
    "report",
    "cluster",
    "simulator",
}


def top_room(path: Path) -> str:
    return room_of(path.relative_to(ROOT), "tailrace")


@cache
def imports(path: Path) -> tuple[str, ...]:
    """The dotted names that a file imports, except under TYPE_CHECKING."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    hidden = type_only(tree)
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (
                [f"tailrace.{a.name}" for a in node.names] if node.module == "tailrace" else [node.module or ""]
            )


@pytest.mark.parametrize("folder", ROOMS)
def test_a_room_imports_only_what_its_rule_says(folder: str) -> None:
    prefix = folder.replace("/", ".") + "."
    for path in FILES:
        if path.is_relative_to(ROOT / folder):
            room = room_of(path.relative_to(ROOT), folder)
            used = {name.removeprefix(prefix).split(".")[0] for name in imports(path) if name.startswith(prefix)}
            assert used & set(ROOMS[folder]) <= ROOMS[folder].get(room, set()) | {room}, path


@pytest.mark.parametrize("folder", ROOMS)
def test_every_file_is_in_a_room_with_a_rule(folder: str) -> None:
    rooms = {room_of(path.relative_to(ROOT), folder) for path in FILES if path.is_relative_to(ROOT / folder)}
    assert rooms - {"__init__"} == set(ROOMS[folder]) - {"__init__"}


@pytest.mark.parametrize("folder", ROOMS)
def test_no_room_can_be_imported_in_a_circle(folder: str) -> None:
    assert list(TopologicalSorter(ROOMS[folder]).static_order())


def test_the_page_shows_the_rules() -> None:
    assert f"```\n{picture()}\n```" in (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("package", sorted(NO_TORCH))
def test_a_torchless_package_never_imports_torch(package: str) -> None:
    for path in FILES:
        if top_room(path) == package:
            assert "torch" not in {name.split(".")[0] for name in imports(path)}, path


def test_only_the_cluster_package_imports_ray() -> None:
    importers = {top_room(path) for path in FILES if "ray" in {n.split(".")[0] for n in imports(path)}}
    assert importers <= {"cluster"}


def test_only_the_conformance_tests_need_pytest_and_nothing_needs_them() -> None:
    for path in FILES:
        if top_room(path) != "conformance":
            forbidden = [name for name in imports(path) if re.match(r"_?pytest|tailrace\.conformance", name)]
            assert not forbidden, path


@pytest.mark.parametrize(
    "module",
    [
        "tailrace.cli",
        "tailrace.config.load",
        "tailrace.types",
        "tailrace.events",
        "tailrace.api",
        "tailrace.run.workers.base",
    ],
)
def test_what_computes_nothing_loads_without_torch(module: str) -> None:
    heavy = {"torch", "transformers", "polars", "plotly", "scipy"}
    code = f"import sys, {module}; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("module", ["tailrace.planner", "tailrace.simulator.run", "tailrace.simulator.setup"])
def test_a_plan_is_made_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rollout_worker_opens_its_engine_without_transformers_and_polars(tiny_model: TinyModel) -> None:
    code = """
        import asyncio, sys
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path

        import tailrace.run.workers.rollout
        from tailrace.config.engine import NativeEngineConfig
        from tailrace.engine.checks import check_engine
        from tailrace.engine.opening import open_engine

        async def main(model):
            config = NativeEngineConfig(kv_cache_gib=0.01)
            check_engine(config, model, device="cpu")
            with ThreadPoolExecutor(1) as executor:
                engine = await open_engine(config, model, device="cpu", executor=executor)
                await engine.close()

        asyncio.run(main(Path(sys.argv[1])))
        sys.exit(bool({"transformers", "polars"} & set(sys.modules)))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tiny_model("llama"))], check=True, timeout=120)


def test_a_storage_unit_starts_without_the_schemas() -> None:
    code = """
        import sys
        from types import SimpleNamespace
        import tailrace.transfer.queue.processes.serve
        from tailrace.transfer.queue.storage.factory import make_storage

        make_storage(SimpleNamespace(type="arena", directory="/dev/shm", max_bytes=2**20), name="unit").close()
        sys.exit("pydantic" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_a_grading_process_starts_without_the_schemas_and_what_they_need() -> None:
    code = """
        import sys
        from types import SimpleNamespace
        import tailrace.rewards.function, tailrace.rewards.serve
        from tailrace.rewards.factory import make_grader

        make_grader(SimpleNamespace(type="exact", ignore_case=False))
        make_grader(SimpleNamespace(type="regex", pattern="x", match="last"))
        sys.exit(bool({"pydantic", "yaml", "asyncio", "numpy", "torch"} & set(sys.modules)))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_advantages_are_computed_without_torch() -> None:
    code = """
        import sys
        from tailrace.algorithms.factory import make_algorithm
        from tailrace.config.algorithm import GrpoConfig

        rows = [{"reward": 0.0, "response_mask": [1]}, {"reward": 1.0, "response_mask": [1, 1]}]
        (task,) = (task for task in make_algorithm(GrpoConfig()).tasks if task.name == "advantage")
        assert task.work.function(rows)
        sys.exit("torch" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)

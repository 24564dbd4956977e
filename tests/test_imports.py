"""Imports point one way, and what must start fast imports nothing heavy."""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tailrace"

ALLOWED = {
    "types": {"config"},
    "events": {"errors"},
    "samples": {"errors", "events"},
    "activity": {"events"},
    "metrics_server": {"errors"},
    "errors": set(),
    "cpu": set(),
    "descendants": set(),
    "patterns": set(),
    "streams": {"errors"},
    "user_code": {"errors"},
    "config": {"errors", "types", "cpu", "patterns"},
    "algorithms": set(),
    "rewards": set(),
    "prompts": set(),
    "models": set(),
    "planning": set(),
    "transfer": {"planning"},
    "engine": {"planning", "models"},
    "rollout": {"engine", "transfer", "planning", "prompts"},
    "trainer": {"transfer", "algorithms", "models"},
    "tasks": {"transfer", "algorithms", "rewards"},
    "report": set(),
    "cluster": {"transfer"},
    "conformance": {"engine", "trainer", "algorithms"},
    "workers": {
        "cluster",
        "transfer",
        "engine",
        "rollout",
        "trainer",
        "tasks",
        "algorithms",
        "rewards",
        "models",
        "assembly",
        "preparation",
        "checkpointing",
        "run_queue",
    },
}
"""What each package may import beside itself and, above L0, the L0 modules."""
L0 = {
    "types",
    "events",
    "samples",
    "activity",
    "metrics_server",
    "errors",
    "cpu",
    "descendants",
    "patterns",
    "streams",
    "config",
    "user_code",
    "allocator",
    "cache",
}
NO_TORCH = {
    "types",
    "events",
    "samples",
    "activity",
    "metrics_server",
    "errors",
    "cpu",
    "descendants",
    "patterns",
    "config",
    "user_code",
    "rewards",
    "prompts",
    "planning",
    "report",
    "cluster",
}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere but under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
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


FILES = sorted(path for path in ROOT.rglob("*.py") if package_of(path) in ALLOWED)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    allowed = ALLOWED[package] | {package} | (set() if package in L0 else L0)
    for path in FILES:
        if package_of(path) == package:
            internal = {name.split(".")[1] for name in imports(path) if name.startswith("tailrace.")}
            assert internal <= allowed, f"{path.relative_to(ROOT)} imports {internal - allowed}"


@pytest.mark.parametrize("package", sorted(NO_TORCH))
def test_a_torchless_package_never_imports_torch(package: str) -> None:
    for path in FILES:
        if package_of(path) == package:
            assert "torch" not in {name.split(".")[0] for name in imports(path)}, path


def test_only_the_cluster_package_imports_ray() -> None:
    importers = {package_of(path) for path in ROOT.rglob("*.py") if "ray" in {n.split(".")[0] for n in imports(path)}}
    assert importers <= {"cluster"}


def test_every_package_has_a_rule() -> None:
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert packages <= set(ALLOWED)


def test_only_the_conformance_tests_need_pytest_and_nothing_needs_them() -> None:
    for path in ROOT.rglob("*.py"):
        if package_of(path) != "conformance":
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
        "tailrace.run.workers.reward",
    ],
)
def test_what_computes_nothing_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'polars', 'plotly'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_advantages_are_computed_without_torch() -> None:
    code = """
        import sys
        from tailrace.algorithms.factory import make_algorithm
        from tailrace.config.algorithm import GrpoConfig

        assert make_algorithm(GrpoConfig()).advantages([0.0, 1.0])
        sys.exit("torch" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)

"""Environments of the peers, whose packages would not install beside ours."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def peer_python(build: Path, packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment in `build` that has `packages`; it is made on first use."""
    environment = build / "venv"
    python = environment / "bin" / "python"
    ready, wanted = environment / ".ready", "\n".join(packages)
    if not ready.exists() or ready.read_text() != wanted:
        print(f"setting up {', '.join(packages)} in {environment}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        ready.write_text(wanted)
    return python

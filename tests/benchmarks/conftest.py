"""Make the benchmarks' modules importable: benchmarks are programs, and their modules lie beside them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

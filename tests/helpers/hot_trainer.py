"""A trainer of somebody's own whose log-probabilities are of another temperature than that of sampling."""

from pathlib import Path
from typing import Any

from tailrace.trainer.backends.single import SingleTrainer


def make(model_dir: Path, config: Any, *, temperature: float, factor: float, **options: Any) -> SingleTrainer:
    """`factor`: of the temperature."""
    return SingleTrainer(model_dir, config, temperature=factor * temperature, **options)

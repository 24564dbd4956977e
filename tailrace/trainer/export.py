"""Exports the trained weights as a Hugging Face directory."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from tailrace.trainer.checkpoint import new_directory

WEIGHTS = "model.safetensors"
_SUFFIXES = (".json", ".jinja", ".txt", ".model")


def export_model(
    model_dir: Path, directory: Path, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> None:
    """Write `weights` beside the configuration and the tokenizer of the initial checkpoint, atomically.

    Args:
        model_dir: the initial checkpoint.
        directory: the directory to write; replaced if it exists.
        weights: under their HF names, tied weights once.
        dtype: to convert to; None takes the initial checkpoint's.

    Raises:
        CheckpointError: it cannot be written.
    """
    dtype = dtype or export_dtype(model_dir, None)
    with new_directory(directory) as partial:
        for path in sorted(model_dir.iterdir()):
            if path.suffix in _SUFFIXES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
        _set_dtype(partial / "config.json", dtype)
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights}
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(partial / "config.json", partial / WEIGHTS)  # safetensors makes it readable by its owner alone


def export_dtype(model_dir: Path, generated_in: str | None) -> torch.dtype:
    """The dtype of an export: the initial checkpoint's, or a wider one if an engine has computed in `generated_in`.

    The wider one keeps every bit that such an engine has read of the master weights. So an exported model answers as
    the run's last evaluation did.
    """
    own: torch.dtype = AutoConfig.from_pretrained(model_dir).dtype or torch.float32
    return own if generated_in is None else torch.promote_types(own, getattr(torch, generated_in))


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

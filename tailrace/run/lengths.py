"""The predictor of lengths of a run, with what it may know before its first step."""

from pathlib import Path

from tailrace.config.model import ModelConfig
from tailrace.config.rollout import LengthsConfig, ModelLengths, OracleLengths
from tailrace.errors import ConfigError
from tailrace.models.encoder import Encoder, tokenizer_identity
from tailrace.models.resolve import resolve_model
from tailrace.planning.lengths.base import LengthPredictor
from tailrace.planning.lengths.factory import make_predictor
from tailrace.planning.lengths.ranker import unpack


def make_lengths(config: LengthsConfig, model_dir: Path) -> LengthPredictor:
    """Make the predictor of a recipe.

    Args:
        config: of the kind.
        model_dir: the model that the run starts from.

    Raises:
        ConfigError: its ranker cannot be read, or is of another kind, tokenizer or model.
        ModelError: its model cannot be found, or lacks the layer.
    """
    encoder = None
    if isinstance(config, ModelLengths):
        directory = (
            model_dir if config.path is None else resolve_model(ModelConfig(path=config.path), "rollout.lengths")
        )
        encoder = Encoder(directory, layer=config.layer)
    predictor = make_predictor(config, encoder)
    predictor.knowledge += f", lengths with the tokenizer {tokenizer_identity(model_dir)}"
    if not isinstance(config, OracleLengths) and config.ranker is not None:
        try:
            unpack(Path(config.ranker).read_bytes(), predictor)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"rollout.lengths.ranker {config.ranker} cannot be used: {why}; "
                f"make one for this recipe with tailrace rank fit"
            ) from None
    return predictor

"""Makes the predictor of a recipe's `rollout.lengths`."""

from tailrace.config.rollout import (
    FeaturesLengths,
    HistoryLengths,
    LambdarankLengths,
    LengthsConfig,
    ModelLengths,
    OracleLengths,
    SiblingsLengths,
)
from tailrace.planning.lengths.base import Encoder, LengthPredictor
from tailrace.planning.lengths.features import Features
from tailrace.planning.lengths.hidden_states import HiddenStates
from tailrace.planning.lengths.history import History, Siblings
from tailrace.planning.lengths.lambdarank import Lambdarank
from tailrace.planning.lengths.oracle import Oracle


def make_predictor(config: LengthsConfig, encoder: Encoder | None = None) -> LengthPredictor:
    """Make the predictor of this kind, without knowledge. `encoder`: of `ModelLengths`, which needs one."""
    match config:
        case HistoryLengths():
            return History(discount=config.discount)
        case SiblingsLengths():
            return Siblings(discount=config.discount)
        case FeaturesLengths():
            return Features(words=config.words, discount=config.discount)
        case LambdarankLengths():
            return Lambdarank(words=config.words, most=config.newest)
        case ModelLengths():
            assert encoder is not None
            return HiddenStates(encoder, discount=config.discount)
        case OracleLengths():
            return Oracle()

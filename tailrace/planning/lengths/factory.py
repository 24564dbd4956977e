"""Makes the predictor of a recipe's `rollout.lengths`."""

from tailrace.config.rollout import FeaturesLengths, HistoryLengths, LengthsConfig, OracleLengths, SiblingsLengths
from tailrace.planning.lengths.base import LengthPredictor
from tailrace.planning.lengths.features import Features
from tailrace.planning.lengths.history import History, Siblings
from tailrace.planning.lengths.oracle import Oracle


def make_predictor(config: LengthsConfig) -> LengthPredictor:
    """Make the predictor of this kind, without knowledge."""
    match config:
        case HistoryLengths():
            return History(discount=config.discount)
        case SiblingsLengths():
            return Siblings(discount=config.discount)
        case FeaturesLengths():
            return Features(words=config.words, penalty=config.penalty, discount=config.discount)
        case OracleLengths():
            return Oracle()

"""What a predictor has learned is read by those of its kind alone."""

import math
import random
from typing import Any

import msgspec
import pytest

from tailrace.planning.lengths.base import Asked, Finished, LengthPredictor
from tailrace.planning.lengths.features import Features
from tailrace.planning.lengths.hidden_states import HiddenStates
from tailrace.planning.lengths.history import History, Siblings
from tailrace.planning.lengths.lambdarank import Lambdarank
from tailrace.planning.lengths.oracle import Oracle
from tailrace.planning.lengths.ranker import pack, unpack
from tests.planning.lengths.test_features import TwoFigures


def taught(predictor: LengthPredictor) -> LengthPredictor:
    chance = random.Random(0)
    asked = [Asked(prompt_id=str(n), prompt_tokens=n + 1, text="word " * n) for n in range(40)]
    predictor.prepare(asked)
    predictor.learn(
        [
            Finished(asked=one, tokens=round(10 + one.prompt_tokens * math.exp(chance.gauss(0, 0.2))), version=version)
            for version in range(2)
            for one in asked
        ]
    )
    return predictor


def other_tokenizer() -> HiddenStates:
    encoder = TwoFigures()
    encoder.identity = "other"
    return HiddenStates(encoder)


@pytest.mark.parametrize("make", [History, Siblings, Features, Lambdarank, lambda: HiddenStates(TwoFigures()), Oracle])
def test_a_new_predictor_expects_what_the_old_one_did(make: Any) -> None:
    old, new = taught(make()), make()
    unpack(pack(old), new)
    asked = [Asked(prompt_id=str(n), prompt_tokens=n + 1, text="word " * n, forced=9) for n in range(45)]
    for predictor in (old, new):
        predictor.prepare(asked)
    assert new.expect(asked) == old.expect(asked)


def test_siblings_go_on_from_a_history() -> None:
    unpack(pack(taught(History())), Siblings())


def test_a_ranker_of_another_kind_or_tokenizer_is_refused() -> None:
    packed = pack(taught(HiddenStates(TwoFigures())))
    with pytest.raises(ValueError, match=r"from hidden states of the model two, .* and not from hidden states of the"):
        unpack(packed, other_tokenizer())
    with pytest.raises(ValueError, match=r"^it is of type model, and the recipe says features$"):
        unpack(packed, Features())
    with pytest.raises(ValueError, match="and not from 6 figures, 128 tasks, and 8 words and pairs"):
        unpack(pack(Features()), Features(words=8))


def test_what_is_no_ranker_is_refused() -> None:
    with pytest.raises(ValueError, match="it is no ranker"):
        unpack(b"PAR1", History())
    newer = msgspec.msgpack.encode({"tailrace_ranker": 2, "knowledge": "", "state": b""})
    with pytest.raises(ValueError, match="it has the format 2; this version reads 1"):
        unpack(newer, History())
    damaged = msgspec.msgpack.decode(pack(taught(Features()))) | {"state": b"damaged"}
    with pytest.raises(ValueError):  # noqa: PT011  # msgspec says what it met
        unpack(msgspec.msgpack.encode(damaged), Features())

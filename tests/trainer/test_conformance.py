"""The trainer keeps the trainer's contract, for every family of models."""

from pathlib import Path

import pytest

from tailrace.config.trainer import AdapterTrainerBackend, SingleTrainerBackend
from tailrace.conformance.trainer import TrainerContract
from tests.conftest import TinyModel


class OurContract(TrainerContract):
    backend = SingleTrainerBackend()


class TestSingle(OurContract):
    pass


class TestSingleWithQwen2(OurContract):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tiny_model: TinyModel) -> Path:
        return tiny_model("qwen2")


class TestSingleWithQwen3(OurContract):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tiny_model: TinyModel) -> Path:
        return tiny_model("qwen3")


class TestTwoRanksBehindOneObject(TrainerContract):
    backend = AdapterTrainerBackend(path="tests.trainer.ranks.TwoRanks")

"""Keys of other frameworks are answered with what they are called here."""

import pytest

from tailrace.config.generate import GenerateConfig
from tailrace.config.load import load_as, load_config
from tailrace.config.other_names import FRAMEWORKS, NAMES
from tailrace.config.places import Place, places
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError
from tests.config.test_load import QUICKSTART

KEYS = {place.key for schema in (RunConfig, GenerateConfig) for place in places(Place(schema=schema))}


def test_every_name_leads_to_a_key_that_there_is_and_to_one_alone() -> None:
    assert [names.here for names in NAMES if not KEYS.issuperset(names.here)] == []
    assert {len(names.there) for names in NAMES} == {len(FRAMEWORKS)}
    for place in range(len(FRAMEWORKS)):
        names = [name for row in NAMES for name in row.there[place]]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", sorted({name for row in NAMES for there in row.there for name in there}))
def test_a_name_of_another_framework_is_told_ours(name: str) -> None:
    if name in KEYS:
        return
    ours = [row.here[0] for row in NAMES if any(name in there for there in row.there)]
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [f"{name}=1"])
    text = str(caught.value)
    assert "unknown key " in text
    assert any(f"is called {key} here" in text for key in ours) or "it belongs to" in text, (text, ours)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.beta=0.1", "unknown key algorithm.beta; beta is called algorithm.kl.coefficient here; 0 is off"),
        ("epochs=3", "epochs is called trainer.steps here; an epoch is prompts"),
        ("trainer.num_train_epochs=3", "num_train_epochs is called trainer.steps here"),
        ("actor_rollout_ref.rollout.n=8", "rollout.n is called algorithm.group_size here"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor.optim.lr is called trainer.lr here"),
        ("data.max_response_length=99", "max_response_length is called sampling.max_new_tokens here"),
        ("trainer.total_epochs=3", "total_epochs is called trainer.steps here"),
        ("sampling.max_tokens=3", "sampling.max_tokens is called sampling.max_new_tokens here"),
        ("epsilon=0.1", "is called algorithm.clip_low here; the bound above is algorithm.clip_high; set both"),
        ("algorithm.cliprange=0.1", "called algorithm.clip_low here; the bound above is algorithm.clip_high; set both"),
        ("algorithm.clip_ratio_low=0.1", "clip_ratio_low is called algorithm.clip_low here"),
        ("evaluation.n=4", "evaluation.n is called evaluation.samples here"),
        ("pipeline.mode=async", "a mode is a choice of pipeline.placement"),
        ("trainer.num_iterations=2", "several optimizer steps on it are trainer.mini_batch_size"),
    ],
)
def test_the_hint_says_what_to_write(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [override])
    assert says in str(caught.value)


def test_a_command_is_told_keys_of_its_own() -> None:
    with pytest.raises(ConfigError, match="num_generations is called samples here"):
        load_as(GenerateConfig, None, ["num_generations=4"])
    with pytest.raises(ConfigError, match="unknown key learning_rate; expected one of"):
        load_as(GenerateConfig, None, ["learning_rate=4"])


def test_a_list_of_rewards_is_told_what_a_grader_is() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, ["rewards.grader=[math,exact]"])
    assert "rewards.grader is ['math', 'exact']; expected keys, rewards.grader.type first: one of 'exact'" in str(
        caught.value
    )

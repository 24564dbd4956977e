"""Runs with several rewards by name, in both placements: what they train on, and what they tell."""

import math
from pathlib import Path
from typing import Any

import pytest

from tailrace.commands.dry_run import print_plan
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError, NothingGraded, UserError
from tailrace.events import Event, read_events
from tailrace.report.samples import SampleRecord, read_samples
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.run.train import train
from tailrace.run.worker_graders import WorkerGraders
from tailrace.run.workers.pools import run_pools
from tailrace.run.workers.settings import check_gpus
from tests.conftest import TinyModel
from tests.helpers.judge_server import JudgeServer, Reply, failed, said
from tests.helpers.local_workers import use_local_workers
from tests.helpers.reward_models import write_reward_model
from tests.helpers.runs import assert_same_run, learned, small_run, steps_of, weights, write_prompts

PLACEMENTS = ("colocated", "separated")


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run workers as tasks of this process, without Ray."""
    use_local_workers(monkeypatch)


def function(name: str, **fields: Any) -> dict[str, Any]:
    """A reward of `rewards.graders` by a function of tests/helpers/graders.py."""
    grader = {"type": "function", "path": f"tests.helpers.graders.{name}"}
    return {"grader": grader, "workers": 1, **fields}


TWO: dict[str, Any] = {"graders": {"digits": function("digit_fraction", weight=2.0), "brief": function("brevity")}}


def config(tmp_path: Path, model: Path, name: str = "run", **changes: Any) -> RunConfig:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    return small_run(tmp_path / name, model, prompts, **{"rewards": TWO, "trainer__steps": 2, **changes})


def placed(placement: str) -> dict[str, Any]:
    return {"pipeline": {"placement": placement, "streaming": True, "in_order": True}}


def samples(run: Path) -> list[SampleRecord]:
    return list(read_samples(run / "samples.jsonl"))


def spans(run: Path, actor: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event.actor == actor and event.task == "reward"]


def test_two_rewards_train_alike_in_both_placements_and_stand_in_metrics_and_samples(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    for placement in PLACEMENTS:
        run = config(tmp_path, tiny_model("llama"), placement, **placed(placement))
        assert train(run, resume=False) == 0
        steps = steps_of(tmp_path / placement)
        assert len(steps) == 2
        for step in steps:
            parts = step.metrics["reward/digits"], step.metrics["reward/brief"]
            assert step.metrics["reward"] == pytest.approx(2 * parts[0] + parts[1])
            assert step.metrics["accuracy"] == step.metrics["reward/brief.correct"]
            assert step.metrics["reward/brief.tokens"] == step.metrics["response_tokens_mean"]
        graded = list(samples(tmp_path / placement))
        assert graded
        for sample in graded:
            assert sample.reward == pytest.approx(2 * sample.parts["digits"] + sample.parts["brief"])
            assert sample.correct == (sample.tokens < 12)
        for actor in ("reward.digits", "reward.brief", "reward"):
            assert sum(event.samples or 0 for event in spans(tmp_path / placement, actor)) == 16
    assert_same_run(*(tmp_path / placement for placement in PLACEMENTS))


GROUP = {
    "grader": {"type": "group_function", "path": "tests.rewards.group_graders.digits_above_mean"},
    "workers": 1,
}


def test_a_function_of_groups_trains_alike_in_both_placements_alone_and_by_name(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    runs = {"named": {"graders": {"above": GROUP}}, "alone": GROUP}
    for name, rewards in runs.items():
        for placement in PLACEMENTS:
            run = config(
                tmp_path,
                tiny_model("llama"),
                f"{name}-{placement}",
                rewards=rewards,
                evaluation={"every": 2, "samples": 3},
                **placed(placement),
            )
            assert train(run, resume=False) == 0
        assert_same_run(*(tmp_path / f"{name}-{placement}" for placement in PLACEMENTS))
    steps, size = steps_of(tmp_path / "alone-colocated"), "reward/size"
    assert [step.metrics[size] for step in steps] == [4, 4], "of the whole group"
    assert [step.metrics["reward"] for step in steps] == pytest.approx([0, 0], abs=1e-6), "less its mean"
    claims = spans(tmp_path / "named-separated", "reward.above")
    assert [event.samples for event in claims] == [4] * 4
    evaluations = [e for e in read_events(tmp_path / "alone-colocated" / "events.jsonl") if e.task == "evaluation"]
    assert [(e.metrics[size], e.metrics[f"sampled/{size}"]) for e in evaluations] == [(1, 3)] * 2


def opinion(body: dict[str, Any]) -> Reply:
    """Score a response by its length; have no opinion of one in five."""
    length = len(body["messages"][0]["content"])
    return said("hm" if length % 5 == 0 else f"Score: {length % 11}")


def test_a_judge_beside_a_function_trains_alike_in_both_placements_and_its_cost_is_counted(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    with JudgeServer(opinion) as server:
        judge = {"type": "judge", "url": server.url, "model": "m", "prompt": "{response}", "prompt_price": 1e4}
        rewards = {"graders": {"judge": {"grader": judge}, "brief": function("brevity", weight=0.5)}}
        for placement in PLACEMENTS:
            changes = {"rewards": rewards, "prompts__split_seed": 1}  # of these prompts some are graded
            run = config(tmp_path, tiny_model("llama"), placement, **changes, **placed(placement))
            assert train(run, resume=False) == 0
    assert_same_run(*(tmp_path / placement for placement in PLACEMENTS))
    for placement in PLACEMENTS:
        events = list(read_events(tmp_path / placement / "events.jsonl"))
        trained = [event.metrics for event in events if event.task == "step"]
        evaluated = [event.metrics for event in events if event.task == "evaluation"]  # the first beside the first step
        assert [each["spent/judge.requests"] for each in trained] == [8, 8]
        assert [each["spent/judge.requests"] for each in evaluated] == [4, 4]
        figures = trained + evaluated
        assert all(each["spent/judge.cost"] == pytest.approx(each["spent/judge.requests"]) for each in figures)
        assert sum(each.get("reward_failures/judge.JudgeNonsense", 0) for each in figures) > 0
        graded = [event.metrics for event in events if event.task == "reward" and event.actor == "reward.judge"]
        assert sum(each["spent/judge.requests"] for each in graded) == 16
        judged = [sample.parts["judge"] for sample in samples(tmp_path / placement) if not sample.failure]
        assert judged
        assert all(0 <= reward <= 1 for reward in judged)


def test_a_reward_model_beside_a_function_trains_alike_in_both_placements_and_is_loaded_by_its_workers_alone(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    grade = WorkerGraders.grade

    async def counted(self: WorkerGraders, request: GradingRequest) -> Grade:
        asked.append(self._reward)
        return await grade(self, request)

    monkeypatch.setattr(WorkerGraders, "grade", counted)
    model = {"type": "reward_model", "path": str(write_reward_model(tmp_path / "rm")), "batch_size": 4}
    rewards = {"graders": {"rm": {"grader": model, "weight": 0.1}, "brief": function("brevity")}}
    for placement in PLACEMENTS:
        run = config(tmp_path, tiny_model("llama"), placement, rewards=rewards, **placed(placement))
        assert train(run, resume=False) == 0
    assert asked == ["rm"] * 8, "each of two evaluations has four answers, and the driver of a separated run no model"
    one, other = ([step.metrics for step in steps_of(tmp_path / placement)] for placement in PLACEMENTS)
    for ours, theirs in zip(one, other, strict=True):  # a batch rounds in its own way
        assert ours["reward/rm"] == pytest.approx(theirs["reward/rm"], abs=1e-4)
        assert ours["reward"] == pytest.approx(0.1 * ours["reward/rm"] + ours["reward/brief"])
        assert ours["reward_failures"] == 0
    evaluations = [
        [e.metrics["reward/rm"] for e in read_events(tmp_path / placement / "events.jsonl") if e.task == "evaluation"]
        for placement in PLACEMENTS
    ]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-4)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_reward_model_of_several_labels_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_model: TinyModel, placement: str
) -> None:
    model = {"type": "reward_model", "path": str(write_reward_model(tmp_path / "rm", labels=2))}
    run = config(tmp_path, tiny_model("llama"), rewards={"graders": {"rm": {"grader": model}}}, **placed(placement))
    with pytest.raises(UserError, match=r"rewards\.graders\.rm\.grader\.path \S+ has 2 labels"):
        train(run, resume=False)
    assert not (tmp_path / "run").exists()


def test_a_reward_model_on_a_gpu_needs_workers_that_reserve_one(tmp_path: Path) -> None:
    model = {"grader": {"type": "reward_model", "path": "m", "device": "cuda"}}
    for rewards, key in (({"graders": {"rm": model}}, "reward.pools.rm"), (model, "reward")):
        run = config(tmp_path, Path("model"), rewards=rewards, **placed("separated"))
        with pytest.raises(ConfigError, match=rf"cluster\.{key}\.gpus is 0: the reward model would see no GPU"):
            check_gpus(run, run_pools(run))
    cluster = {"reward": {"pools": {"rm": {"gpus": 1.0}}}}
    rewards = {"graders": {"rm": model}}
    run = config(tmp_path, Path("model"), rewards=rewards, cluster=cluster, **placed("separated"))
    check_gpus(run, run_pools(run))


def test_a_judge_that_refuses_every_request_ends_the_run_with_what_it_said(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    with JudgeServer(lambda _: failed(401)) as server:
        rewards = {"grader": {"type": "judge", "url": server.url, "model": "m"}}
        run = config(tmp_path, tiny_model("llama"), rewards=rewards, prompts__held_out=0)
        with pytest.raises(NothingGraded, match=r"with: JudgeRefused: HTTP 401 of http\S+/v1: .*status 401"):
            train(run, resume=False)


def test_one_reward_by_name_trains_as_it_does_alone(tmp_path: Path, tiny_model: TinyModel) -> None:
    train(config(tmp_path, tiny_model("llama"), "alone", rewards=function("brevity")), resume=False)
    train(
        config(tmp_path, tiny_model("llama"), "named", rewards={"graders": {"brief": function("brevity")}}),
        resume=False,
    )
    assert all(
        (ours == theirs).all()
        for ours, theirs in zip(weights(tmp_path / "alone").values(), weights(tmp_path / "named").values(), strict=True)
    )
    alone, named = (steps_of(tmp_path / name)[-1].metrics for name in ("alone", "named"))
    assert alone["accuracy"] == named["accuracy"]
    assert alone["reward/tokens"] == named["reward/brief.tokens"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_response_counts_only_where_each_grading_succeeded_and_each_failure_has_a_name(
    tmp_path: Path, tiny_model: TinyModel, placement: str
) -> None:
    graders = {"digits": function("digit_fraction"), "odd": function("fails_on_even_length")}
    run = config(tmp_path, tiny_model("llama"), rewards={"graders": graders}, prompts__held_out=0, **placed(placement))
    train(run, resume=False)
    failed = sum(step.metrics["reward_failures"] for step in steps_of(tmp_path / "run"))
    assert 0 < failed < 16
    assert failed == sum(
        step.metrics.get("reward_failures/odd.ArithmeticError", 0) for step in steps_of(tmp_path / "run")
    )
    told = [event.info["failures"] for event in spans(tmp_path / "run", "reward.odd") if "failures" in event.info]
    assert told == [{"odd.ArithmeticError": 1}] * int(failed)
    without = [sample for sample in samples(tmp_path / "run") if sample.failure]
    assert len(without) == failed
    for sample in without:
        assert sample.failure.startswith("odd.ArithmeticError: even (")
        assert sample.reward is None
        assert sample.parts.keys() == {"digits"}
        assert not sample.advantage


def test_a_failed_grading_may_have_a_reward_of_its_own(tmp_path: Path, tiny_model: TinyModel) -> None:
    graders = {"digits": function("digit_fraction"), "odd": function("fails_on_even_length", failure_reward=-3.0)}
    train(config(tmp_path, tiny_model("llama"), rewards={"graders": graders}, prompts__held_out=0), resume=False)
    trained = [sample for sample in samples(tmp_path / "run") if sample.failure and sample.kind == "training"]
    assert trained
    for sample in trained:
        assert sample.parts["odd"] == -3
        assert sample.reward == pytest.approx(sample.parts["digits"] - 3)


def test_a_grader_that_always_fails_ends_the_run_with_its_name(tmp_path: Path, tiny_model: TinyModel) -> None:
    graders = {"digits": function("digit_fraction"), "broken": function("undefined", failure_reward=0.0)}
    with pytest.raises(NothingGraded, match=r"8 of them with: broken\.NameError: name 'answr' is not defined \("):
        train(config(tmp_path, tiny_model("llama"), rewards={"graders": graders}, prompts__held_out=0), resume=False)


def test_a_run_with_several_rewards_is_resumed_with_what_was_graded(tmp_path: Path, tiny_model: TinyModel) -> None:
    run = config(tmp_path, tiny_model("llama"), checkpoint={"every": 1, "keep": 5})
    train(run, resume=False)
    again = run.model_copy(update={"output_dir": str(tmp_path / "again")})
    train(again, resume=True, checkpoint=tmp_path / "run" / "checkpoints" / "step_000001")
    assert [learned(step) for step in steps_of(tmp_path / "again")] == [learned(steps_of(tmp_path / "run")[-1])]
    other = config(tmp_path, tiny_model("llama"), "other", rewards=function("brevity"))
    with pytest.raises(UserError, match="the tasks of the algorithm cannot change when a run is resumed"):
        train(other, resume=True, checkpoint=tmp_path / "run" / "checkpoints" / "step_000001")


def test_an_evaluation_has_the_sum_and_each_reward(tmp_path: Path, tiny_model: TinyModel) -> None:
    train(config(tmp_path, tiny_model("llama"), rewards={**TWO, "correct_at": 0.5}), resume=False)
    events = read_events(tmp_path / "run" / "events.jsonl")
    evaluations = [event.metrics for event in events if event.task == "evaluation"]
    assert len(evaluations) == 2
    for figures in evaluations:
        assert figures["reward"] == pytest.approx(2 * figures["reward/digits"] + figures["reward/brief"])
        assert not math.isnan(figures["accuracy"])


def test_a_pool_is_for_a_reward_that_there_is(tmp_path: Path, tiny_model: TinyModel) -> None:
    cluster = {"reward": {"pools": {"digit": {"workers": 2}}}}
    run = config(tmp_path, tiny_model("llama"), cluster=cluster, **placed("separated"))
    with pytest.raises(
        ConfigError,
        match=r"cluster\.reward\.pools\.digit is for no reward by name, and rewards\.graders has digits, brief; "
        r"did you mean 'digits'\?",
    ):
        train(run, resume=False)


def test_a_pool_of_a_reward_has_as_many_workers_as_the_recipe_says(tmp_path: Path, tiny_model: TinyModel) -> None:
    cluster = {"reward": {"pools": {"digits": {"workers": 2}}}}
    train(config(tmp_path, tiny_model("llama"), cluster=cluster, **placed("separated")), resume=False)
    started = {e.actor for e in read_events(tmp_path / "run" / "events.jsonl") if e.task == "worker_started"}
    graders = {"reward-0", "reward.brief-0", "reward.digits-0", "reward.digits-1"}
    assert started == {"trainer", "rollout-0", *graders}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_reward_that_cannot_be_made_is_named_before_anything_is_written(
    tmp_path: Path, tiny_model: TinyModel, placement: str
) -> None:
    graders = {"digits": function("digit_fraction"), "gone": function("nope")}
    run = config(tmp_path, tiny_model("llama"), rewards={"graders": graders}, **placed(placement))
    with pytest.raises(UserError, match=r"rewards\.graders\.gone\.grader\.path 'tests\.helpers\.graders\.nope'"):
        train(run, resume=False)
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_dry_run_names_a_reward_that_cannot_be_made(tmp_path: Path, tiny_model: TinyModel) -> None:
    graders = {"digits": function("digit_fraction"), "gone": function("nope")}
    run = config(tmp_path, tiny_model("llama"), rewards={"graders": graders})
    with pytest.raises(UserError, match=r"rewards\.graders\.gone\.grader\.path"):
        print_plan(run, resume=False)
    assert not (tmp_path / "run").exists()

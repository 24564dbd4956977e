"""A key of another framework is answered with Tailrace's name for it."""

import re

import pytest

from tailrace.config.generate import GenerateConfig
from tailrace.config.load import load_as, load_config
from tailrace.config.other_names import FRAMEWORKS, NAMES
from tailrace.config.places import Place, places
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError
from tests.config.test_load import RECIPE

KEYS = {place.key for schema in (RunConfig, GenerateConfig) for place in places(Place(schema=schema))}


def test_every_name_leads_to_a_key_that_there_is_and_to_one_alone() -> None:
    assert [names.here for names in NAMES if not KEYS.issuperset(names.here)] == []
    assert {len(names.there) for names in NAMES} == {len(FRAMEWORKS)}
    for place in range(len(FRAMEWORKS)):
        names = [name for row in NAMES for name in row.there[place]]
        assert len(names) == len(set(names))


TRL = {
    "model_name_or_path": "model.path",
    "dataset_name": "prompts.source",
    "eval_dataset": "prompts.validation",
    "shuffle_dataset": "prompts.shuffle",
    "reward_funcs": "rewards.grader",
    "reward_weights": "rewards.graders",
    "num_generations": "algorithm.group_size",
    "beta": "algorithm.kl.coefficient",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "scale_rewards": "algorithm.normalize_std",
    "loss_type": "algorithm.loss_agg_mode",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.type",
    "vllm_importance_sampling_mode": "algorithm.rollout_correction.type",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.limit",
    "max_prompt_length": "prompts.max_prompt_tokens",
    "max_completion_length": "sampling.max_new_tokens",
    "chat_template_kwargs": "prompts.chat_template_arguments",
    "learning_rate": "trainer.lr",
    "lr_scheduler_type": "trainer.schedule",
    "warmup_ratio": "trainer.warmup_steps",
    "weight_decay": "trainer.weight_decay",
    "adam_beta1": "trainer.betas",
    "adam_beta2": "trainer.betas",
    "adam_epsilon": "trainer.eps",
    "max_grad_norm": "trainer.max_grad_norm",
    "max_steps": "trainer.steps",
    "num_train_epochs": "trainer.steps",
    "generation_batch_size": "trainer.train_batch_size",
    "per_device_train_batch_size": "trainer.mini_batch_size",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "gradient_checkpointing": "trainer.gradient_checkpointing",
    "bf16": "trainer.precision",
    "use_vllm": "engine.type",
    "vllm_mode": "pipeline.placement",
    "vllm_tensor_parallel_size": "engine.tp",
    "vllm_gpu_memory_utilization": "engine.kv_cache_gib",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluation.every",
    "num_generations_eval": "evaluation.samples",
    "report_to": "observe.wandb_project",
}
VERL = {
    "data.train_files": "prompts.source",
    "data.val_files": "prompts.validation",
    "data.prompt_key": "prompts.source.prompt_column",
    "data.train_batch_size": "trainer.train_batch_size",
    "data.max_prompt_length": "prompts.max_prompt_tokens",
    "data.max_response_length": "sampling.max_new_tokens",
    "data.filter_overlong_prompts": "prompts.overlong",
    "data.shuffle": "prompts.shuffle",
    "data.seed": "seed",
    "actor_rollout_ref.hybrid_engine": "pipeline.placement",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "actor_rollout_ref.actor.optim.lr": "trainer.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "trainer.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "trainer.warmup_steps",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "actor_rollout_ref.actor.grad_clip": "trainer.max_grad_norm",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_agg_mode",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl.estimator",
    "actor_rollout_ref.rollout.name": "engine.type",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine.tp",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "engine.kv_cache_gib",
    "actor_rollout_ref.rollout.max_model_len": "engine.max_model_len",
    "actor_rollout_ref.rollout.max_num_seqs": "engine.max_batch_size",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "engine.prefill_tokens",
    "actor_rollout_ref.rollout.val_kwargs.n": "evaluation.samples",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "evaluation.greedy",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "evaluation.temperature",
    "algorithm.adv_estimator": "algorithm.type",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coefficient",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_std",
    "algorithm.rollout_is": "algorithm.rollout_correction.level",
    "algorithm.rollout_is_threshold": "algorithm.rollout_correction.limit",
    "algorithm.rollout_rs": "algorithm.rollout_rejection",
    "algorithm.rollout_rs_threshold": "algorithm.rollout_rejection.upper",
    "async_training.staleness_threshold": "pipeline.max_staleness",
    "custom_reward_function.path": "rewards.grader",
    "trainer.total_epochs": "trainer.steps",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.n_gpus_per_node": "cluster.trainer.gpus",
    "trainer.save_freq": "checkpoint.every",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.test_freq": "evaluation.every",
    "trainer.default_local_dir": "output_dir",
    "trainer.project_name": "observe.wandb_project",
}
OPENRLHF = {
    "pretrain": "model.path",
    "prompt_data": "prompts.source",
    "input_key": "prompts.source.prompt_column",
    "label_key": "prompts.source.answer_column",
    "prompt_max_len": "prompts.max_prompt_tokens",
    "apply_chat_template": "prompts.chat_template",
    "remote_rm_url": "rewards.grader",
    "n_samples_per_prompt": "algorithm.group_size",
    "advantage_estimator": "algorithm.type",
    "init_kl_coef": "algorithm.kl.coefficient",
    "kl_estimator": "algorithm.kl.estimator",
    "eps_clip": "algorithm.clip_low",
    "no_advantage_std_norm": "algorithm.normalize_std",
    "generate_max_len": "sampling.max_new_tokens",
    "actor_learning_rate": "trainer.lr",
    "lr_warmup_ratio": "trainer.warmup_steps",
    "adam_betas": "trainer.betas",
    "l2": "trainer.weight_decay",
    "max_norm": "trainer.max_grad_norm",
    "num_episodes": "trainer.steps",
    "rollout_batch_size": "trainer.train_batch_size",
    "micro_train_batch_size": "trainer.micro_batch_tokens",
    "vllm_num_engines": "cluster.rollout.workers",
    "actor_num_gpus_per_node": "cluster.trainer.gpus",
    "colocate_all_models": "pipeline.placement",
    "async_train": "pipeline.max_staleness",
    "max_ckpt_num": "checkpoint.keep",
    "eval_n_samples_per_prompt": "evaluation.samples",
    "eval_temperature": "evaluation.temperature",
    "save_path": "output_dir",
    "use_wandb": "observe.wandb_project",
}
PRIME_RL = {
    "trainer.model.name": "model.path",
    "trainer.model.ac": "trainer.gradient_checkpointing",
    "trainer.model.seq_len": "trainer.micro_batch_tokens",
    "trainer.optim.lr": "trainer.lr",
    "trainer.optim.betas1": "trainer.betas",
    "trainer.optim.max_norm": "trainer.max_grad_norm",
    "trainer.scheduler.type": "trainer.schedule",
    "trainer.scheduler.warmup_steps": "trainer.warmup_steps",
    "trainer.max_steps": "trainer.steps",
    "trainer.ckpt.interval": "checkpoint.every",
    "orchestrator.batch_size": "trainer.train_batch_size",
    "orchestrator.rollouts_per_example": "algorithm.group_size",
    "orchestrator.sampling.max_tokens": "sampling.max_new_tokens",
    "orchestrator.max_off_policy_steps": "pipeline.max_staleness",
    "orchestrator.eval.interval": "evaluation.every",
    "inference.parallel.tp": "engine.tp",
    "inference.parallel.dp": "cluster.rollout.workers",
    "inference.model.max_model_len": "engine.max_model_len",
    "wandb.project": "observe.wandb_project",
}


@pytest.mark.parametrize(
    ("theirs", "ours"), [pair for names in (TRL, VERL, OPENRLHF, PRIME_RL) for pair in names.items()]
)
def test_a_key_of_another_framework_as_its_recipes_have_it_is_told_ours(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, [f"{theirs}=1"])
    text = str(caught.value)
    assert "unknown key " in text
    assert re.search(rf" is called {re.escape(ours)} here(;|$)", text), text


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
        ("trainer.num_iterations=2", "num_iterations is called trainer.epochs here"),
    ],
)
def test_the_hint_says_what_to_write(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, [override])
    assert says in str(caught.value)


def test_a_command_is_told_keys_of_its_own() -> None:
    with pytest.raises(ConfigError, match="num_generations is called samples here"):
        load_as(GenerateConfig, None, ["num_generations=4"])
    with pytest.raises(ConfigError, match="unknown key learning_rate; expected one of"):
        load_as(GenerateConfig, None, ["learning_rate=4"])


def test_a_list_of_rewards_is_told_what_a_grader_is() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, ["rewards.grader=[math,exact]"])
    assert "rewards.grader is ['math', 'exact']; expected keys, rewards.grader.type first: one of 'exact'" in str(
        caught.value
    )

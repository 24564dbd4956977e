"""Names of other frameworks for our keys: for the hints of errors, and for a table in the documentation."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from tailrace.config.overrides import leaves

FRAMEWORKS = ("TRL", "verl", "OpenRLHF", "prime-rl", "elsewhere")

_TABLE = """
algorithm.group_size, samples | num_generations | rollout.n | n_samples_per_prompt | rollouts_per_example | n
sampling.max_new_tokens | max_completion_length | max_response_length, response_length | generate_max_len | sampling.max_tokens | max_tokens
prompts.max_prompt_tokens | max_prompt_length | data.max_prompt_length | prompt_max_len |  | : longer prompts are refused or dropped, never cut
trainer.steps | max_steps | total_training_steps |  | max_steps |
trainer.steps | num_train_epochs | total_epochs | num_episodes |  | epochs, num_epochs : an epoch is prompts · group_size / train_batch_size steps
trainer.train_batch_size | generation_batch_size | data.train_batch_size | rollout_batch_size | orchestrator.batch_size | batch_size : it counts samples, where verl and OpenRLHF count prompts
trainer.mini_batch_size | per_device_train_batch_size | ppo_mini_batch_size |  |  | : it counts samples of all devices
trainer.micro_batch_tokens | gradient_accumulation_steps | ppo_max_token_len_per_gpu, ppo_micro_batch_size_per_gpu, ppo_micro_batch_size | train_max_tokens_per_gpu, micro_train_batch_size | seq_len | : it counts tokens
trainer.lr | learning_rate | actor.optim.lr, optim.lr | actor_learning_rate | optim.lr |
trainer.schedule | lr_scheduler_type | warmup_style | lr_scheduler | scheduler.type | lr_scheduler
trainer.warmup_steps | warmup_ratio | lr_warmup_steps, lr_warmup_steps_ratio | lr_warmup_ratio | scheduler.warmup_steps | : it counts optimizer steps
trainer.betas | adam_beta1, adam_beta2 | optim.betas | adam_betas | betas1, betas2 |
trainer.eps | adam_epsilon |  |  |  |
trainer.weight_decay | weight_decay | optim.weight_decay | l2 | optim.weight_decay |
trainer.max_grad_norm | max_grad_norm | grad_clip, clip_grad | max_norm | optim.max_norm |
trainer.precision | bf16, fp16 | fsdp_config.model_dtype |  |  | : it is bf16 or fp32
trainer.epochs | num_iterations, num_ppo_epochs | ppo_epochs | max_epochs |  |
trainer.frozen_steps |  | critic_warmup | freezing_actor_steps |  |
trainer.gradient_checkpointing | gradient_checkpointing | enable_gradient_checkpointing | gradient_checkpointing | model.ac |
algorithm.kl.coefficient | beta | kl_loss_coef, kl_ctrl.kl_coef, kl_coef | init_kl_coef | kl_tau | kl_coef : 0 is off
algorithm.kl.adaptive.target |  | kl_ctrl.target_kl, target_kl | kl_target |  |
algorithm.kl.adaptive.gain |  | kl_ctrl.horizon, horizon | kl_horizon |  | : it is the samples of a step over the horizon
algorithm.kl.estimator |  | kl_loss_type, kl_penalty | kl_estimator |  |
algorithm.clip_low |  | clip_ratio_low |  |  |
algorithm.clip_low | epsilon | clip_ratio | eps_clip, eps_clip_low_high |  | clip_range, cliprange : the bound above is algorithm.clip_high; set both
algorithm.clip_high | epsilon_high | clip_ratio_high |  |  |
algorithm.normalize_std | scale_rewards | norm_adv_by_std_in_grpo | no_advantage_std_norm |  |
algorithm.discount |  | gamma | gamma |  |
algorithm.gae_lambda |  | lam | lambd |  |
algorithm.critic.lr |  | critic.optim.lr | critic_learning_rate |  |
algorithm.critic.clip | cliprange_value | cliprange_value | value_clip |  |
algorithm.critic.path | value_model_path | critic.model.path | critic_pretrain |  |
algorithm.kl.part_of |  | use_kl_in_reward | use_kl_loss |  | : it is loss or reward
algorithm.loss_norm_tokens |  | loss_scale_factor |  |  |
algorithm.loss_agg_mode | loss_type | loss_agg_mode |  |  |
algorithm.type |  | adv_estimator | advantage_estimator |  | : the algorithm's name here
algorithm.rollout_correction.type | vllm_importance_sampling_correction, vllm_importance_sampling_mode |  | enable_vllm_is_correction, vllm_is_correction_type |  | use_tis, use_decoupled_loss : it is none, truncated or masked, and rollout_correction.level says of what
algorithm.rollout_correction.level |  | rollout_correction.rollout_is, rollout_is | | ratio_type | : it is token, geometric or sequence
algorithm.rollout_correction.limit | vllm_importance_sampling_cap, vllm_importance_sampling_clip_max | rollout_is_threshold | vllm_is_truncated_threshold |  | tis_clip
algorithm.rollout_correction.lower | vllm_importance_sampling_clip_min |  |  |  | tis_clip_low
algorithm.rollout_correction.upper |  |  |  |  | behav_imp_weight_cap : with type masked
algorithm.rollout_rejection |  | rollout_correction.rollout_rs, rollout_rs |  |  | : its type is ratio or kl, and its level token, geometric or sequence
algorithm.rollout_rejection.lower |  |  |  | token_mask_low, geo_mask_low, sequence_mask_low |
algorithm.rollout_rejection.upper |  | rollout_rs_threshold |  | token_mask_high, geo_mask_high, sequence_mask_high |
sampling.stop |  |  |  | sampling.stop |
model.path | model_name_or_path | actor_rollout_ref.model.path | pretrain | model.name | model_name
prompts.source | dataset_name | data.train_files, train_files | prompt_data | env | train_dataset : it has a type, such as jsonl, parquet, dataset or hub
prompts.source.prompt_column |  | data.prompt_key, prompt_key | input_key |  |
prompts.source.answer_column |  | reward_model.ground_truth | label_key |  |
prompts.validation | eval_dataset | data.val_files | eval_dataset | eval.env | val_files : it is a mapping of names to sources
prompts.overlong |  | data.filter_overlong_prompts |  |  | filter_overlong_prompts : it is error or drop; no prompt is cut
prompts.chat_template_arguments | chat_template_kwargs | data.apply_chat_template_kwargs |  |  | apply_chat_template_kwargs
evaluation.greedy |  | val_kwargs.do_sample |  |  |
prompts.shuffle | shuffle_dataset | data.shuffle |  |  |
prompts.chat_template |  |  | apply_chat_template |  |
rewards.grader | reward_funcs | custom_reward_function.path, custom_reward_function.name, reward_manager | remote_rm_url, reward_pretrain |  | reward_func, reward_function : a function of your own is {type: function, path: my_module.my_function}
rewards.graders | reward_weights |  |  |  | : each has a grader and a weight
engine.type | use_vllm | rollout.name |  |  | : it is native or vllm, among others
engine.tp | vllm_tensor_parallel_size | tensor_model_parallel_size | vllm_tensor_parallel_size | parallel.tp |
engine.kv_cache_gib | vllm_gpu_memory_utilization | gpu_memory_utilization | vllm_gpu_memory_utilization | gpu_memory_utilization | : it is the size of the cache
engine.max_batch_size |  | max_num_seqs |  |  |
engine.prefill_tokens |  | max_num_batched_tokens |  |  |
engine.max_model_len | vllm_max_model_length | rollout.max_model_len |  | inference.model.max_model_len |
cluster.rollout.workers |  |  | vllm_num_engines | parallel.dp |
cluster.trainer.gpus |  | n_gpus_per_node, nnodes | actor_num_gpus_per_node |  | : Ray reserves them for each worker
pipeline.placement | vllm_mode | hybrid_engine | colocate_all_models |  | : it is colocated or separated
pipeline.max_staleness |  | async_training.staleness_threshold | async_queue_size, async_train | max_async_level, max_off_policy_steps |
checkpoint.every | save_steps | save_freq | save_steps | ckpt.interval |
checkpoint.keep | save_total_limit | max_actor_ckpt_to_keep | max_ckpt_num |  |
checkpoint.keep_best | metric_for_best_model, load_best_model_at_end |  |  |  | monitor : it is a figure such as eval/accuracy
evaluation.every | eval_steps, eval_strategy | test_freq | eval_steps | eval.interval |
evaluation.samples | num_generations_eval | val_kwargs.n | eval_n_samples_per_prompt |  | evaluation.n
evaluation.temperature |  | val_kwargs.temperature | eval_temperature |  |
observe.wandb_project | report_to | project_name, experiment_name, trainer.logger | use_wandb | wandb.project | run_name
output_dir | logging_dir | default_local_dir | save_path, ckpt_path | output_dir |
seed | data_seed | data.seed |  |  |
"""  # noqa: E501
_ELSEWHERE = {
    "pipeline.mode": (
        "a mode is a choice of pipeline.placement, pipeline.max_staleness, pipeline.streaming and weights.mode: see "
        "docs/async.md"
    ),
    "resume_from_checkpoint": "give --resume, or --resume-from CHECKPOINT",
    "val_only": "to evaluate without training: tailrace eval MODEL --recipe RECIPE",
    "resume_mode": "give --resume, or --resume-from CHECKPOINT",
    "resume_from_path": "give --resume-from CHECKPOINT",
}
"""Hints for names that have no key here."""


@dataclass(frozen=True, slots=True)
class Names:
    """One key and its names in other frameworks."""

    here: tuple[str, ...]
    """Our key; where a command has no such key, the next one."""
    there: tuple[tuple[str, ...], ...]
    """Its names in each of `FRAMEWORKS`: none, or several that mean the same."""
    note: str
    """How our key differs from theirs."""


def _names() -> Iterator[Names]:
    for line in _TABLE.strip().splitlines():
        names, _, note = line.partition(":")
        here, *there = (tuple(filter(None, map(str.strip, cell.split(",")))) for cell in names.split("|"))
        yield Names(here, tuple(there), note.strip())


NAMES = tuple(_names())


def called_here(key: str, value: Any, known: Collection[str]) -> str | None:
    """Return a hint for an unknown dotted key, or for the first one below it; it names one of `known`, if there is
    any."""
    for full in leaves(key, value):
        for name in _ends(full):
            if name in _ELSEWHERE:
                return _ELSEWHERE[name]
            if hint := _hint(name, known):
                return hint
    return None


def _ends(key: str) -> Iterator[str]:
    """Yield the ends of a dotted key: `a.b.c`, `b.c`, `c`."""
    parts = key.split(".")
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def _hint(name: str, known: Collection[str]) -> str | None:
    for names in NAMES:
        of = [framework for framework, there in zip(FRAMEWORKS, names.there, strict=True) if name in there]
        here = next((key for key in names.here if key in known), None)
        if of and here:
            return f"{name} is called {here} here" + (f"; {names.note}" if names.note else "")
    return None

"""`tailrace profile trainer`: measures what the updates of a recipe take on this machine.

Micro-batches of several sizes and shapes are trained on, scored, and followed by an optimizer step, in rounds; the
medians count. Tokens are random, so the weights are worth nothing afterwards; they are not kept.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tailrace.algorithms.dapo import KEPT
from tailrace.algorithms.factory import make_algorithm
from tailrace.commands.files import check_new_file
from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.run import RunConfig
from tailrace.host.compute import now, prepare_torch
from tailrace.host.cpu import cpu_name
from tailrace.models.info import describe_model
from tailrace.models.resolve import resolve_model
from tailrace.planning.packing import Lengths, plan_micro_batches
from tailrace.planning.step_times.trainer_profile import MicroBatchPoint, ProfiledTrainer, TrainerProfile
from tailrace.report.run_data import write_file
from tailrace.report.text import number, percent
from tailrace.trainer.base import Loss, Trainer, TrainSample
from tailrace.trainer.factory import make_run_trainer
from tailrace.transfer.weights.sender import WeightSender

_SHAPES = ((1 / 8, 1, 0.1), (1 / 8, 8, 0.1), (1 / 4, 1, 0.7), (1 / 2, 1, 0.1), (1 / 2, 8, 0.5), (1, 8, 0.1))
"""What is measured: the part of the token budget of a micro-batch, the responses of its group, and the part of its
tokens that is the prompt."""


def profile_trainer(config: RunConfig, json: Path | None, *, rounds: int, force: bool = False) -> None:
    """Measure, print a table, and write the profile to `json`; `force` replaces an existing file.

    Raises:
        UserError: the model cannot be trained, or the file cannot be written.
    """
    if json is not None:
        check_new_file("--json", json, force=force)
    prepare_torch(config.device, config.threads)
    profile = measure_trainer(config, rounds=rounds)
    console = Console(highlight=False)
    console.print(_title(profile), style="bold", soft_wrap=True, markup=False)
    console.print(_table(profile))
    if json is not None:
        document = msgspec.json.format(msgspec.json.encode(profile))
        write_file(json.parent, json.name, document + b"\n")


def measure_trainer(config: RunConfig, *, rounds: int) -> TrainerProfile:
    """Measure the trainer of a recipe with the threads that torch has.

    Raises:
        UserError: the model cannot be trained.
    """
    model_dir = resolve_model(config.model)
    device = torch.device(config.device)
    trainer, loss, columns = make_run_trainer(config, model_dir), *_loss(config)
    vocab = describe_model(model_dir).vocab
    shapes = list(_lengths(config.trainer.micro_batch_tokens))
    batches = [_as_sampled(_samples(lengths, columns, vocab), trainer) for lengths in shapes]
    update: list[list[float]] = [[] for _ in shapes]
    score: list[list[float]] = [[] for _ in shapes]
    optimizer: list[float] = []
    weights: list[float] = []
    trainer.accumulate(batches[-1], loss)  # the largest finds its memory
    trainer.apply()
    with WeightSender(dtype=getattr(torch, config.wire_dtype)) as sender:
        sender.reserve(trainer.weights())
        for version in range(1, rounds + 2):  # the first one finds its memory
            weights.append(_timed(lambda: sender.publish(version, trainer.weights()), device))  # noqa: B023
    for _ in range(rounds):
        for place, samples in enumerate(batches):
            update[place].append(_timed(lambda: trainer.accumulate(samples, loss), device))  # noqa: B023
            score[place].append(_timed(lambda: trainer.log_probs(samples), device))  # noqa: B023
        optimizer.append(_timed(trainer.apply, device))
    return TrainerProfile(
        model=config.model.path,
        hardware=cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(),
        precision=config.trainer.precision,
        threads=torch.get_num_threads(),
        update=_points(shapes, update, config),
        score=_points(shapes, score, config),
        optimizer_s=statistics.median(optimizer),
        weights_s=statistics.median(weights),
    )


def _loss(config: RunConfig) -> tuple[Loss, list[str]]:
    """The loss of the policy, and the columns with a number for each token that it reads."""
    algorithm = make_algorithm(config.resolved_algorithm)
    task, work = algorithm.policy_task()
    kinds = {**COLUMNS, **algorithm.columns}
    of_tokens = [name for name in task.reads if kinds[name] is ColumnKind.FLOATS]
    return work.loss, [*of_tokens, "kl_coefficient"]  # a number of the row is one for each token there


def _lengths(budget: int) -> Iterator[list[Lengths]]:
    """Groups that are one micro-batch each."""
    for part, responses, share in _SHAPES:
        tokens = max(4 * responses, int(budget * part))
        prompt = max(1, int(tokens * share))
        yield [Lengths(0, prompt, max(1, (tokens - prompt) // responses))] * responses


def _samples(lengths: Sequence[Lengths], columns: Sequence[str], vocab: int) -> list[TrainSample]:
    random = np.random.default_rng(0)
    prompt = random.integers(0, vocab, lengths[0].prompt_tokens)

    def sample(tokens: int) -> TrainSample:
        values = {name: -random.random(tokens).astype(np.float32) for name in columns}
        if KEPT in columns:  # without any token that is trained on, the optimizer step would be skipped
            values[KEPT] = np.ones(tokens, np.float32)
        return TrainSample(
            group_id=0,
            prompt_ids=prompt,
            response_ids=random.integers(0, vocab, tokens),
            response_mask=np.ones(tokens, np.int64),
            columns=values,
            on_policy=False,
        )

    return [sample(each.response_tokens) for each in lengths]


def _as_sampled(samples: Sequence[TrainSample], trainer: Trainer) -> list[TrainSample]:
    """The samples, as if the trainer's weights had drawn them: a recipe may reject what is far off the policy."""
    return [
        replace(
            sample,
            old_log_probs=own,
            columns={name: own if name == "rollout_log_probs" else values for name, values in sample.columns.items()},
        )
        for sample, own in zip(samples, trainer.log_probs(samples), strict=True)
    ]


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    start = now(device)
    work()
    return now(device) - start


def _points(
    shapes: Sequence[Sequence[Lengths]], seconds: Sequence[Sequence[float]], config: RunConfig
) -> list[MicroBatchPoint]:
    points = []
    for lengths, measured in zip(shapes, seconds, strict=True):
        (parts,) = plan_micro_batches(lengths, config.trainer.micro_batch_tokens)
        points.append(MicroBatchPoint.of(parts, statistics.median(measured)))
    return points


def _title(profile: TrainerProfile) -> str:
    threads = f"{profile.threads} thread{'s' if profile.threads > 1 else ''}"
    return f"{profile.model} · {profile.precision} · {threads} · {profile.hardware}"


def _table(profile: TrainerProfile) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("tokens", "of responses", "update s", "tokens/s", "log-probs s"):
        shown.add_column(name, justify="right")
    for update, score in zip(profile.update, profile.score, strict=True):
        rate = number(update.tokens / update.seconds)
        shown.add_row(str(update.tokens), str(update.scored), f"{update.seconds:.3f}", rate, f"{score.seconds:.3f}")
    shown.add_section()
    error = percent(ProfiledTrainer(profile).error)
    shown.add_row("", "", f"{profile.optimizer_s:.3f}", "", "an optimizer step")
    shown.add_row("", "", f"{profile.weights_s:.3f}", "", "publishing the weights")
    shown.add_row("", "", error, "", "error of the fit")
    return shown

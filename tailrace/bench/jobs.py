"""The work of a benchmark as a file, for the adapter of another framework.

An adapter is a command. It gets the name of a directory with `jobs.jsonl`, plays the jobs there with its framework, and
leaves `events.jsonl`: the events of Tailrace (docs/metrics.md), of which these are needed, with times in seconds:

    step      {"task": "step", "actor": "trainer", "start": 0.0, "end": 9.5, "step": 0}
    sample    {"task": "sample", "actor": "engine", "start": 0.1, "end": 4.2, "step": 0, "tokens": 120,
               "info": {"group": 0, "sample": 3}}

and of which it may write any other, such as `rollout`, `actor` and `update_weights`, where it can time them.

The first line of the jobs says what work a step is. An adapter that does other work, such as no KL penalty where one is
asked for, would be compared with something else. It has to end with a message instead.

The command runs with the variables of glibc's allocator that Tailrace sets for itself (`tailrace.host.allocator`).
"""

import asyncio
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import msgspec

from tailrace.bench.setup import Setup
from tailrace.config.algorithm import PolicyGradientConfig
from tailrace.config.run import RunConfig
from tailrace.errors import BenchError
from tailrace.events import Event
from tailrace.host.whole_file import whole_file
from tailrace.models.resolve import resolve_model
from tailrace.registers.events import EventKind
from tailrace.rewards.pool import capacity_of
from tailrace.types import Prompt
from tailrace.workloads.replay import Script, Turn

FORMAT = 1


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: what to run. How the work is scheduled is not part of it."""

    tailrace_jobs: int
    """The version of the format."""
    model: str
    """A Hugging Face directory."""
    device: str
    devices: int
    """Devices that generate or train. Throughput is also given for each of them."""
    precision: str
    """Of the training: fp32 or bf16."""
    threads: int | None
    """PyTorch threads, where the recipe says."""
    steps: int
    groups_per_step: int
    group_size: int
    mini_batch_size: int
    """Samples of an optimizer step; a step has groups_per_step * group_size."""
    max_new_tokens: int
    """Tokens of the longest response."""
    temperature: float
    graders: int
    """Samples that are graded at a time."""
    algorithm: str
    """`algorithm.type`."""
    kl_coefficient: float
    """With one above 0, a reference model scores every sample."""
    gradient_checkpointing: bool
    """Whether the backward pass computes the activations a second time."""
    lr: float
    seed: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A sample to generate."""

    turns: list[Turn]
    """The lengths to be generated exactly; between two turns a tool takes `tool_s` and returns `returned_tokens`."""
    reward: float | None
    reward_s: float
    """Seconds that its grading takes."""


class GroupOfJobs(msgspec.Struct, frozen=True, kw_only=True):
    """A line for each group, by step and number."""

    step: int
    group: int
    """The number of the group in the run."""
    prompt_ids: list[int]
    samples: list[Job]


def write_jobs(setup: Setup, prompts: Iterable[Prompt], path: Path) -> None:
    """Write the jobs of a benchmark; `prompts` has one for each group."""
    lines: list[msgspec.Struct] = [_header(setup)]
    for number, (prompt, group) in enumerate(zip(prompts, setup.played.groups, strict=True)):
        jobs = [Job(turns=list(script.turns), reward=script.reward, reward_s=script.reward_s) for script in group]
        step = number // setup.config.groups_per_step
        lines.append(GroupOfJobs(step=step, group=number, prompt_ids=prompt.prompt_ids.tolist(), samples=jobs))
    with whole_file(path) as partial:
        partial.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _header(setup: Setup) -> Header:
    config = setup.config
    return Header(
        tailrace_jobs=FORMAT,
        model=str(resolve_model(config.model)),
        device=config.device,
        devices=setup.devices,
        precision=config.trainer.precision,
        threads=config.threads,
        steps=config.trainer.steps,
        groups_per_step=config.groups_per_step,
        group_size=config.algorithm.group_size,
        mini_batch_size=config.mini_batch_size,
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        graders=_graders(config),
        algorithm=config.algorithm.type,
        kl_coefficient=config.algorithm.kl.coefficient if isinstance(config.algorithm, PolicyGradientConfig) else 0.0,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        lr=config.trainer.lr,
        seed=config.seed,
    )


def _graders(config: RunConfig) -> int:
    """As many as `ReplayRewardTask` has, in all of its workers."""
    workers = config.cluster.reward.workers if config.pipeline.placement == "separated" else 1
    return workers * asyncio.run(capacity_of(config.rewards))


def check_played(events: Iterable[Event], setup: Setup) -> None:
    """Check that every response was made in its step, with exactly its length, and every step was trained.

    Raises:
        BenchError: a response is missing, or of another step or length; a step is missing, or none of the run; or an
            event ends before its start.
    """
    made: dict[tuple[int, int], Event] = {}
    trained = set()
    for event in events:
        if event.end < event.start:
            raise BenchError(f"an event {event.task} ends at {event.end:g} s, and starts at {event.start:g} s")
        if event.task == EventKind.SAMPLE and event.step is not None:
            made[_key(event.info)] = event
        elif event.task == EventKind.STEP:
            trained.add(event.step)
    for number, group in enumerate(setup.played.groups):
        for sample, script in enumerate(group):
            name = f"the response of group {number}, sample {sample},"
            _check_response(name, made.get((number, sample)), script, number // setup.config.groups_per_step)
    _check_trained(trained, setup.config.trainer.steps)


def _check_response(name: str, made: Event | None, script: Script, step: int) -> None:
    asked = sum(turn.generated_tokens for turn in script.turns)
    if made is None:
        raise BenchError(f"{name} was not made; {asked} tokens were asked for")
    if made.tokens != asked:
        raise BenchError(f"{name} has {made.tokens or 0} tokens; {asked} were asked for")
    if made.step != step:
        raise BenchError(f"{name} was made in step {made.step}; the jobs have it in step {step}")


def _check_trained(trained: Set[int | None], steps: int) -> None:
    if missing := set(range(steps)) - trained:
        raise BenchError(f"step {min(missing)} was not trained; the benchmark has {steps} steps")
    if others := trained - set(range(steps)):
        raise BenchError(f"a step event has step {next(iter(others))}; the benchmark's are 0 to {steps - 1}")


def _key(info: Mapping[str, object]) -> tuple[int, int]:
    try:
        return msgspec.convert((info.get("group"), info.get("sample")), tuple[int, int])
    except msgspec.ValidationError:
        raise BenchError(
            f"a sample event has the info {dict(info)!r}; expected the numbers `group` and `sample`"
        ) from None

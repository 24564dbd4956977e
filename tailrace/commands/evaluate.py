"""`tailrace eval`: takes a model or a run, and prints accuracy, pass@k, maj@k and reward with their intervals.

    prompts ──▶ Evaluator (tailrace/run/evaluation.py) ──each answer as it is graded──▶ JsonLines
                    └──answers──▶ figures and intervals ──▶ standard output

Errors in the input are found before the output is opened. Ctrl-C (or SIGTERM) ends the evaluation. Answers that are
graded by then have been written and count. A second Ctrl-C exits at once.
"""

import asyncio
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tailrace.commands.export import exported_checkpoint
from tailrace.commands.json_lines import JsonLines
from tailrace.commands.throughput import Throughput
from tailrace.config.generate import EvalConfig
from tailrace.engine.checks import check_context
from tailrace.engine.factory import make_backend
from tailrace.engine.opening import open_engine
from tailrace.errors import ConfigError, counted, first_error
from tailrace.events import EventLog
from tailrace.host.compute import prepare_torch
from tailrace.host.interrupt import INTERRUPTED, Interrupt
from tailrace.models.tokenizer import ResponseText
from tailrace.prompts.load import load_evaluated, source_key
from tailrace.report.tables import figures_table
from tailrace.rewards.answers import check_answers
from tailrace.rewards.graders import Graders
from tailrace.run.evaluation import (
    Answer,
    Evaluator,
    figures,
    judged_by_prompt,
    named_groups,
    of_several_by_prompt,
    ways_of,
)
from tailrace.run.inputs import check_tokens, max_prompt_tokens, open_model
from tailrace.statistics.intervals import Interval, fraction_interval, mean_interval
from tailrace.types import Prompt


class AnswerLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the output: one answer."""

    set: str
    """Name of the prompt's set."""
    prompt_id: str
    """Origin of the prompt."""
    way: str
    """`greedy` or `sampled`."""
    sample: int
    """Number among the answers to the prompt in this way, from 0."""
    prompt: str
    """The text that the model read."""
    response: str
    answer: str | None
    """The answer that the source gives."""
    reward: float | None
    """The reward; None where the grading failed."""
    finish_reason: str
    tokens: int
    """Tokens of the response."""
    final_answer: str | None = None
    """The answer that the response gives, as the grader reads it; empty where it gives none."""
    correct: bool | None = None
    """Whether the response is correct, where the grader says so."""
    parts: dict[str, float] = {}
    """Figures that the grader gave beside the reward."""
    error: str | None = None
    """The reason of a failed grading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of an evaluation."""

    model_dir: Path
    sets: Mapping[str, Sequence[Prompt]]
    decode: ResponseText
    """Makes text of the token ids of a response."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.prompt_ids) for prompts in self.sets.values() for prompt in prompts)


def evaluate(
    config: EvalConfig,
    output: Path | None = None,
    *,
    force: bool = False,
    as_json: bool = False,
    checkpoint: tuple[Path, int] | None = None,
    inputs: Sequence[str | Path] = (),
) -> int:
    """Evaluate `config.model` and print the figures. Return the exit code: 0, or 130 when interrupted.

    Args:
        output: a file for the answers, one JSON line each.
        force: replace that file where it exists.
        as_json: print one JSON object in place of a table.
        checkpoint: the directory of a run and a step, whose weights are evaluated in place of `config.model`.
        inputs: files, or patterns of them, that `output` never replaces, in addition to those of the prompts.

    Raises:
        UserError: something about the input is wrong, and nothing was written; or the output cannot be written.
        TailraceError: generation failed, or nothing could be graded. What was graded before is written.
    """
    sources = [config.prompts.source, *config.prompts.validation.values()]
    inputs = [*inputs, *(getattr(source, "path", "") for source in sources)]
    lines = None if output is None else JsonLines(output, force=force, inputs=inputs)
    prepare_torch(config.device, config.threads)
    if checkpoint is None:
        return _evaluate_model(config, lines, label=config.model.path, as_json=as_json)
    run, step = checkpoint
    with exported_checkpoint(run, step, device=config.device, threads=config.threads) as path:
        model = config.model.model_copy(update={"path": str(path)})
        evaluated = config.model_copy(update={"model": model})
        return _evaluate_model(evaluated, lines, label=f"{run} at step {step}", as_json=as_json)


def _evaluate_model(config: EvalConfig, lines: JsonLines | None, *, label: str, as_json: bool) -> int:
    """`label`: of the model, in what is printed."""
    inputs = load_inputs(config)
    answers: list[Answer] = []
    try:
        code = asyncio.run(_evaluate(config, inputs, lines, answers))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    except asyncio.CancelledError:
        code = INTERRUPTED
    if code == INTERRUPTED:
        print(f"Interrupted: these are the {counted(len(answers), 'answer')} that were graded.", file=sys.stderr)
    _print(config, inputs, answers, label=label, as_json=as_json)
    return code


def load_inputs(config: EvalConfig) -> Inputs:
    """Find the model and read the prompts.

    Raises:
        UserError: the model or the prompts are missing or wrong, or there are no prompts.
    """
    model_dir, tokenizer, decode = open_model(config)
    max_tokens = max_prompt_tokens(config.engine, config.sampling, config.prompts.max_prompt_tokens, model_dir)
    loaded = load_evaluated(config.prompts, tokenizer, max_tokens=max_tokens)
    if not loaded:
        raise ConfigError("there is nothing to evaluate: prompts has no validation, and holds nothing out of a source")
    for prompts in loaded.values():
        check_tokens(prompts, model_dir)
    sets = {name: prompts[: config.evaluation.max_prompts] for name, prompts in loaded.items()}
    inputs = Inputs(model_dir=model_dir, sets=sets, decode=decode)
    longest, new = inputs.longest_prompt, config.sampling.max_new_tokens
    make_backend(config.engine).check_cache(model_dir, longest_prompt=longest, max_new_tokens=new)
    return inputs


async def _evaluate(config: EvalConfig, inputs: Inputs, lines: JsonLines | None, answers: list[Answer]) -> int:
    """Fill `answers` as they are graded, and return the exit code."""
    async with AsyncExitStack() as stack:
        interrupt = stack.enter_context(Interrupt().watching())
        graders = await stack.enter_async_context(Graders(config.rewards))
        by_source = {source_key(name): prompts for name, prompts in inputs.sets.items()}
        await check_answers(config.rewards, by_source, graders)
        executor = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="device"))
        engine = await open_engine(config.engine, inputs.model_dir, device=config.device, executor=executor)
        stack.push_async_callback(engine.close)
        check_context(engine, longest_prompt=inputs.longest_prompt)
        evaluator = Evaluator(
            engine,
            graders,
            inputs.sets,
            ways_of(config.evaluation, config.sampling),
            inputs.decode,
            EventLog(sinks=()),
            seed=config.seed,
            actor="engine",
        )
        throughput = Throughput(evaluator.count, engine.stats)

        def take(answer: Answer) -> None:
            answers.append(answer)
            throughput.count(answer.sample)
            if lines is not None:
                lines.write(_line(answer))

        stack.enter_context(lines or nullcontext())
        await stack.enter_async_context(throughput.shown(Console(stderr=True)))
        try:
            await evaluator.run(0, take)
        except asyncio.CancelledError:
            if not interrupt.asked:
                raise
            interrupt.accept()
            return INTERRUPTED
    return 0


def _line(answer: Answer) -> AnswerLine:
    grade = answer.grade
    return AnswerLine(
        set=answer.set,
        prompt_id=answer.prompt.prompt_id,
        way=answer.way,
        sample=answer.index,
        prompt=answer.prompt.text,
        response=answer.response,
        answer=answer.prompt.answer,
        reward=grade.reward,
        finish_reason=answer.sample.finish_reason.value,
        tokens=len(answer.sample.response_ids),
        final_answer=grade.final_answer,
        correct=grade.correct,
        parts=dict(grade.parts),
        error=grade.error,
    )


def intervals(answers: Sequence[Answer], sets: Sequence[str], ways: Sequence[str]) -> dict[str, Interval]:
    """Return the intervals of accuracies, pass@k, maj@k and rewards, by the names of `figures`; see
    tailrace.statistics.intervals.py."""
    groups = named_groups(answers, sets, ways)
    return {f"{prefix}{name}": found for prefix, of_group in groups.items() for name, found in _intervals(of_group)}


def _intervals(answers: Sequence[Answer]) -> Iterator[tuple[str, Interval]]:
    judged = judged_by_prompt(answers)
    total = sum(map(len, judged))
    if judged:
        yield "accuracy", fraction_interval([fmean(right) for right in judged], total)
    for name, scores in of_several_by_prompt(answers).items():
        yield name, fraction_interval(scores, total)
    rewards: dict[int, list[float]] = {}
    for answer in answers:
        if answer.grade.reward is not None:
            rewards.setdefault(answer.number, []).append(answer.grade.reward)
    if found := mean_interval([fmean(of_prompt) for of_prompt in rewards.values()]):
        yield "reward", found


def _print(config: EvalConfig, inputs: Inputs, answers: Sequence[Answer], *, label: str, as_json: bool) -> None:
    ways = [way.name for way in ways_of(config.evaluation, config.sampling)]
    found = figures(answers, list(inputs.sets), ways)
    ranges = intervals(answers, list(inputs.sets), ways)
    if as_json:
        result: dict[str, Any] = {
            "model": label,
            "prompts": {name: len(prompts) for name, prompts in inputs.sets.items()},
            "answers": len(answers),
            "figures": found,
            "intervals_95": ranges,
        }
        print(msgspec.json.encode(result).decode())
        return
    sets = ", ".join(f"{len(prompts)} of {name}" for name, prompts in inputs.sets.items())
    print(f"{label}: {counted(len(answers), 'answer')} to {sets}")
    Console().print(_table(found, ranges, list(inputs.sets)))


def _table(found: Mapping[str, float], ranges: Mapping[str, Interval], sets: Sequence[str]) -> Table:
    """The table of all figures; with several sets first those of all prompts together, then those of each set."""
    table = figures_table("", "", "95 %")
    several = len(sets) > 1
    for of_set in ["", *sets] if several else [""]:
        if several:
            table.add_row(of_set or "all", "", "")
        for name, value in found.items():
            first, _, rest = name.partition("/")
            is_of_set = several and first in sets
            if (first if is_of_set else "") == of_set and (name in ranges or "failures" not in name or value):
                shown = f"  {rest if is_of_set else name}" if several else name
                table.add_row(shown, _number(name, value), _range(name, ranges.get(name)))
    return table


def _number(name: str, value: float) -> str:
    is_share = name.rpartition("/")[2].startswith(("accuracy", "pass@", "maj@"))
    return f"{value:.1%}" if is_share else f"{value:.4g}"


def _range(name: str, interval: Interval | None) -> str:
    if interval is None or not all(map(math.isfinite, interval)):
        return ""
    return " … ".join(_number(name, end) for end in interval)

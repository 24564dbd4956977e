"""`tailrace generate`: takes prompts, and writes one JSON line for every sample.

    prompts ──▶ requests, samples of a prompt together ──▶ engine ──each sample as it finishes──▶ JsonLines
                                                              └──stats──▶ Throughput, on stderr

Errors in the input are found before the output is opened. Ctrl-C (or SIGTERM, or a terminal that closes) aborts
unfinished samples; finished ones have been written. A second Ctrl-C exits at once.
"""

import asyncio
import math
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tailrace.commands.json_lines import JsonLines
from tailrace.commands.throughput import Throughput
from tailrace.config.generate import GenerateConfig
from tailrace.config.prompts import ColumnsConfig
from tailrace.engine.base import Engine, SampleStream
from tailrace.engine.checks import check_context
from tailrace.engine.factory import make_backend
from tailrace.engine.opening import open_engine
from tailrace.errors import ConfigError, PromptError, RequestError, UserError
from tailrace.host.compute import prepare_torch
from tailrace.host.interrupt import INTERRUPTED, Interrupt
from tailrace.models.tokenizer import ResponseText
from tailrace.planning.order import first_in, longest_first
from tailrace.prompts.load import check_lengths
from tailrace.prompts.order import sample_seed
from tailrace.prompts.presentation import present
from tailrace.prompts.sources.base import table_rows
from tailrace.prompts.sources.factory import source_rows
from tailrace.run.inputs import check_tokens, open_model
from tailrace.types import FinishReason, Prompt, Request, Sample

EXPECTED_TOKENS = "expected_tokens"
"""The column of the prompts that the order longest_first and the estimate ranked read."""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the output: one sample."""

    index: int
    """Index of the prompt among all prompts, from 0."""
    prompt_id: str
    """Origin of the prompt."""
    prompt: str
    """The text that the model read."""
    sample: int
    """Number of the sample among those of the prompt, from 0."""
    response: str
    """Text of the response. Special tokens are left out, unless `sampling.keep_special_tokens` is true."""
    finish_reason: str
    tokens: int
    """Tokens of the response, including the end-of-sequence token."""
    log_prob: float
    """Sum of the log-probabilities of those tokens."""
    weight_version: int
    answer: str | None = None
    metadata: dict[str, Any] = {}
    """The other columns of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of a generation."""

    model_dir: Path
    prompts: list[Prompt]
    decode: ResponseText
    """Makes text of the token ids of a response."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.prompt_ids) for prompt in self.prompts)


def generate(
    config: GenerateConfig,
    texts: Sequence[str] = (),
    output: Path | None = None,
    *,
    force: bool = False,
    inputs: Sequence[str | Path] = (),
) -> int:
    """Answer `texts`, or the prompts of `config.prompts.source`. Return the exit code: 0, or 130 when interrupted.

    Args:
        output: the file to write; standard output by default.
        force: replace that file where it exists.
        inputs: files that are never replaced, in addition to those of the prompts.

    Raises:
        UserError: something about the input is wrong, and nothing was written; or the output cannot be written.
        EngineError: generation failed. What was finished before is written.
    """
    lines = JsonLines(output, force=force, inputs=[*inputs, getattr(config.prompts.source, "path", "")])
    prepare_torch(config.device, config.threads)
    loaded = load_inputs(config, texts)
    try:
        return asyncio.run(_generate(config, loaded, lines))
    except asyncio.CancelledError:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def load_inputs(config: GenerateConfig, texts: Sequence[str]) -> Inputs:
    """Find the model, read the prompts and check that each leaves room for a response.

    Raises:
        UserError: the model or the prompts are missing or wrong.
    """
    if texts and config.prompts.source is not None:
        raise ConfigError("prompts are given as arguments and as prompts.source; give them in one way")
    if not texts and config.prompts.source is None:
        raise ConfigError("there are no prompts; give them as arguments, or a file with --prompts FILE")
    model_dir, tokenizer, decode = open_model(config)
    if config.prompts.source is not None:
        rows = source_rows(config.prompts.source, "prompts.source")
    else:
        records = ((f"argument {k}", {"prompt": _typed(text, k)}) for k, text in enumerate(texts, 1))
        rows = table_rows(records, ColumnsConfig(answer_column=None), "prompts.source")
    prompts = present(rows, config.prompts, tokenizer)
    if not prompts:
        raise PromptError("prompts.source has no prompts")
    context = make_backend(config.engine).context_length(model_dir)
    check_lengths(prompts, context - 1, f"shorten or remove them: the context is {context}, the response's included")
    check_tokens(prompts, model_dir)
    inputs = Inputs(model_dir=model_dir, prompts=prompts, decode=decode)
    longest, new = inputs.longest_prompt, config.sampling.max_new_tokens
    make_backend(config.engine).check_cache(model_dir, longest_prompt=longest, max_new_tokens=new)
    return inputs


def _typed(argument: str, number: int) -> str:
    """Return the text of an argument. Python keeps the bytes of characters that the locale lacks; they are read as
    UTF-8."""
    try:
        argument.encode()
        return argument
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        raise PromptError(
            f"argument {number}, {argument!a}, is not UTF-8; --prompts FILE reads prompts from a file"
        ) from None


def make_requests(config: GenerateConfig, prompts: Sequence[Prompt]) -> list[Request]:
    """Make `config.samples` requests for each prompt; a request's id is prompt index · samples + sample.

    Raises:
        PromptError: the order is longest_first, or the estimate of adaptive TP ranked, and a prompt does not give the
            expected length of its responses.
    """
    expected = _all_expected_tokens(config, prompts)
    priorities = longest_first(expected) if config.order == "longest_first" else first_in(len(prompts))
    return [
        Request(
            request_id=index * config.samples + sample,
            group_id=index,
            prompt_ids=prompt.prompt_ids,
            sampling=config.sampling,
            seed=sample_seed(config.seed, index, sample),
            priority=priorities[index],
            expected_tokens=expected[index] if expected else None,
        )
        for index, prompt in enumerate(prompts)
        for sample in range(config.samples)
    ]


def _all_expected_tokens(config: GenerateConfig, prompts: Sequence[Prompt]) -> list[float]:
    """Return the expected tokens of each prompt; an empty list where they are not needed."""
    if config.order == "longest_first":
        return [_expected_tokens(prompt, "order longest_first") for prompt in prompts]
    if config.engine.reads_expected_tokens:
        return [_expected_tokens(prompt, "engine.adaptive_tp.estimate ranked") for prompt in prompts]
    return []


def _expected_tokens(prompt: Prompt, who: str) -> float:
    expected = prompt.metadata.get(EXPECTED_TOKENS)
    if isinstance(expected, bool) or not isinstance(expected, int | float) or not math.isfinite(expected):
        shown = repr(expected) if EXPECTED_TOKENS in prompt.metadata else "nothing"
        raise PromptError(f"{who} needs a number {EXPECTED_TOKENS} in {prompt.prompt_id}, not {shown}")
    return float(expected)


async def _generate(config: GenerateConfig, inputs: Inputs, lines: JsonLines) -> int:
    async with AsyncExitStack() as stack:
        interrupt = stack.enter_context(Interrupt().watching())
        requests = make_requests(config, inputs.prompts)
        engine = await _open_engine(config, inputs, stack)
        check_context(engine, longest_prompt=inputs.longest_prompt)
        stream = await stack.enter_async_context(aclosing(_submit(engine, requests)))
        stack.enter_context(lines)
        throughput = Throughput(len(requests), engine.stats)
        console = Console(stderr=True, force_interactive=False if lines.on_terminal else None)
        async with throughput.shown(console), aclosing(_finished(engine, stream, requests, interrupt)) as samples:
            async for sample in samples:
                lines.write(_line(sample, config, inputs))
                throughput.count(sample)
        interrupted = throughput.samples < len(requests)
        if interrupted:
            print(f"Interrupted: {throughput.samples} of {len(requests)} samples are written.", file=sys.stderr)
        print(throughput.summary(), file=sys.stderr)
        return INTERRUPTED if interrupted else 0


async def _open_engine(config: GenerateConfig, inputs: Inputs, stack: AsyncExitStack) -> Engine:
    executor = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="device"))
    engine = await open_engine(config.engine, inputs.model_dir, device=config.device, executor=executor)
    stack.push_async_callback(engine.close)
    return engine


def _submit(engine: Engine, requests: Sequence[Request]) -> SampleStream:
    """Submit the requests and return the stream of their samples. What an engine refuses here is an error of the
    user."""
    try:
        return engine.submit(requests)
    except RequestError as error:
        raise UserError(str(error)) from None


async def _finished(
    engine: Engine, stream: SampleStream, requests: Sequence[Request], interrupt: Interrupt
) -> AsyncGenerator[Sample]:
    """Yield the samples as they finish; after an interrupt, those that had finished already."""
    while True:
        try:
            sample = await anext(stream)
        except StopAsyncIteration:
            return
        except asyncio.CancelledError:
            if not interrupt.asked:
                raise
            interrupt.accept()
            await engine.abort(request.request_id for request in requests)
            continue
        if sample.finish_reason is not FinishReason.ABORT:
            yield sample


def _line(sample: Sample, config: GenerateConfig, inputs: Inputs) -> Line:
    index, number = divmod(sample.request_id, config.samples)
    prompt = inputs.prompts[index]
    return Line(
        index=index,
        prompt_id=prompt.prompt_id,
        prompt=prompt.text,
        sample=number,
        response=inputs.decode(sample.response_ids.tolist()),
        finish_reason=sample.finish_reason.value,
        tokens=len(sample.response_ids),
        log_prob=float(sample.rollout_log_probs.sum()),
        weight_version=int(sample.weight_versions[-1]),
        answer=prompt.answer,
        metadata=dict(prompt.metadata),
    )

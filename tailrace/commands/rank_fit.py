"""`tailrace rank fit`: teaches a predictor of lengths, and says how well it foresees what it was not taught.

responses of `tailrace generate`, or traces ──▶ predictor ──▶ ranker, which `rollout.lengths.ranker` names

All responses count alike, as of version 0: the weights that made them are older than those of the run to come.
"""

import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.console import Console
from rich.table import Table

from tailrace.commands.files import check_apart, check_new_file
from tailrace.config.model import ModelConfig
from tailrace.config.rollout import FeaturesLengths, HistoryLengths, LambdarankLengths, LengthsConfig, ModelLengths
from tailrace.errors import UNREADABLE, ConfigError, UserError, counted, one_line
from tailrace.host.whole_file import whole_file
from tailrace.models.resolve import resolve_model
from tailrace.models.tokenizer import load_tokenizer
from tailrace.planning.lengths.assessment import LONGEST, Assessment, assess
from tailrace.planning.lengths.base import Asked, Finished, LengthPredictor
from tailrace.planning.lengths.ranker import pack
from tailrace.prompts.task_name import task_name
from tailrace.report.tables import figures_table
from tailrace.run.lengths import make_lengths
from tailrace.workloads.files import read_trace

_HELD_OUT = 5
"""One of so many prompts is foreseen, and not taught. It is odd, so that both halves teach alike (`half_of`)."""
_LEAST = 16
"""Fewer responses say nothing."""


class _Line(msgspec.Struct, frozen=True):
    """What is read of a line of `tailrace generate`."""

    prompt: str
    tokens: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    metadata: dict[str, Any] = {}


def lengths_config(kind: str, *, path: str | None, layer: int | None, words: int) -> LengthsConfig:
    """Make the configuration of a kind of lengths that can be taught.

    Raises:
        ConfigError: there is no such kind, or an option is of another one.
    """
    if kind != "model" and (path is not None or layer is not None):
        raise ConfigError(f"--reader and --layer are for --type model, and not for {kind}; leave them out")
    match kind:
        case "history":
            return HistoryLengths()
        case "features":
            return FeaturesLengths(words=words)
        case "lambdarank":
            return LambdarankLengths(words=words)
        case "model":
            return ModelLengths(path=path, layer=layer)
    raise ConfigError(f"--type {kind} cannot be taught; give history, features, lambdarank or model")


def rank_fit(sources: Sequence[Path], output: Path, config: LengthsConfig, *, model: str, force: bool = False) -> None:
    """Teach a predictor, write what it has learned, and print how well it foresees held-out responses.

    Args:
        sources: outputs of `tailrace generate`, or traces.
        config: of the predictor.
        model: see `model.path`; its tokenizer reads the prompts as a run does.
        force: replace the output where it exists.

    Raises:
        UserError: a source cannot be read, or the output cannot be made. Nothing is written.
    """
    check_new_file("--output", output, force=force)
    if output.is_file():
        check_apart("--output", output, sources)
    model_dir = resolve_model(ModelConfig(path=model))
    finished = [response for source in sources for response in _read(source, model_dir, config)]
    if len(finished) < _LEAST:
        raise UserError(f"{counted(len(finished), 'response')} in {_names(sources)}; give {_LEAST} or more")
    taught, held_out = _split(finished, by_prompt=not isinstance(config, HistoryLengths))
    predictor = make_lengths(config, model_dir)
    predictor.prepare([response.asked for response in finished])
    predictor.learn(taught)
    found = _foreseen(predictor, held_out)
    if not any(predictor.knows(response.asked) for response in held_out):
        raise UserError(f"{predictor.name} has learned nothing from {len(taught)} responses; give more")
    predictor.learn(held_out)
    try:
        with whole_file(output) as file:
            file.write_bytes(pack(predictor))
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
    prompts = len({response.asked.prompt_id for response in finished})
    tasks = len({response.asked.task for response in finished if response.asked.task})
    of_tasks = f" of {counted(tasks, 'task')}" if tasks else ""
    print(f"{output}: {predictor.name}, taught by {len(finished)} responses to {prompts} prompts{of_tasks}")
    Console().print(_table(found))


def _read(source: Path, model_dir: Path, config: LengthsConfig) -> Iterator[Finished]:
    """Read the responses of a file."""
    if source.is_dir() or source.suffix == ".parquet":
        yield from _of_trace(source, config)
        return
    try:
        with source.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror or one_line(error)}") from None
    if b'"prompt"' in first or b'"response"' in first:
        yield from _of_lines(source, model_dir)
    else:
        yield from _of_trace(source, config)


def _of_lines(source: Path, model_dir: Path) -> Iterator[Finished]:
    tokenizer = load_tokenizer(model_dir)
    asked: dict[str, Asked] = {}
    with source.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = msgspec.json.decode(text, type=_Line)
            except UNREADABLE as error:
                raise UserError(
                    f"{source}, line {number}: {one_line(error)}; give what tailrace generate has written, or a trace"
                ) from None
            if line.prompt not in asked:
                ids = tokenizer.encode(line.prompt, add_special_tokens=False)
                read = str(tokenizer.decode(ids, skip_special_tokens=True))
                asked[line.prompt] = Asked.of(len(ids), read, task_name(line.metadata))
            yield Finished(asked=asked[line.prompt], tokens=line.tokens, version=0)


def _of_trace(source: Path, config: LengthsConfig) -> Iterator[Finished]:
    trace = read_trace(source)
    if not isinstance(config, FeaturesLengths):
        raise UserError(f"{source} is a trace, which has no texts; it can teach --type features alone")
    columns = ("step", "group", "prompt_tokens", "response_tokens")
    for step, group, prompt, tokens in trace.samples.select(columns).iter_rows():
        asked = Asked(prompt_id=f"{source}/{step}/{group}", prompt_tokens=prompt)
        yield Finished(asked=asked, tokens=max(1, tokens), version=0)


def _split(finished: Iterable[Finished], *, by_prompt: bool) -> tuple[list[Finished], list[Finished]]:
    """What is taught, and what is held out: some prompts, or else some responses.

    A file has short responses first where they were written as they finished, so these are drawn by chance.
    """
    parts: tuple[list[Finished], list[Finished]] = [], []
    chance = random.Random(0)
    for response in finished:
        place = zlib.crc32(response.asked.prompt_id.encode()) if by_prompt else chance.randrange(_HELD_OUT)
        parts[place % _HELD_OUT == 0].append(response)
    if not all(parts):
        raise UserError("the responses are to too few prompts to hold some out; give more")
    return parts


def _foreseen(predictor: LengthPredictor, held_out: Sequence[Finished]) -> Assessment:
    asked = [response.asked for response in held_out]
    predictor.prepare(asked)
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(one.prompt_id for one in asked))}
    return assess(
        predictor.expect(asked),
        [response.tokens for response in held_out],
        [numbers[one.prompt_id] for one in asked],
    )


def _table(found: Assessment) -> Table:
    table = figures_table(f"{found.responses} held-out responses", "foreseen", "other samples", "chance")
    for percent in LONGEST:
        table.add_row(
            f"of the longest {percent} %", _share(found.recall[percent]), _share(found.ceiling[percent]), f"{percent} %"
        )
    table.add_row("rank correlation", "-" if found.tau is None else f"{found.tau:.2f}", "", "0")
    table.add_row("within the interval", _share(found.inside), "80 %", "")
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}".replace("%", " %")


def _names(sources: Sequence[Path]) -> str:
    return ", ".join(map(str, sources))

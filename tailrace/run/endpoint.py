"""The generation service of a run behind OpenAI's HTTP API (`rollout.http`)."""

import inspect
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError

from tailrace.config.rollout import HttpConfig
from tailrace.errors import one_line
from tailrace.events import owner_only
from tailrace.models.info import describe_model
from tailrace.models.tokenizer import load_tokenizer
from tailrace.registers import run_files
from tailrace.rollout.http.app import Decode, Endpoint, Limits
from tailrace.rollout.http.asked import Reader
from tailrace.rollout.http.server import bound, listening
from tailrace.rollout.service import GenerationService
from tailrace.types import WeightVersion


def make_reader(model_dir: Path, tokenizer: Any, *, name: str) -> Reader:
    """What reads requests for the model in a directory. `name`: of the model, for clients."""
    model = describe_model(model_dir)
    taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"tools", "documents"}

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return ids

    def chat(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> list[int]:
        if not tokenizer.chat_template:
            raise ValueError("the model has no chat template; use /v1/completions")
        if others := sorted(taken & arguments.keys()):  # a template of a client's own could compute forever
            raise ValueError(f"chat_template_kwargs has {others[0]}, which is none of the template's; remove it")
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ValueError(f"the model's chat template refuses the messages: {one_line(error)}") from None
        return encode(text)

    encode("")  # the first call may set up the tokenizer; after it, threads can share that
    return Reader(model=name, encode=encode, chat=chat, max_model_len=model.context_length, vocab_size=model.vocab)


@asynccontextmanager
async def endpoint(
    config: HttpConfig,
    service: GenerationService,
    model_dir: Path,
    decode: Decode,
    newest: Callable[[], WeightVersion],
    run: Path,
) -> AsyncIterator[None]:
    """Serve within the block. The file `http.json` of the run has the address and the token.

    Raises:
        UserError: the port cannot be had.
    """
    token = secrets.token_urlsafe(24) if config.token is None else config.token
    reader = make_reader(model_dir, load_tokenizer(model_dir), name=config.name)
    limits = Limits(most_prompts=config.most_prompts, limit_s=config.limit_s)
    made = Endpoint(service, reader, decode, token=token or None, limits=limits, newest=newest)
    path = run / run_files.HTTP
    listener = bound(config.host, config.port, keys=("rollout.http.host", "rollout.http.port"))
    async with listening(made, listener) as url:
        with open(path, "wb", opener=owner_only) as file:
            file.write(msgspec.json.encode({"url": f"{url}/v1", "model": config.name, "token": token}) + b"\n")
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                path.unlink()

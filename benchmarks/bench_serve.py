"""`make bench-serve`: tokens a second through HTTP, beside the engine's own, and beside vLLM's server.

    python benchmarks/bench_serve.py [--rounds 5] [--no-vllm]

The three load the same model, SmolLM2-135M, and stay; only one of them works at a time. Each client makes one request
after the other with the openai client: prompts of 64 random tokens, 128 new ones, without an end of sequence. The last
line is JSON: the medians over rounds, and for each number of clients the median of the ratios within a round.
"""

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import openai
import typer
from gate import Contestant, see_off

from tailrace.config.model import ModelConfig
from tailrace.host.allocator import KEPT_MEMORY
from tailrace.models.resolve import resolve_model

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench-serve"
VLLM_ENV = HERE.parent / ".venv-vllm"
VLLM_SETTINGS = {
    **KEPT_MEMORY,  # as ours has it
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),  # by itself it leaves one core
    "LD_PRELOAD": str(VLLM_ENV / "lib" / "libiomp5.so"),  # vLLM asks for it
    "HF_HUB_OFFLINE": "1",
}
TASKS = {1: 3, 8: 2, 32: 1}
"""Requests of each client, by the number of clients."""
PROMPT_TOKENS, NEW_TOKENS = 64, 128
START_S = 600.0
"""vLLM compiles for minutes."""
REST_S = 2.0
"""Rest before each turn: vLLM's worker keeps a core busy for a second after its last step."""
TOKEN = "bench"


@contextmanager
def running(command: list[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A process that is ended with the block."""
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        see_off(process)


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def url(port: int) -> str:
    """The address of a server of this machine."""
    return f"http://127.0.0.1:{port}"


def wait_for(address: str, process: "subprocess.Popen[str]") -> None:
    """Wait until a server answers."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    how = f"has not answered at {address} within {START_S:g} s" if process.poll() is None else "has ended"
    raise SystemExit(f"{process.args!r} {how}")


async def http_seconds(address: str, model: str, clients: int, requests: int, number: int) -> float:
    """Seconds for all requests of all clients. `number`: of the round, each of which has other prompts."""
    chance = np.random.default_rng((number, clients))
    prompts = [[chance.integers(100, 40_000, PROMPT_TOKENS).tolist() for _ in range(requests)] for _ in range(clients)]
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=TOKEN, timeout=600) as asking:

        async def client(own: list[list[int]]) -> None:
            for prompt in own:
                answer = await asking.completions.create(
                    model=model, prompt=prompt, max_tokens=NEW_TOKENS, extra_body={"ignore_eos": True}
                )
                assert answer.usage is not None
                assert answer.usage.completion_tokens == NEW_TOKENS

        start = time.perf_counter()
        await asyncio.gather(*map(client, prompts))
        return time.perf_counter() - start


def direct_seconds(engine: Contestant, clients: int, requests: int, number: int) -> float:
    """The same without HTTP."""
    tokens = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    return float(engine.step(clients=clients, requests=requests, number=number, **tokens)["seconds"])


def main(rounds: int = 5, vllm: Annotated[bool, typer.Option("--vllm/--no-vllm")] = True) -> None:
    """Compare."""
    model = str(resolve_model(ModelConfig()).resolve())
    ours, theirs = free_port(), free_port()
    serve = [sys.executable, "-m", "tailrace", "serve", model, "--name", "model", "--port", str(ours), "--token", TOKEN]
    serve += ["engine.dtype=bfloat16"]  # as both others have it, also on a CPU whose default is float32
    direct = [sys.executable, str(HERE / "serve_direct.py"), model]
    # Not `vllm serve`: it looks for a package called vllm, and the build for CPUs is called vllm-cpu.
    other = [str(VLLM_ENV / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    other += ["--served-model-name", "model", "--port", str(theirs), "--dtype", "bfloat16", "--api-key", TOKEN]
    other += ["--max-model-len", "2048", "--max-num-seqs", "64"]
    BUILD.mkdir(parents=True, exist_ok=True)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL}
    tokens_per_s: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        engine = Contestant(direct, BUILD / "direct.log", KEPT_MEMORY)
        stack.callback(engine.stop)
        server = stack.enter_context(running(serve, **quiet))
        wait_for(url(ours), server)
        arms: dict[str, Callable[[int, int, int], float]] = {
            "direct": partial(direct_seconds, engine),
            "http": lambda *task: asyncio.run(http_seconds(url(ours), "model", *task)),
        }
        with running(other, env=os.environ | VLLM_SETTINGS, **quiet) if vllm else nullcontext() as peer:
            if peer is not None:
                wait_for(url(theirs), peer)
                arms["vllm"] = lambda *task: asyncio.run(http_seconds(url(theirs), "model", *task))
            for number in range(rounds + 1):  # the first one warms up
                for clients, requests in TASKS.items():
                    for name, seconds in arms.items():
                        time.sleep(REST_S)
                        rate = clients * requests * NEW_TOKENS / seconds(clients, requests, number)
                        if number:
                            tokens_per_s[name][clients].append(rate)
                print(number, {name: {n: round(of[-1]) for n, of in by.items()} for name, by in tokens_per_s.items()})
    medians = {name: {n: round(statistics.median(of)) for n, of in by.items()} for name, by in tokens_per_s.items()}

    def ratio(one: str, other: str) -> dict[int, float]:
        pairs = {n: zip(tokens_per_s[one][n], tokens_per_s[other][n], strict=True) for n in TASKS}
        return {n: round(statistics.median(a / b for a, b in of), 3) for n, of in pairs.items()}

    found = {"bench": "serve", "http_over_direct": ratio("http", "direct"), "tokens_per_s": medians}
    if vllm:
        found["http_over_vllm"] = ratio("http", "vllm")
    print(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)

"""`tailrace serve`: a model behind OpenAI's HTTP API, with one engine in this process or several in their own.

clients ──▶ Endpoint ──▶ GenerationService ──▶ LocalPort (one engine), or RemotePorts (several, on Ray)
"""

import asyncio
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from tailrace.cluster.factory import make_cluster
from tailrace.cluster.pool import DeathBudget, Pool
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.config.generate import ServeConfig
from tailrace.config.rollout import LOOPBACK
from tailrace.errors import UserError, counted, first_error
from tailrace.events import EventLog
from tailrace.host.cpu import usable_cores
from tailrace.host.interrupt import Interrupt
from tailrace.models.tokenizer import ResponseText
from tailrace.registers import run_files
from tailrace.rollout.base import EnginePort
from tailrace.rollout.http.app import Endpoint, Limits
from tailrace.rollout.http.asked import Reader
from tailrace.rollout.http.server import bound, listening
from tailrace.rollout.service import GenerationService
from tailrace.run.endpoint import make_reader
from tailrace.run.generation import RemotePort
from tailrace.run.inputs import open_model
from tailrace.run.loop_runtime import log_warnings
from tailrace.run.workers.engine import engine_worker, open_port


def served_model(given: str) -> str:
    """The model of the argument: that of a run's directory, or a model itself.

    Raises:
        UserError: the directory is of a run that has exported no model.
    """
    run = Path(given)
    if not (run / run_files.EVENTS).exists():
        return given
    model = run / run_files.MODEL
    if not model.exists():
        raise UserError(f"{run} has exported no model yet; make one of a checkpoint: tailrace export {run}")
    return str(model)


def serve(config: ServeConfig, *, name: str, engines: int, host: str, port: int, token: str | None) -> None:
    """Serve until Ctrl-C.

    Args:
        name: of the model, for clients.
        engines: 1 is in this process; more have a process each, and share the machine's cores.
        token: clients need it; empty lets everybody in, None makes one.

    Raises:
        UserError: the model, an option or the port cannot be used.
        TailraceError: an engine has failed, or one that died was not replaced.
    """
    _check_engines(engines, config)
    if token == "" and host not in LOOPBACK:
        raise UserError(f"--host {host} lets other machines in, so a token is needed; leave out --token '' or give one")
    model_dir, tokenizer, decode = open_model(config)
    token = secrets.token_urlsafe(24) if token is None else token
    reader = make_reader(model_dir, tokenizer, name=name)
    try:
        with bound(host, port) as listener:
            asyncio.run(_serve(config, model_dir, reader, decode, engines=engines, listener=listener, token=token))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    except asyncio.CancelledError:
        print("ended", file=sys.stderr)


def _check_engines(engines: int, config: ServeConfig) -> None:
    """Check that the machine has room for the engines: for each a GPU, or at least a core.

    Raises:
        UserError: it does not.
    """
    if engines < 1:
        raise UserError(f"--engines is {engines}; give 1 or more")
    on_gpu = config.device.startswith("cuda")
    there = torch.cuda.device_count() if on_gpu else len(usable_cores())
    if engines > max(1, there):
        what = "GPU" if on_gpu else "core"
        raise UserError(f"--engines is {engines}, and this machine has {counted(there, what)}; give at most {there}")


async def _serve(
    config: ServeConfig,
    model_dir: Path,
    reader: Reader,
    decode: ResponseText,
    *,
    engines: int,
    listener: socket.socket,
    token: str,
) -> None:
    async with AsyncExitStack() as stack:
        stack.enter_context(Interrupt().watching())
        print(f"loading {model_dir}", file=sys.stderr)
        ports, pools = await _ports(config, model_dir, engines, stack)
        service = GenerationService(ports)
        limits = Limits(most_body=config.most_body, most_prompts=config.most_prompts, limit_s=config.limit_s)
        endpoint = Endpoint(service, reader, decode, token=token or None, limits=limits)
        async with asyncio.TaskGroup() as tasks, listening(endpoint, listener) as url:
            tasks.create_task(service.run())
            for pool in pools:
                tasks.create_task(pool.run())
            print(f"{reader.model} at {url}/v1", flush=True)
            if token:
                print(f"token {token}", flush=True)
            await asyncio.get_running_loop().create_future()  # until Ctrl-C


async def _ports(
    config: ServeConfig, model_dir: Path, engines: int, stack: AsyncExitStack
) -> tuple[list[EnginePort], Sequence[Pool]]:
    """Start the engines. Returns their ports, and the pool of their workers, if there is one."""
    log = EventLog(sinks=(log_warnings,))
    if engines == 1:
        return [await open_port(config, model_dir, log, stack, name="")], ()
    threads = config.threads or max(1, len(usable_cores()) // engines)
    config = config.model_copy(update={"threads": threads})
    pool_config = PoolConfig(cpus=0, threads=threads, gpus=1 if config.device.startswith("cuda") else 0)
    specs = [engine_worker(f"engine-{number}", pool_config, config, model_dir) for number in range(engines)]
    cluster_config = ClusterConfig()
    cluster = await stack.enter_async_context(make_cluster(cluster_config, {"rollout": pool_config}))
    pool = Pool(cluster, specs, cluster_config, log, budget=DeathBudget(cluster_config.max_deaths))
    stack.push_async_callback(pool.close)
    await pool.start()
    return [RemotePort(pool, index, name) for index, name in enumerate(pool.names)], [pool]

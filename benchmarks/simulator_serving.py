"""Recorded runs of vLLM 0.19, beside the same requests in the simulator's batches.

    vllm_replay_error_pct            the worst errors of the makespan and of the mean latency
    vllm_replay_analytic_error_pct   the same where no step rests on kernel tables

The source is `llmservingsim`, in the folder TAILRACE_DATA: 300 requests each, whose lengths and arrivals are given.
Step times rest on kernel tables where aiconfigurator-core has the device and replicas share nothing. Else they are
analytic: tables of shared experts hold the exchanges of the machine on which they were made. The bandwidths of devices
and links are those in the `config.json` of a run. Nothing is fitted to the runs.

Each run has its figures beside the recorded ones, its errors beside those that the authors of the data state for their
simulator, and predicted over measured seconds of steps that only decode, seconds in which no prompt was computed.
"""

import csv
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Self

import typer

from tailrace.planning.hardware.base import Pool
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.memory import CONTEXT_BYTES, engine_memory
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.basis import Source
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.planning.step_times.kernels import SYSTEMS, KernelStepTimes
from tailrace.planning.step_times.rates import HOSTS
from tailrace.simulator.agenda import Agenda, Entry
from tailrace.simulator.batch import Batch
from tailrace.simulator.batch import Sequence as Made
from tailrace.simulator.lockstep import Lockstep

FOLDER = "llmservingsim"
KINDS = {"RTX4090": "RTX-4090", "RTXPRO6000": "RTX-PRO-6000"}
USED = 0.9
"""The part of the memory that vLLM uses by default."""
STATED = {
    "makespan_s": "",
    "latency_s": "Latency Mean",
    "ttft_s": "TTFT Mean",
    "ttft_median_s": "TTFT Median",
    "tpot_s": "TPOT Mean",
    "tpot_median_s": "TPOT Median",
}
"""Figures, and what the authors of the data call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, and what was recorded of it; seconds since the first one came."""

    name: str
    prompt: int
    """Tokens."""
    response: int
    """Tokens."""
    came: float
    first: float
    """When its first token was made."""
    last: float
    like: str
    """An earlier request that begins as it does; "" for none."""
    shared: int
    """Tokens that both begin with."""

    def context_at(self, time: float) -> float:
        """Tokens that are cached while it decodes; 0 before and after."""
        if not self.first <= time < self.last:
            return 0.0
        return self.prompt + self.response * (time - self.first) / (self.last - self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A recorded run."""

    name: str
    kind: str
    shape: ModelShape
    pool: Pool
    replicas: int
    slots: int
    step_tokens: int
    """The most tokens of a step."""
    recorded_cache: int | None
    """Tokens that the cache holds; None where they were not recorded."""
    requests: tuple[Request, ...]
    decoding: tuple[tuple[float, float, float], ...]
    """Seconds without prompts: their middle, the sequences that decode, and the tokens that these make."""
    stated: dict[str, float]
    """Errors of the simulator of the data's authors, in percent."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The run of a folder."""
        kind, model = KINDS[folder.parent.name], folder.name.removesuffix("-Instruct-2507")
        meta = json.loads((folder / "vllm" / "meta.json").read_text(encoding="utf-8"))
        machine = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        engine = meta["engine_kwargs"]
        replicas = engine["data_parallel_size"]
        pool = open_cluster(f"{replicas}x{kind}").pools[0]
        found = {
            "memory_gb_s": float(machine["nodes"][0]["instances"][0]["npu_mem"]["mem_bw"]),
            "link_gb_s": float(machine["link_bw"]),
            "link_us": machine["link_latency"] / 1e3,
        }
        prefixes = folder.parents[1] / f"prefix_overlap_{model.split('-')[0].lower()}.csv"
        return cls(
            name=f"{kind} {model}",
            kind=kind,
            shape=find_shape(model),
            pool=replace(pool, device=pool.device.model_copy(update=found)),
            replicas=replicas,
            slots=engine["max_num_seqs"],
            step_tokens=engine["max_num_batched_tokens"],
            recorded_cache=meta.get("kv_cache", {}).get("num_kv_tokens"),
            requests=tuple(read_requests(folder / "vllm" / "requests.jsonl", prefixes)),
            decoding=tuple(read_decoding(folder / "vllm" / "timeseries.csv")),
            stated=read_stated(folder / "validation" / "summary.txt"),
        )

    @property
    def shares(self) -> bool:
        """Whether replicas share the experts out."""
        return self.replicas > 1

    @property
    def planned_cache(self) -> int:
        """Tokens for which a replica has room beside weights and activations."""
        memory = engine_memory(self.shape, tp=1, cache_tokens=0, step_tokens=self.step_tokens, batch_size=self.slots)
        experts = self.shape.feed_forward_parameters if self.shape.experts else 0
        elsewhere = 2.0 * experts * (1 - 1 / self.replicas)
        left = self.pool.device.memory_bytes * USED - (memory.peak - elsewhere) - CONTEXT_BYTES
        return int(left / self.shape.cache_bytes())


def read_requests(file: Path, prefixes: Path) -> Iterator[Request]:
    """Yield the requests of a run, as they came. The clock of arrivals is another one than that of the tokens."""
    with prefixes.open(encoding="utf-8") as lines:
        shared = {row["request_id"]: row for row in csv.DictReader(lines)}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    came = min(row["arrival_time"] for row in rows)
    start = min(row["queued_ts"] for row in rows)
    for row in sorted(rows, key=lambda row: row["arrival_time"]):
        prefix = shared[row["request_id"]]
        yield Request(
            name=row["request_id"],
            prompt=row["input_toks"],
            response=row["output_toks"],
            came=row["arrival_time"] - came,
            first=row["first_token_ts"] - start,
            last=row["last_token_ts"] - start,
            like=prefix["first_request_with_it"],
            shared=int(prefix["shared_prefix_toks"]),
        )


def read_decoding(file: Path) -> Iterator[tuple[float, float, float]]:
    """Yield the seconds of a run in which no prompt was computed, see `Run.decoding`."""
    with file.open(encoding="utf-8") as lines:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
    for before, row in pairwise(rows):
        if before["prompt_throughput"] == row["prompt_throughput"] == 0 < row["running"]:
            yield row["t"] - 0.5, (before["running"] + row["running"]) / 2, row["gen_throughput"]


def read_stated(file: Path) -> dict[str, float]:
    """Return the errors of another simulator, in percent, by its own names."""
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {" ".join(words[:2]): float(words[4].rstrip("%")) for words in lines if len(words) == 5}


class Server:
    """Replicas that serve the requests of a run, in simulated time."""

    def __init__(self, run: Run, times: Source, cache_tokens: int) -> None:
        """`times`: of replicas that share the experts out, where there are several."""
        self._agenda = Agenda()
        self._batches = [_batch(run, times, cache_tokens) for _ in range(run.replicas)]
        self._all: Batch | Lockstep = self._batches[0]
        if isinstance(times, AnalyticStepTimes) and run.shares:
            self._all = Lockstep(times, self._batches)
        # a full cache forgets what is not used
        self._remembers = cache_tokens >= sum(one.prompt + one.response for one in run.requests)
        self._requests = run.requests
        self._since = 0.0
        self._entry: Entry | None = None
        self._places: dict[str, int] = {}
        self._made: dict[Made, Request] = {}
        self._first: dict[str, float] = {}
        self._served: list[Request] = []

    @property
    def preemptions(self) -> int:
        """Sequences that were preempted."""
        return sum(batch.preemptions for batch in self._batches)

    def serve(self) -> list[Request]:
        """Serve all. Return them with the seconds that they took here."""
        for request in self._requests:
            self._agenda.at(request.came, partial(self._add, request))
        self._agenda.run()
        return self._served

    def _add(self, request: Request) -> None:
        # vLLM's balance: one that waits counts as four that run
        loads = [batch.running + 4 * batch.waiting for batch in self._batches]
        place = self._places[request.name] = loads.index(min(loads))
        is_cached = self._remembers and request.like in self._first and self._places[request.like] == place
        sequence = Made(request.prompt, request.response, cached=request.shared if is_cached else 0)
        self._made[sequence] = request
        self._batches[place].add(sequence)
        if self._entry is None:
            self._begin()
        else:
            self._entry.cancel()
            end = self._since + self._all.cut(self._agenda.now - self._since)
            self._entry = self._agenda.at(end, self._end)

    def _begin(self) -> None:
        seconds = self._all.begin()
        self._since = self._agenda.now
        self._entry = None if seconds is None else self._agenda.after(seconds, self._end)

    def _end(self) -> None:
        started, ended = self._all.end()
        for sequence in started:
            self._first.setdefault(self._made[sequence].name, self._agenda.now)
        for sequence in ended:
            request = self._made[sequence]
            self._served.append(replace(request, first=self._first[request.name], last=self._agenda.now))
        self._begin()


def _batch(run: Run, times: Source, cache_tokens: int) -> Batch:
    return Batch(
        times=times,
        slots=run.slots,
        cache_tokens=cache_tokens,
        prefill_tokens=run.step_tokens,
        counts_decoding=True,
        ahead=True,
    )


def figures(requests: Sequence[Request]) -> dict[str, float]:
    """Return the figures of served requests, in seconds."""
    latencies = [one.last - one.came for one in requests]
    first = [one.first - one.came for one in requests]
    each = [(one.last - one.first) / (one.response - 1) for one in requests if one.response > 1]
    return {
        "makespan_s": max(one.last for one in requests),
        "latency_s": fmean(latencies),
        "ttft_s": fmean(first),
        "ttft_median_s": median(first),
        "tpot_s": fmean(each),
        "tpot_median_s": median(each),
    }


def decode_ratio(run: Run, times: Source) -> float:
    """Return predicted over measured seconds of steps that only decode: the median over seconds of the run."""
    ratios = []
    for middle, running, tokens in run.decoding:
        context = sum(request.context_at(middle) for request in run.requests)
        predicted = times.step_s(1, running / run.replicas, context / run.replicas, 1)
        ratios.append(predicted * tokens / running)
    return median(ratios)


def sources(run: Run) -> Iterator[Source]:
    """Yield the step times that a run can be predicted with, the best last."""
    host = HOSTS["vllm-async"]
    yield AnalyticStepTimes(run.shape, run.pool, host=host, sharers=run.replicas)
    if not run.shares and run.kind in SYSTEMS and importlib.util.find_spec("aiconfigurator_core") is not None:
        yield KernelStepTimes(run.shape, run.kind, host=host)


def compared(run: Run, times: Source) -> dict[str, Any]:
    """Return the figures of a run, simulated and measured, and the errors of ours and of the authors' simulator."""
    server = Server(run, times, run.recorded_cache or run.planned_cache)
    measured, simulated = figures(run.requests), figures(server.serve())
    return {
        "basis": times.basis.kind,
        **{name: [round(simulated[name], 4), round(value, 4)] for name, value in measured.items()},
        "error_pct": {name: round(100 * (simulated[name] / value - 1), 1) for name, value in measured.items()},
        "stated_error_pct": {name: run.stated[theirs] for name, theirs in STATED.items() if theirs},
        "decode_step_ratio": round(decode_ratio(run, times), 3),
        "preemptions": server.preemptions,
        "cache_tokens": [run.planned_cache, run.recorded_cache],
    }


def serving_figures(data: Path) -> dict[str, Any]:
    """The figures; `data`: the folder of the data."""
    runs = [Run.read(file.parents[1]) for file in sorted((data / FOLDER).glob("*/*/vllm/meta.json"))]
    found = {run.name: [compared(run, times) for times in sources(run)] for run in runs}
    return {
        "vllm_replay_error_pct": _worst(each[-1] for each in found.values()),
        "vllm_replay_analytic_error_pct": _worst(each[0] for each in found.values()),
        "runs": {name: each[-1] for name, each in found.items()},
    }


def _worst(each: Iterable[dict[str, Any]]) -> dict[str, float]:
    errors = [one["error_pct"] for one in each]
    return {name: max(abs(one[name]) for one in errors) for name in ("makespan_s", "latency_s")}


def main(
    data: Annotated[Path | None, typer.Argument(help="The folder of the data.", envvar="TAILRACE_DATA")] = None,
) -> None:
    """Print the figures."""
    if data is None or not (data / FOLDER).is_dir():
        print(json.dumps({"bench": "simulator_serving", "skipped": f"TAILRACE_DATA has no {FOLDER}"}))
        return
    print(json.dumps({"bench": "simulator_serving", **serving_figures(data)}))


if __name__ == "__main__":
    typer.run(main)

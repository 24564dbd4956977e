"""An engine's steps, added up over operators: the analytic half of AsyncFlow's cost model (section 4.3)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tailrace.config.hardware import DType
from tailrace.planning.hardware.base import Pool
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.base import Load
from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.collectives import Group
from tailrace.planning.step_times.operators import Operator, Pass, Sharers, decode, joined, operators, prefill
from tailrace.planning.step_times.rates import DEFAULT, ERROR, NO_HOST, Host, Rates, rows_of_decoding, seconds

ELEMENT_BYTES: dict[DType, float] = {"bfloat16": 2.0, "float8": 1.0, "float32": 4.0}


class AnalyticStepTimes:
    """The steps of engines of one pool. A step has as many operators as the model has, whatever the engine."""

    basis = Basis(kind="analytic", error=ERROR)

    def __init__(
        self,
        shape: ModelShape,
        pool: Pool,
        *,
        rates: Rates = DEFAULT,
        dtype: DType = "bfloat16",
        cache_dtype: DType | None = None,
        host: Host = NO_HOST,
        sharers: int = 1,
    ) -> None:
        """`dtype`: of the weights. `cache_dtype`: of keys and values; by default that of vectors, see `operators`.

        `sharers`: replicas that share the experts out; but for `lockstep_s`, they have as many tokens each.
        """
        self._shape = shape
        self._pool = pool
        self._rates = rates
        self._dtype: DType = dtype
        self._cache_bytes = None if cache_dtype is None else ELEMENT_BYTES[cache_dtype]
        self._host = host
        self._sharers = sharers
        self._rest: dict[tuple[int, float, float, float], float] = {}
        self._attention: dict[int, Operator] = {}

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """Seconds of a decode step; see `StepTimes`. Replicas do not disturb each other."""
        return self.pass_s(tp, decode(batch_size, context_tokens))

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """Seconds of a prefill; see `StepTimes`."""
        return self.pass_s(tp, prefill(batch_size, rms_length))

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        """Seconds of a step that decodes, and computes a part of prompts in the same pass."""
        return self.pass_s(tp, self._mixed(Load(batch_size, context_tokens, chunk)))

    def lockstep_s(self, tp: int, loads: Sequence[Load]) -> float:
        """Seconds of a step of replicas that share the experts out; see `LockstepTimes`."""
        works = [self._mixed(load) for load in loads]
        tokens = sum(work.tokens for work in works)
        return max(self._pass_s(tp, work, tokens) for work in works)

    def pass_s(self, tp: int, work: Pass) -> float:
        """Seconds of any pass."""
        return self._pass_s(tp, work, self._sharers * work.tokens)

    def _mixed(self, load: Load) -> Pass:
        """The pass of a step, in which what decodes may take more rows of attention beside prompts."""
        decoded = decode(load.batch_size, load.context_tokens)
        if not load.chunk.tokens:
            return decoded
        rows = rows_of_decoding(self._pool.kind)
        return joined(replace(decoded, pairs=rows * decoded.pairs), load.chunk)

    def _pass_s(self, tp: int, work: Pass, all_tokens: float) -> float:
        """Seconds of a pass, beside which sharers have `all_tokens`, these included."""
        if all_tokens <= 0:
            return 0.0
        device_s = self._rest_s(tp, work, all_tokens) + self._attention_s(tp, work)
        return self._host.step(device_s, work.logits)

    def _rest_s(self, tp: int, work: Pass, all_tokens: float) -> float:
        """Seconds of all but the work of attention: it is the same for all passes over so many tokens."""
        key = tp, work.tokens, work.logits, all_tokens
        if key not in self._rest:
            rest = Pass(tokens=work.tokens, pairs=0, cached_tokens=0, logits=work.logits)
            each = self._operators(tp, rest, Sharers(replicas=self._sharers, tokens=all_tokens))
            self._rest[key] = sum(self._seconds(tp, operator) for operator in each)
        return self._rest[key]

    def _attention_s(self, tp: int, work: Pass) -> float:
        """Seconds of the work of attention, which grows with pairs and cached tokens."""
        if tp not in self._attention:
            each = self._operators(tp, Pass(tokens=1, pairs=1, cached_tokens=1, logits=1))
            self._attention[tp] = next(operator for operator in each if operator.kind == "attention")
        one = self._attention[tp]
        flops, read = work.pairs * one.flops, work.cached_tokens * one.read_bytes
        return self._seconds(tp, replace(one, flops=flops, read_bytes=read, launches=0.0))

    def _operators(self, tp: int, work: Pass, sharers: Sharers | None = None) -> Iterator[Operator]:
        size = ELEMENT_BYTES[self._dtype]
        cache = self._cache_bytes
        return operators(self._shape, work, tp=tp, element_bytes=size, cache_bytes=cache, sharers=sharers)

    def _seconds(self, tp: int, operator: Operator) -> float:
        ranks = tp * self._sharers if operator.kind == "dispatch" else tp
        return seconds(operator, self._pool.device, Group.of(self._pool, ranks), self._rates, self._dtype)

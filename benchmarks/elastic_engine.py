"""The native engine, which writes into the run's log what `make bench-elastic` counts.

`make_engine` makes it for `engine: {type: adapter, path: elastic_engine.make_engine}`. Its events:

    decode      the steps of about a quarter of a second: `steps`; `longest_s`, the longest time from the end of one to
                the end of the next; `generated`, the tokens that the engine has made since its start
    continued   a response that another engine has begun: `tokens` that it has made
    response    a response that has ended here: a digest of its tokens
"""

import hashlib
from collections.abc import Sequence

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.backends.native import NativeEngine
from tailrace.engine.base import EngineArgs, SampleStream
from tailrace.events import Event
from tailrace.types import FinishReason, Request, Sample

DECODE, CONTINUED, RESPONSE = "decode", "continued", "response"
_TELL_S = 0.25


class RecordedEngine(NativeEngine):
    """See the module."""

    def __init__(self, config: NativeEngineConfig, args: EngineArgs) -> None:
        super().__init__(config, args)
        self._began: float | None = None
        """When the steps that are not told yet began; None while nothing runs."""
        self._last = 0.0
        self._steps = 0
        self._longest_s = 0.0

    def submit(self, requests: Sequence[Request]) -> SampleStream:
        """See `Engine`."""
        for request in requests:
            if request.begun is not None:
                self._tell(CONTINUED, tokens=len(request.begun.response_ids))
        numbers = {request.request_id: request.number for request in requests}
        return _Recorded(self, super().submit(requests), numbers)

    def ended(self, sample: Sample, number: int) -> None:
        """Tell of a response, or of the steps so far where it goes on elsewhere."""
        if sample.finish_reason is FinishReason.ABORT:
            self._tell_steps()
            return
        digest = hashlib.sha256(sample.response_ids.tobytes()).hexdigest()
        info = {"group": sample.group_id, "sample": number, "digest": digest}
        self._tell(RESPONSE, tokens=len(sample.response_ids), info=info)

    def _advanced(self) -> None:
        super()._advanced()
        assert self._log is not None
        now, running = self._log.now(), self.stats().running
        if self._began is None:
            self._began = self._last = now
        else:
            self._steps += 1
            self._longest_s = max(self._longest_s, now - self._last)
            self._last = now
        if now - self._began >= _TELL_S or not running:
            self._tell_steps()
            self._began = now if running else None

    def _tell_steps(self) -> None:
        metrics = {
            "steps": float(self._steps),
            "longest_s": self._longest_s,
            "generated": float(self.stats().generated_tokens),
        }
        self._tell(DECODE, start=self._began, metrics=metrics)
        self._began, self._steps, self._longest_s = None, 0, 0.0

    def _tell(self, task: str, start: float | None = None, **fields: object) -> None:
        assert self._log is not None
        now = self._log.now()
        event = Event(task=task, actor="engine", start=now if start is None else start, end=now, **fields)  # type: ignore[arg-type]
        self._log.emit(event)


class _Recorded(SampleStream):
    """A stream whose samples are told of."""

    def __init__(self, engine: RecordedEngine, samples: SampleStream, numbers: dict[int, int]) -> None:
        self._engine = engine
        self._samples = samples
        self._numbers = numbers

    async def __anext__(self) -> Sample:
        sample = await anext(self._samples)
        self._engine.ended(sample, self._numbers[sample.request_id])
        return sample

    async def aclose(self) -> None:
        await self._samples.aclose()


def make_engine(args: EngineArgs, **native: object) -> RecordedEngine:
    """Make the engine. `native`: options as for the native engine."""
    return RecordedEngine(NativeEngineConfig.model_validate(native), args)

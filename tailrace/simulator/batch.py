"""A replica's continuous batch, in stretches of equal steps.

    waiting ──start──▶ computing its tokens, a chunk a step ──▶ decoding ──▶ ended
       ▲                                │                          │
       └────────── preempted, when the cache is full ──────────────┘

The rules are those of `engine.scheduling.scheduler`, and of vLLM: a step holds a token of each sequence that decodes,
and further tokens of others within a budget. A sequence starts, in order, when it has a place, the cache has room for
all its tokens, and the budget of the step has some left. The samples of a group share the cache of their prompt. It
stays when none of them runs, until its room is used or new weights come. When the cache is full, the last sequence in
the order is sent back, and its tokens are computed again.

A stretch is the steps until something changes: a sequence ends, the tokens of one have all been computed, or the cache
is full. It is counted at once, so the work grows with the sequences and not with their tokens. Times are the caller's:
`begin` says how long a stretch takes, `end` takes it in, and `cut` shortens it to the step under way. `prepare`, `load`
and `start` are the parts of `begin`, for replicas that step together (`lockstep`).
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from tailrace.planning.replicas import handed_on
from tailrace.planning.step_times.base import Load, MixedStepTimes
from tailrace.planning.step_times.operators import NOTHING, Pass


@dataclass(eq=False, slots=True)
class Sequence:
    """A response that a batch makes."""

    prompt: int
    """Tokens of the prompt."""
    length: int
    """Tokens that the response will have: 1 or more."""
    group: int = -1
    """Sequences of one group share their prompt; those of -1 share it with none."""
    priority: float = 0.0
    """The larger starts first."""
    made: int = 0
    """Tokens of the response so far; up to date between stretches, see `Batch.made`."""
    cached: int = 0
    """Tokens whose keys and values the cache still has, from the turns before, or that have come with it."""
    to_compute: int = 0
    """Tokens whose keys and values are missing, while it runs and does not decode."""
    arrival: int = -1
    joined: int = 0
    """The step with which it began to decode, less the tokens that it had then."""
    shared: "Prompt | None" = None
    """The prompt of its group, while it runs."""
    is_running: bool = False
    is_decoding: bool = False

    @property
    def order(self) -> tuple[float, int]:
        """The lower starts first, and is preempted last."""
        return -self.priority, self.arrival


class Decoded(NamedTuple):
    """Steps in which all that runs decodes."""

    steps: int
    step_s: float
    sequences: int
    context_tokens: int
    """Of these together, in the first step."""


class Ended(NamedTuple):
    """What a stretch has brought."""

    started: list[Sequence]
    """Those whose first token came with its last step."""
    ended: list[Sequence]


@dataclass(slots=True)
class _Stretch:
    steps: int
    step_s: float
    parts: list[tuple[Sequence, int]]
    """Tokens that each step computes of a sequence."""


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt that the cache has once, for all of a group."""

    tokens: int
    members: int = 0
    """Sequences that run."""
    computing: int = 0
    """Those of them that lack more than its last token. Others wait for them."""
    found: int = 0
    """Its tokens that others find in the cache."""


_order = attrgetter("order")


def _lacks_prompt(sequence: Sequence) -> bool:
    """Whether a sequence that computes lacks more of its prompt than the last token."""
    return sequence.to_compute - sequence.made > 1


@dataclass(slots=True, kw_only=True)
class Batch:
    """One replica. Between two stretches, sequences are added and removed."""

    times: MixedStepTimes
    slots: int
    """The most sequences that run together."""
    cache_tokens: float
    """Tokens that the cache holds."""
    tp: int = 1
    replicas: int = 1
    """Replicas that decode at the same time, this one included."""
    prefill_tokens: int = 2048
    """The most tokens of prompts in a step."""
    counts_decoding: bool = False
    """Whether tokens that decode take from that budget, as with vLLM."""
    ahead: bool = False
    """Whether a step is decided as the one before begins, as with vLLM's asynchronous scheduling: what comes during a
    step waits for the end of the next one."""
    block: int = 16
    """Tokens of a block of the cache; half a block of each sequence stays empty."""
    most_steps: int | None = None
    """The most steps of a stretch."""
    pace: float = 1.0
    """How many times longer than `times` steps take, from the next stretch on."""
    preemptions: int = 0
    generated: int = 0
    computed: int = 0
    """Tokens of prompts, and of preempted responses, that were computed."""
    _waiting: list[tuple[float, int, Sequence]] = field(default_factory=list)
    _late: list[Sequence] = field(default_factory=list)
    """What came after the next step was decided."""
    _computing: list[Sequence] = field(default_factory=list)
    """In order."""
    _parts: list[tuple[Sequence, int]] = field(default_factory=list)
    """What the next step computes of them, and each step of the stretch that it begins."""
    _ends: list[tuple[int, int, Sequence]] = field(default_factory=list)
    """A heap: the step with which a sequence ends, its arrival, and it. Those that left are skipped."""
    _ends_at: dict[Sequence, int] = field(default_factory=dict)
    """Of what decodes here: the step with which each ends. Others of the heap have left, maybe for another replica."""
    _decoding: int = 0
    _tokens: int = 0
    """Cached tokens of all that decodes; a shared prompt counts for each."""
    _own: int = 0
    """Cached tokens of all that runs, without prompts."""
    _prompts: int = 0
    """Cached tokens of prompts; a shared one counts once."""
    _groups: dict[int, Prompt] = field(default_factory=dict)
    """The prompts of groups of which some run."""
    _idle: dict[int, tuple[Prompt, float]] = field(default_factory=dict)
    """Prompts of groups of which none runs, the least recently used first, each with the value of `_taken` up to which
    the cache still has it."""
    _taken: float = 0.0
    """Tokens that have got room in the cache so far. They take the room that has been free for longest."""
    _step: int = 0
    _arrivals: int = 0
    _stretch: _Stretch | None = None

    @property
    def running(self) -> int:
        """Sequences that run."""
        return self._decoding + len(self._computing)

    @property
    def waiting(self) -> int:
        """Sequences that have not started, or were preempted."""
        return len(self._waiting) + len(self._late)

    @property
    def held_tokens(self) -> float:
        """Tokens that running sequences hold in the cache."""
        return self._own + self._prompts + self.running * self.block / 2

    @property
    def is_busy(self) -> bool:
        """Whether a stretch is under way."""
        return self._stretch is not None

    def made(self, sequence: Sequence, elapsed_s: float = 0.0) -> int:
        """Tokens of a response, `elapsed_s` after the stretch under way began."""
        if not sequence.is_decoding:
            return sequence.made
        steps = 0
        if self._stretch is not None:
            steps = min(self._stretch.steps, int(elapsed_s / self._stretch.step_s))
        return self._step + steps - sequence.joined

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait, behind those of the same priority. One that has begun goes on."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        if self.ahead and self.is_busy:
            self._late.append(sequence)
        else:
            self._wait(sequence)

    def resume(self, sequence: Sequence) -> bool:
        """Go on with a sequence whose keys and values have come along, unless there is no room. Return whether."""
        assert self._stretch is None
        if self.running == self.slots or not self._has_room_for(sequence):
            return False
        sequence.arrival = self._arrivals
        self._arrivals += 1
        sequence.cached = sequence.prompt + sequence.made
        self._start(sequence)
        self._computing.remove(sequence)
        sequence.to_compute = 0
        self._decode(sequence)
        return True

    def clear(self) -> list[Sequence]:
        """Take all sequences out, and return them."""
        assert self._stretch is None
        running = self._running()
        for sequence in running:
            self._release(sequence)
        waiting = [*(entry[2] for entry in self._waiting), *self._late]
        self._waiting, self._late = [], []
        return [*running, *waiting]

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        assert self._stretch is None
        if sequence.is_running:
            self._release(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            self._waiting.sort()
            self._late = [late for late in self._late if late is not sequence]

    def forget(self, *, recompute: bool = False) -> None:
        """Let sequences that start from now on use nothing that older weights computed, but for what came with them.

        recompute: whether what runs, and what came, is computed again, too.
        """
        assert self._stretch is None
        for sequence in self._running() if recompute else ():
            self._release(sequence)
            self._wait(sequence)
        self._groups.clear()
        self._idle.clear()
        for _, _, sequence in self._waiting:
            if recompute or not sequence.made:
                sequence.cached = 0

    def take_waiting(self, count: int) -> list[Sequence]:
        """Hand over up to `count` waiting sequences, even while a stretch is under way; see `handed_on`."""
        taken = handed_on(
            (entry[2] for entry in sorted(self._waiting, reverse=True)),
            count,
            here={sequence.group for sequence in self._running()},
            group_of=lambda sequence: -2 - sequence.arrival if sequence.group == -1 else sequence.group,
            has_begun=lambda sequence: sequence.made > 0,
        )
        gone = set(taken)
        self._waiting = sorted(entry for entry in self._waiting if entry[2] not in gone)
        return sorted(taken, key=_order)

    def begin(self) -> float | None:
        """Begin a stretch. Return its seconds; None where there is nothing to do."""
        steps = self.prepare()
        if steps is None:
            return None
        load = self.load(steps)
        if self._computing:
            step_s = self.times.mixed_s(self.tp, load.batch_size, load.context_tokens, load.chunk)
        else:
            step_s = self.times.step_s(self.tp, load.batch_size, load.context_tokens, self.replicas)
        return self.start(steps, step_s)

    def prepare(self) -> int | None:
        """Decide what runs in the next step. Return the steps until that changes; None where there is nothing to do."""
        assert self._stretch is None
        if self._late and not self.running:
            self._take_late()
        self._make_room()
        before = self._computing.copy()
        started = self._start_waiting()
        self._parts = self._shared_out([*before, *started]) if self._computing else []
        if not self._decoding and not self._computing:
            return None
        steps = self._steps_until_change()
        if self._parts:
            (first, part), *others = self._parts
            steps = 1 if others else max(1, min(steps, first.to_compute // part))
        if self._late:
            self._take_late()
            return 1
        return steps if self.most_steps is None else min(steps, self.most_steps)

    def load(self, steps: int) -> Load:
        """What one of the next so many steps computes, on average."""
        middle = self._tokens + self._decoding * (steps - 1) / 2
        return Load(self._decoding, middle, self._chunk(steps) if self._parts else NOTHING)

    def start(self, steps: int, step_s: float) -> float:
        """Start a stretch of such steps, of `step_s` seconds each at pace 1. Return its seconds."""
        self._stretch = stretch = _Stretch(steps, step_s * self.pace, self._parts)
        return steps * stretch.step_s

    def cut(self, elapsed_s: float) -> float:
        """Let the stretch under way stop after the present step, `elapsed_s` after it began. Return its seconds."""
        assert self._stretch is not None
        stretch = self._stretch
        stretch.steps = max(1, min(stretch.steps, int(elapsed_s / stretch.step_s) + 1))
        return stretch.steps * stretch.step_s

    @property
    def decoded(self) -> Decoded | None:
        """The steps of the stretch under way; None where they compute more than tokens that decode."""
        stretch = self._stretch
        if stretch is None or self._computing:
            return None
        return Decoded(stretch.steps, stretch.step_s, self._decoding, self._tokens)

    def end(self) -> Ended:
        """End the stretch under way."""
        stretch, self._stretch = self._stretch, None
        assert stretch is not None
        grown = stretch.steps * self._decoding
        self._step += stretch.steps
        self._tokens += grown
        self._own += grown
        self._taken += grown
        self.generated += grown
        ended = self._take_ended()
        started = self._take_computed(stretch, ended)
        return Ended(started, ended)

    def _take_late(self) -> None:
        for sequence in self._late:
            self._wait(sequence)
        self._late = []

    def _wait(self, sequence: Sequence) -> None:
        heappush(self._waiting, (-sequence.priority, sequence.arrival, sequence))

    def _start_waiting(self) -> list[Sequence]:
        """Start what waits and has room. Return it."""
        started: list[Sequence] = []
        if not self._waiting or self.running >= self.slots:
            return started
        budget = self._budget - sum(map(self._cost, self._computing))
        passed: list[tuple[float, int, Sequence]] = []
        while self._waiting and budget > 0 and self.running + len(passed) < self.slots:
            entry = heappop(self._waiting)
            sequence = entry[2]
            prompt = self._groups.get(sequence.group)
            if prompt is not None and prompt.computing and not sequence.cached:
                passed.append(entry)
            elif self._has_room_for(sequence):
                self._start(sequence)
                started.append(sequence)
                budget -= self._cost(sequence)
            else:
                passed.append(entry)
                break
        for entry in passed:
            heappush(self._waiting, entry)
        return started

    def _shared_out(self, computing: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """Share the budget of a step out in this order."""
        budget, parts = self._budget, []
        for sequence in computing:
            if self._takes_no_budget(sequence):
                parts.append((sequence, 1))
            elif part := min(sequence.to_compute, budget):
                parts.append((sequence, part))
                budget -= part
        return parts

    @property
    def _budget(self) -> int:
        return max(1, self.prefill_tokens - self._decoding) if self.counts_decoding else self.prefill_tokens

    def _takes_no_budget(self, sequence: Sequence) -> bool:
        """Whether it computes a single token: that counts as decoding in the engine."""
        return sequence.to_compute == 1 and not self.counts_decoding

    def _cost(self, sequence: Sequence) -> int:
        """Tokens that it takes from the budget of steps."""
        return 0 if self._takes_no_budget(sequence) else sequence.to_compute

    def _has_room_for(self, sequence: Sequence) -> bool:
        if not self.running:
            return True  # what cannot be served at all is refused before
        needed = sequence.made + (0 if sequence.group in self._groups else sequence.prompt) + self.block / 2
        others = self._decoding + self.block * self.running
        return self.held_tokens + needed + others <= self.cache_tokens

    def _start(self, sequence: Sequence) -> None:
        """Start a sequence, which then has tokens to compute."""
        sequence.is_running = True
        sequence.shared = prompt = self._prompt_of(sequence)
        cached = sequence.cached
        if prompt is not None:
            self._groups[sequence.group] = prompt
            prompt.members += 1
            cached = max(cached, prompt.found)
        sequence.to_compute = max(1, sequence.prompt + sequence.made - cached)
        sequence.cached = 0  # a preempted sequence has lost them
        self._own += sequence.made
        self._taken += sequence.made + self.block / 2
        insort(self._computing, sequence, key=_order)
        if _lacks_prompt(sequence) and prompt is not None:
            prompt.computing += 1
        self._note_found(sequence)

    def _prompt_of(self, sequence: Sequence) -> Prompt | None:
        """The prompt that a sequence shares, in the cache or new; None where it shares none."""
        prompt = self._groups.get(sequence.group)
        if prompt is not None:
            return prompt
        self._prompts += sequence.prompt
        prompt, until = self._idle.pop(sequence.group, (None, 0.0))
        if prompt is not None and self._taken <= until:
            return prompt
        self._taken += sequence.prompt
        return None if sequence.group == -1 else Prompt(sequence.prompt)

    def _make_room(self) -> None:
        """Preempt the last sequences until each of the others has room for a token."""
        while self.running > 1 and self._free < self._decoding:
            last = max(self._running(), key=_order)
            self._release(last)
            self._wait(last)
            self.preemptions += 1

    @property
    def _free(self) -> float:
        return self.cache_tokens - self.held_tokens

    def _running(self) -> list[Sequence]:
        return [*self._computing, *self._ends_at]

    def _is_live(self, entry: tuple[int, int, Sequence]) -> bool:
        """Whether an entry of the heap is of a sequence that decodes since then."""
        end, _, sequence = entry
        return self._ends_at.get(sequence) == end

    def _release(self, sequence: Sequence) -> None:
        """Take a running sequence out."""
        prompt = sequence.shared
        if sequence.is_decoding:
            sequence.made = self._step - sequence.joined
            self._decoding -= 1
            self._tokens -= sequence.prompt + sequence.made
            sequence.is_decoding = False
            del self._ends_at[sequence]
        else:
            if prompt is not None and _lacks_prompt(sequence):
                prompt.computing -= 1
            self._computing.remove(sequence)
            sequence.to_compute = 0
        sequence.is_running = False
        sequence.shared = None
        self._own -= sequence.made
        if prompt is None:
            self._prompts -= sequence.prompt
            return
        prompt.members -= 1
        if not prompt.members:
            self._prompts -= prompt.tokens
            if self._groups.get(sequence.group) is prompt:  # otherwise older weights computed it
                del self._groups[sequence.group]
                self._keep(sequence.group, prompt)

    def _keep(self, group: int, prompt: Prompt) -> None:
        """Let a prompt be found until its room is used: that is behind all that was free before."""
        if prompt.found:
            self._idle[group] = prompt, self._taken + self._free - prompt.tokens
        while self._idle and next(iter(self._idle.values()))[1] < self._taken:
            del self._idle[next(iter(self._idle))]

    def _note_found(self, sequence: Sequence) -> None:
        """Let the others of its group find the prompt: all of it, or whole blocks where its last token is missing."""
        prompt, missing = sequence.shared, sequence.to_compute - sequence.made
        if prompt is not None and missing <= 1:
            whole = prompt.tokens if missing <= 0 else (prompt.tokens - 1) // self.block * self.block
            prompt.found = max(prompt.found, whole)

    def _steps_until_change(self) -> int:
        """Steps of what decodes until one ends, or the cache is full."""
        if not self._decoding:
            return 2**40
        while not self._is_live(self._ends[0]):
            heappop(self._ends)
        steps = self._ends[0][0] - self._step
        return max(1, min(steps, int(self._free / self._decoding)))

    def _chunk(self, steps: int) -> Pass:
        """The parts of prompts in each of the next steps."""
        if steps > 1:
            ((first, part),) = self._parts
            return self._pass_of(first, part, steps)
        tokens, pairs, cached, logits = 0, 0.0, 0.0, 0
        for sequence, part in self._parts:
            before = sequence.prompt + sequence.made - sequence.to_compute
            tokens += part
            pairs += part * (before + part / 2)
            cached += before + part
            logits += part == sequence.to_compute
        return Pass(tokens=tokens, pairs=pairs, cached_tokens=cached, logits=logits)

    def _pass_of(self, sequence: Sequence, tokens: int, steps: int) -> Pass:
        """The mean of so many steps over the tokens of a long prompt."""
        before = sequence.prompt + sequence.made - sequence.to_compute + tokens * (steps - 1) / 2
        return Pass(tokens=tokens, pairs=tokens * (before + tokens / 2), cached_tokens=before + tokens, logits=0)

    def _take_ended(self) -> list[Sequence]:
        ended = []
        while self._ends and (self._ends[0][0] <= self._step or not self._is_live(self._ends[0])):
            entry = heappop(self._ends)
            if self._is_live(entry):
                self._release(entry[2])
                ended.append(entry[2])
        return ended

    def _take_computed(self, stretch: _Stretch, ended: list[Sequence]) -> list[Sequence]:
        """Note what was computed; those of which nothing is missing make their next token."""
        started = []
        for sequence, part in stretch.parts:
            self.computed += part * stretch.steps
            lacked = _lacks_prompt(sequence)
            sequence.to_compute -= part * stretch.steps
            if sequence.shared is not None:
                sequence.shared.computing -= lacked - _lacks_prompt(sequence)
            self._note_found(sequence)
            if sequence.to_compute:
                continue
            self._computing.remove(sequence)
            self._begin_to_decode(sequence)
            started.append(sequence)
            if sequence.made == sequence.length:
                self._release(sequence)
                ended.append(sequence)
        return started

    def _begin_to_decode(self, sequence: Sequence) -> None:
        sequence.made += 1
        self.generated += 1
        self._own += 1
        self._taken += 1
        self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on."""
        if sequence.shared is not None:
            sequence.shared.found = sequence.shared.tokens
        self._decoding += 1
        self._tokens += sequence.prompt + sequence.made
        sequence.is_decoding = True
        sequence.joined = self._step - sequence.made
        self._ends_at[sequence] = end = sequence.joined + sequence.length
        heappush(self._ends, (end, sequence.arrival, sequence))

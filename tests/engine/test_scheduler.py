"""The scheduler under random arrivals, aborts and weight updates, with a stand-in for the model."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tailrace.config.engine import SamplingConfig
from tailrace.engine.kv_cache import BlockManager
from tailrace.engine.runner import mark_computed
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.sequence import PromptCache
from tailrace.engine.stopping import StopRule
from tailrace.types import Request, Sample
from tests.engine.helpers import make_request

BLOCK_SIZE, BLOCKS, BATCH, PREFILL = 4, 14, 4, 7


class SchedulerMachine(RuleBasedStateMachine):
    """Every request gets its tokens, whoever joins, leaves or is preempted, and no block is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(BLOCKS)
        self.scheduler = Scheduler(self.blocks, block_size=BLOCK_SIZE, max_batch_size=BATCH, prefill_tokens=PREFILL)
        self.arrivals = 0
        self.open: dict[int, Request] = {}

    @rule(group=st.integers(0, 3), prompt=st.integers(1, 20), tokens=st.integers(1, 30))
    def add(self, group: int, prompt: int, tokens: int) -> None:
        self.submit(group, prompt, tokens)

    def submit(self, group: int, prompt: int, tokens: int) -> None:
        request = make_request(self.arrivals, group_id=group, prompt=prompt, max_new_tokens=tokens)
        self.arrivals += 1
        self.open[request.request_id] = request
        self.scheduler.add(request, StopRule(request.sampling, eos_ids=(), room=1000, detokenize=None))

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        for sample in self.scheduler.abort({number}):
            assert sample.request_id == number
            del self.open[number]

    @rule()
    def update_weights(self) -> None:
        self.scheduler.forget_prompts()

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        plan = self.scheduler.schedule()
        assert sum(len(prefill.tokens) for prefill in plan.prefills) <= PREFILL
        assert len(self.scheduler.running) <= BATCH
        mark_computed(plan)
        for prefill in plan.prefills:
            prompt = prefill.target
            if isinstance(prompt, PromptCache) and prompt.computed == prompt.length:
                prompt.logits_V = torch.zeros(1)
        admission = self.scheduler.admit()
        assert len(admission.logits) == len(admission.fresh)
        assert {target for _, target in admission.copies} <= {s.blocks[0] for s in self.scheduler.running}
        finished = []
        for sequence in plan.decodes + admission.fresh:
            reason = sequence.append(len(sequence.tokens), 0.0, 0)
            if reason is not None:
                finished.append((sequence, reason))
        for sample in self.scheduler.finish(finished):
            self.check(sample)

    def check(self, sample: Sample) -> None:
        request = self.open.pop(sample.request_id)
        assert sample.response_ids.tolist() == list(range(request.sampling.max_new_tokens))

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        prompts = {id(s.prompt): s.prompt for s in (*self.scheduler.waiting, *self.scheduler.running)}.values()
        held = [block for prompt in prompts for block in prompt.blocks]
        for sequence in self.scheduler.running:
            held += sequence.prompt_blocks + sequence.blocks
            assert sequence.cached <= sequence.length
        assert [self.blocks.references(block) for block in range(BLOCKS)] == [held.count(b) for b in range(BLOCKS)]

    def teardown(self) -> None:
        for _ in range(3000):
            if not (self.scheduler.waiting or self.scheduler.running):
                break
            self.one_step()
        assert not self.open, "every request must finish"
        assert self.blocks.used == 0


def test_a_prompt_that_is_being_computed_keeps_its_blocks_when_one_behind_it_wants_some() -> None:
    machine = SchedulerMachine()
    for prompt, tokens in ((6, 20), (19, 15), (6, 9)):  # the third shares the first one's prompt, which is running
        machine.submit(0, prompt, tokens)
    machine.teardown()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_the_first_to_come_are_the_first_to_start() -> None:
    scheduler = Scheduler(BlockManager(100), block_size=4, max_batch_size=2, prefill_tokens=64)
    for number in range(4):
        scheduler.add(
            make_request(number),
            StopRule(SamplingConfig(max_new_tokens=3), eos_ids=(), room=100, detokenize=None),
        )
    plan = scheduler.schedule()
    assert [prefill.target for prefill in plan.prefills] == [scheduler.waiting[0].prompt, scheduler.waiting[1].prompt]
    for prefill in plan.prefills:
        assert isinstance(prefill.target, PromptCache)
        prefill.target.logits_V = torch.zeros(1)
    assert [sequence.request.request_id for sequence in scheduler.admit().fresh] == [0, 1]

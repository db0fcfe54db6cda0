"""The pace of prompts, by steps of an invented machine: seconds of decoding plus seconds for each token of a chunk."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.prompt_pace import GPU_MIN_CHUNK_TOKENS, Pace, PromptPace
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.engine.scheduling.sequence import ScheduledBatch

CAP = 512


class Machine:
    """A scheduler with a pace, whose steps take the time that `decode_s`, `sequence_s`, `chunks_s` and `token_s` say.

    sequence_s is the time of each sequence that decodes, and chunks_s that of chunks whatever their size. `factor`
    multiplies the time of a step.
    """

    def __init__(
        self,
        *,
        decode_s: float,
        token_s: float,
        sequence_s: float = 0.0,
        chunks_s: float = 0.0,
        factor: Callable[[], float] = lambda: 1.0,
        max_num_seqs: int = 8,
        pace: Pace | None = None,
    ) -> None:
        self.decode_s, self.sequence_s, self.factor = decode_s, sequence_s, factor
        self.token_s, self.chunks_s = token_s, chunks_s
        self.now = 0.0
        self.num_requests = 0
        self.scheduler = Scheduler(
            BlockPool(10_000, 16, enable_prefix_caching=False),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=CAP,
            max_model_len=20_000,
            eos_token_ids=(),
            pace=pace or PromptPace(),
            clock=lambda: self.now,
        )

    def add(self, num_prompt_tokens: int, count: int = 1, priority: int = 0) -> None:
        for _ in range(count):
            params = SamplingParams(max_tokens=1000)
            self.scheduler.add(
                Request(str(self.num_requests), (1,) * num_prompt_tokens, params, seed=0, priority=priority)
            )
            self.num_requests += 1

    @property
    def num_decoding(self) -> int:
        return sum(sequence.num_uncomputed == 1 for sequence in self.scheduler._running)

    def step(self) -> tuple[int, int]:
        """Return how many tokens of chunks the step computed, and how many sequences decoded in it."""
        batch = self.scheduler.schedule()
        num_chunk_tokens = sum(item.num_tokens for item in batch.items if item.sequence.num_uncomputed > 1)
        num_decoding = sum(item.sequence.num_uncomputed == 1 for item in batch.items)
        chunks_s = self.chunks_s + self.token_s * num_chunk_tokens if num_chunk_tokens else 0.0
        self.now += self.factor() * (self.decode_s + self.sequence_s * num_decoding + chunks_s)
        self.finish(batch)
        return num_chunk_tokens, num_decoding

    def finish(self, batch: ScheduledBatch) -> None:
        self.scheduler.update(batch, [(1,) for item in batch.items if item.needs_sampling])

    def learn(self, *, num_decoding: int) -> None:
        """Bring so many sequences to decode, and let the pace see steps with and without chunks."""
        self.add(20, num_decoding)
        for _ in range(100):
            self.step()
        self.add(20)
        for _ in range(10):
            self.step()
        self.scheduler.abort(str(self.num_requests - 1))


def test_a_prompt_takes_three_quarters_of_the_time_of_decoding_in_each_step() -> None:
    machine = Machine(decode_s=1 / 8, token_s=1 / 1024)
    machine.learn(num_decoding=6)
    machine.add(200)
    assert [machine.step() for _ in range(4)] == [(96, 6), (96, 6), (8, 6), (0, 7)]


def test_of_steps_that_vary_only_one_in_a_hundred_takes_more_than_twice_the_median() -> None:
    wobble = random.Random(0)
    machine = Machine(decode_s=1 / 8, token_s=1 / 1024, factor=lambda: wobble.uniform(0.9, 1.1))
    machine.learn(num_decoding=6)
    seconds, num_chunks = [], 0
    for i in range(600):
        if i % 20 == 0:
            machine.add(512)
        start = machine.now
        num_chunks += machine.step()[0] > 0
        seconds.append(machine.now - start)
        if i % 20 == 19:
            machine.scheduler.abort(str(machine.num_requests - 1))
    assert 120 < num_chunks < 300, "negative control: most steps only decode"
    assert sorted(seconds)[593] <= 2 * statistics.median(seconds)


def test_a_chunk_of_few_tokens_leaves_those_of_the_next_prompt_as_large() -> None:
    machine = Machine(decode_s=1 / 8, token_s=1 / 1024, chunks_s=1 / 64)
    machine.learn(num_decoding=4)
    machine.add(1500)
    size = [machine.step()[0] for _ in range(10)][-1]
    machine.scheduler.abort(str(machine.num_requests - 1))
    machine.add(2)
    assert machine.step() == (2, 4)
    machine.add(1000)
    assert max(machine.step()[0] for _ in range(2)) > 0.7 * size, "4/5 of it, as five decode now"


def test_a_prompt_without_company_takes_whole_steps() -> None:
    machine = Machine(decode_s=1 / 8, token_s=1 / 1024)
    machine.learn(num_decoding=1)
    machine.scheduler.abort("0")
    machine.add(700)
    assert [machine.step() for _ in range(3)] == [(CAP, 0), (188, 0), (0, 1)]


@pytest.mark.parametrize(("num_ended", "usual", "at_most"), [(0, 96, 1.25), (2, 128, 2.0)])
def test_one_step_that_another_process_held_up_hardly_misleads(num_ended: int, usual: int, at_most: float) -> None:
    machine = Machine(decode_s=1 / 8, token_s=1 / 1024)
    machine.learn(num_decoding=6)
    machine.step()
    for name in range(num_ended):
        machine.scheduler.abort(str(name))
    machine.factor = lambda: 20.0
    assert machine.step() == (0, 6 - num_ended)
    machine.factor = lambda: 1.0
    machine.add(2000)
    assert usual <= machine.step()[0] <= usual * at_most


def test_each_prompt_that_waits_counts_as_four_that_decode() -> None:
    machine = Machine(decode_s=1 / 8, token_s=1 / 1024)
    machine.learn(num_decoding=4)
    machine.add(150, count=3)
    assert machine.step() == (384, 4)


def test_the_first_steps_of_a_burst_are_as_long_as_those_that_know_its_times() -> None:
    machine = Machine(decode_s=1 / 64, sequence_s=1 / 512, token_s=1 / 1024, max_num_seqs=32)
    machine.learn(num_decoding=1)
    machine.add(128, count=31)
    shares = []
    while (waiting := 32 - (decoding := machine.num_decoding)) > 0:
        start = machine.now
        num_chunk_tokens, _ = machine.step()
        if 0 < num_chunk_tokens < CAP - decoding and waiting > 1:
            of_decoding = machine.decode_s + machine.sequence_s * decoding
            wanted = of_decoding * max(0.75, 4 * waiting / decoding)
            shares.append((machine.now - start - of_decoding) / wanted)
    assert len(shares) > 20
    assert statistics.median(shares) > 0.8, "an average of the times of fewer sequences would give a third"
    assert max(shares) < 1.1


@pytest.mark.parametrize(("pace", "expected"), [(PromptPace(), (CAP - 4, 4)), (Pace(), (CAP, 0))])
def test_each_sequence_that_decodes_has_its_token_beside_an_urgent_prompt(
    pace: Pace, expected: tuple[int, int]
) -> None:
    machine = Machine(decode_s=1 / 8, token_s=1e-6, pace=pace)
    machine.learn(num_decoding=4)
    machine.add(1500, priority=-1)
    assert [machine.step() for _ in range(2)] == [(CAP - 4, 4), expected]


def test_prompts_go_on_however_slow_their_tokens_are() -> None:
    machine = Machine(decode_s=0.001, token_s=1.0)
    machine.learn(num_decoding=4)
    machine.add(40)
    assert [machine.step() for _ in range(4)] == [(16, 4), (16, 4), (8, 4), (0, 5)]


@pytest.mark.parametrize(
    ("pace", "num_steps"), [(PromptPace(GPU_MIN_CHUNK_TOKENS), {2, 3}), (PromptPace(), set(range(20, 40)))]
)
def test_a_prompt_takes_few_steps_of_a_gpu_which_take_longer_whatever_their_chunks(
    pace: Pace, num_steps: set[int]
) -> None:
    """The second pace is a negative control: it makes chunks so small that only their fixed time is left."""
    machine = Machine(decode_s=0.0005, token_s=1e-6, chunks_s=0.002, max_num_seqs=64, pace=pace)
    machine.learn(num_decoding=60)
    for _ in range(10):
        machine.add(512)
        count, name = 0, str(machine.num_requests - 1)
        while machine.scheduler._live[name].num_generated == 0:
            machine.step()
            count += 1
        machine.scheduler.abort(name)
    assert count in num_steps


def test_it_follows_the_time_of_decoding_although_prompts_never_pause() -> None:
    machine = Machine(decode_s=1 / 128, token_s=1 / 1024)
    machine.learn(num_decoding=6)
    machine.decode_s = 1 / 8
    machine.add(15_000, count=6)
    sizes = [machine.step()[0] for _ in range(160)]
    assert sizes[0] == 16
    assert max(sizes[140:]) > 60
    assert sizes[20:71].count(0) == 3, "one step in seventeen only decodes, so that its time is known"

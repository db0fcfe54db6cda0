"""The number of threads of a step, on machines whose steps take what the test says; no real clock is read."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GptOssConfig

from engine.request import Request, SamplingParams
from engine.schedule import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence
from engine.step_threads import WORK_PER_THREAD, StepThreads, StepWork
from weights.config import Experts
from weights.families import load_config

STORYTELLER = Path(__file__).parents[2] / "weights" / "storyteller"
DECODE = 10 * WORK_PER_THREAD
PREFILL = 40 * DECODE

Seconds = Callable[[int, int], float]
"""What a step takes, from its work and its number of threads."""


def idle(work: int, num_threads: int) -> float:
    """Return 25 ms for a decode step on one thread and 15 ms on two, as GPT-2 124M takes them."""
    return 25e-3 * work / DECODE * (0.2 + 0.8 / num_threads)


def one_neighbour(work: int, num_threads: int) -> float:
    return idle(work, num_threads) * (3 if num_threads > 1 else 1)


def two_neighbours(work: int, num_threads: int) -> float:
    return idle(work, num_threads) * (4.5 if num_threads > 1 else 1.35)


class Machine:
    """Runs steps through a StepThreads and counts how often each number of threads was used."""

    def __init__(self, max_threads: int, seconds: Seconds) -> None:
        self.now = 1000.0
        self.seconds = seconds
        self.threads = StepThreads(max_threads, lambda: self.now)

    def run(self, works: Iterable[int]) -> list[int]:
        used = []
        for work in works:
            used.append(self.threads.begin(work))
            self.now += self.seconds(work, used[-1])
            self.threads.end()
        return used

    def rate(self, num_steps: int) -> float:
        """Return decode steps a second."""
        start = self.now
        self.run([DECODE] * num_steps)
        return num_steps / (self.now - start)


def test_an_idle_machine_uses_all_threads_for_nearly_every_step() -> None:
    used = Counter(Machine(2, idle).run([DECODE] * 2000))
    assert used[2] > 0.98 * used.total()
    assert used[1] > 0  # one thread is timed now and then, so that it is known when two are too slow


def test_work_too_small_for_two_threads_gets_one() -> None:
    machine = Machine(2, idle)
    assert set(machine.run([1, WORK_PER_THREAD, 2 * WORK_PER_THREAD - 1] * 100)) == {1}
    assert 2 in machine.run([2 * WORK_PER_THREAD])


def test_work_decides_how_many_of_many_threads_pay() -> None:
    assert Machine(6, idle).run([5 * WORK_PER_THREAD]) == [3]
    assert Machine(6, idle).run([6 * WORK_PER_THREAD]) == [6]


@pytest.mark.parametrize("seconds", [one_neighbour, two_neighbours])
def test_beside_neighbours_one_thread_is_used_within_a_few_steps(seconds: Seconds) -> None:
    machine = Machine(2, seconds)
    machine.run([DECODE] * 8)
    used = Counter(machine.run([DECODE] * 1000))
    assert used[1] > 0.97 * used.total()


def test_a_neighbour_that_comes_and_goes_is_followed() -> None:
    machine = Machine(2, idle)
    machine.run([DECODE] * 500)
    machine.seconds = one_neighbour
    assert Counter(machine.run([DECODE] * 200))[1] > 190
    machine.seconds = idle
    machine.run([DECODE] * 100)
    assert Counter(machine.run([DECODE] * 200))[2] > 195


def test_the_targets_hold_for_measured_durations() -> None:
    best = 1 / idle(DECODE, 2)
    assert Machine(2, idle).rate(1000) > 0.95 * best
    assert Machine(2, one_neighbour).rate(1000) > 0.55 * best
    assert Machine(2, two_neighbours).rate(1000) > 0.40 * best
    assert 1 / one_neighbour(DECODE, 2) < 0.40 * best  # with all threads they would not


def test_trials_cost_a_small_share_of_the_time_however_bad_they_are() -> None:
    def very_busy(work: int, num_threads: int) -> float:
        return idle(work, num_threads) * (100 if num_threads > 1 else 1)

    machine = Machine(2, very_busy)
    machine.run([DECODE] * 20_000)
    assert machine.rate(20_000) > 0.96 / idle(DECODE, 1)


def test_a_single_slow_step_changes_nothing() -> None:
    machine = Machine(2, idle)
    machine.run([DECODE] * 10)
    for _ in range(20):
        machine.seconds = lambda work, n: 50 * idle(work, n)
        machine.run([DECODE])
        machine.seconds = idle
        used = machine.run([DECODE] * 5)
        assert used.count(2) >= 4


def test_large_steps_among_small_ones_are_not_taken_for_slow_ones() -> None:
    rng = random.Random(1)
    machine = Machine(2, idle)
    machine.run([DECODE, PREFILL] * 10)
    used = Counter(machine.run(rng.choice([DECODE, PREFILL, DECODE // 2]) for _ in range(2000)))
    assert used[2] > 0.98 * used.total()


def test_a_size_that_gains_little_takes_no_threads_from_one_that_gains() -> None:
    def seconds(work: int, num_threads: int) -> float:
        return idle(work, 1) if work < DECODE and num_threads == 2 else idle(work, num_threads)

    rng = random.Random(3)
    small = 3 * WORK_PER_THREAD
    machine = Machine(2, lambda work, n: seconds(work, n) * rng.uniform(1, 1.1))
    used = list(zip(works := [small, PREFILL, small, small] * 500, machine.run(works), strict=True))
    assert used.count((PREFILL, 2)) > 0.97 * 500
    assert used.count((small, 1)) > 0.5 * 1500


def test_a_size_not_seen_before_begins_where_the_last_step_stood() -> None:
    machine = Machine(2, one_neighbour)
    machine.run([DECODE] * 100)
    assert machine.run([PREFILL]) == [1]


def test_what_slows_one_size_down_makes_all_give_way_and_a_trial_that_pays_brings_them_back() -> None:
    machine = Machine(2, idle)
    machine.run([PREFILL, DECODE, DECODE] * 100)
    machine.seconds = one_neighbour
    assert machine.run([DECODE] * 4)[-1] == 1
    assert set(machine.run([PREFILL] * 20)) == {1}
    machine.seconds = idle
    machine.run([DECODE] * 100)
    assert Counter(machine.run([PREFILL] * 20))[2] >= 19


def test_noise_of_a_fifth_changes_little() -> None:
    rng = random.Random(2)
    machine = Machine(2, lambda work, n: idle(work, n) * rng.uniform(1, 1.2))
    used = Counter(machine.run([DECODE] * 2000))
    assert used[2] > 0.98 * used.total()


def test_many_threads_are_halved_and_not_given_up() -> None:
    def eight_of_ten_cpus_are_free(work: int, num_threads: int) -> float:
        return idle(work, num_threads) * (5 if num_threads > 8 else 1)

    machine = Machine(10, eight_of_ten_cpus_are_free)
    machine.run([PREFILL] * 20)
    used = Counter(machine.run([PREFILL] * 500))
    assert used[5] > 0.95 * used.total()


def test_threads_that_gain_nothing_are_not_taken_back() -> None:
    machine = Machine(4, lambda work, n: idle(work, min(n, 2)) * (1.01 if n > 2 else 1))
    machine.run([DECODE] * 1000)
    assert Counter(machine.run([DECODE] * 1000))[2] > 950


def test_a_step_that_raised_is_not_timed() -> None:
    machine = Machine(2, idle)
    machine.run([DECODE] * 10)
    for _ in range(10):
        machine.threads.begin(DECODE)  # no `end`
        machine.now += 1000.0
    assert Counter(machine.run([DECODE] * 100))[2] >= 98


def batch_of(num_sequences: int, num_tokens: int, num_computed: int, **params: object) -> ScheduledBatch:
    options = {"temperature": 0.0, **params}
    items = []
    for i in range(num_sequences):
        token_ids = [0] * (num_computed + num_tokens)
        request = Request(str(i), tuple(token_ids), SamplingParams(**options), seed=0)  # type: ignore[arg-type]
        sequence = Sequence(request, i, token_ids, num_computed=num_computed)
        items.append(ScheduledSequence(sequence, num_tokens))
    return ScheduledBatch(tuple(items))


def test_the_embedded_model_decodes_on_one_thread_whatever_the_batch() -> None:
    work = StepWork(load_config(STORYTELLER))
    threads = StepThreads(64)
    for num_sequences in (1, 8, 32):
        assert threads.begin(work.of(batch_of(num_sequences, 1, 100))) == 1


def test_work_grows_with_all_that_a_step_computes() -> None:
    of = StepWork(load_config(STORYTELLER)).of
    one = of(batch_of(1, 1, 100))
    assert one < of(batch_of(2, 1, 100))
    assert one < of(batch_of(1, 1, 1000))
    assert one < of(batch_of(1, 2, 100))
    assert one < of(batch_of(1, 1, 100, temperature=1.0))
    assert of(batch_of(1, 50, 0)) < of(batch_of(1, 50, 0, prompt_logprobs=1))


def test_idle_experts_are_no_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GptOssConfig().to_dict(), default=str))
    model = load_config(tmp_path)
    sizes = [StepWork(replace(model, experts=Experts(8, n))).of(batch_of(1, 1, 1)) for n in (2, 4, 8)]
    assert sizes[0] < sizes[1] < sizes[2]

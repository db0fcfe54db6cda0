"""Fillers wait behind all others, give up their slots and blocks, and add little to a step beside others."""

from __future__ import annotations

from dataclasses import replace

from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.filler import FillerRoom
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from tests.engine.scheduling.invariants import check_scheduler
from tests.engine.scheduling.test_scheduler import make_scheduler


def request(name: str, *, is_filler: bool, length: int = 3) -> Request:
    params = SamplingParams(max_tokens=20)
    return Request(name, tuple(range(1, length + 1)), params, seed=0, is_filler=is_filler)


def step(scheduler: Scheduler) -> list[str]:
    batch = scheduler.schedule()
    scheduler.update(batch, [(7,) for item in batch.items if item.needs_sampling])
    check_scheduler(scheduler)
    return [item.sequence.request.request_id for item in batch.items]


def test_a_later_request_goes_before_a_filler() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("filler", is_filler=True))
    scheduler.add(replace(request("asked", is_filler=False), priority=5))
    assert step(scheduler) == ["asked"]


def test_a_filler_gives_its_slot_to_a_request_and_goes_on_after_it() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    filler = scheduler.add(request("filler", is_filler=True))
    assert step(scheduler) == ["filler"]
    scheduler.add(request("asked", is_filler=False))
    assert step(scheduler) == ["asked"]
    assert not filler.is_running
    assert filler.num_generated == 1
    scheduler.abort("asked")
    assert step(scheduler) == ["filler"]


def test_a_filler_gives_its_blocks_to_a_request() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(request("filler", is_filler=True, length=24))
    step(scheduler)
    scheduler.add(request("asked", is_filler=False, length=24))
    assert step(scheduler) == ["asked"]


def test_nothing_is_preempted_while_a_foreseen_step_runs() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    filler = scheduler.add(request("filler", is_filler=True))
    running = scheduler.schedule()
    assert scheduler.foresee(running)
    scheduler.add(request("asked", is_filler=False))
    assert [item.sequence for item in scheduler.schedule().items] == [filler]
    scheduler.update(running, [(7,)])


def test_a_step_that_may_preempt_is_not_foreseen() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("filler", is_filler=True))
    running = scheduler.schedule()
    scheduler.add(request("asked", is_filler=False))
    assert not scheduler.foresee(running)


def item(*, is_filler: bool, num_tokens: int = 1) -> ScheduledSequence:
    sequence = SequenceState(request("x", is_filler=is_filler), 0, [1] * num_tokens, 0.0, max_len=30)
    return ScheduledSequence(sequence, num_tokens)


def observe(room: FillerRoom, seconds: float, num_fillers: int = 0) -> None:
    items = [item(is_filler=False), *(item(is_filler=True) for _ in range(num_fillers))]
    room.observe(ScheduledBatch(tuple(items), 0.0), seconds)


def test_fillers_add_a_small_share_of_the_measured_time() -> None:
    room = FillerRoom()
    assert room.max_tokens(0) > 1000
    assert room.max_tokens(1) == 0  # until a step without fillers is known
    observe(room, 1.0)
    assert room.max_tokens(1) == 1
    observe(room, 1.01, num_fillers=1)
    assert room.max_tokens(1) in (14, 15)
    for _ in range(300):
        observe(room, 2.0, num_fillers=1)
    observe(room, 1.0)
    assert room.max_tokens(1) == 0
    for _ in range(128):
        observe(room, 1.0)
    assert room.max_tokens(1) == 1  # so that they go on
    assert room.max_tokens(2) == 1

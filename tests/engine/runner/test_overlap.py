"""Steps that overlap: the same answers as one step after the other, whenever the device computes.

A GPU is stood in for by runners that compute a step at its launch, at the next one or when it is collected, always in
order. They see only what a step had at its launch.
"""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.gpu.token_counts import DeviceCounts
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.request import FinishReason, Request, SamplingParams, TokenOutput
from gptserve.engine.runner import runner as runner_module
from gptserve.engine.runner.overlap import Steps
from gptserve.engine.runner.probe import disagreement, may_overlap
from gptserve.engine.runner.runner import Collect, ModelRunner, StepResult
from gptserve.engine.runner.sampler import SampledTokens
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.sampling.token_counts import TokensBefore
from gptserve.engine.scheduling import foresight
from gptserve.engine.scheduling.drafter import MAX_DRAFTING_STEP_TOKENS, Drafter, PromptLookup
from gptserve.engine.scheduling.grammar_drafter import GrammarDrafter
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from gptserve.engine.scheduling.sequence_blocks import SequenceBlocks
from tests.engine.backends.gpu.shadow_gpu import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Faults,
    ShadowRunner,
    SomeDrafts,
    Stream,
    Violation,
)
from tests.engine.backends.gpu.test_graphs import ByLibrary, Rerun, capture_for
from tests.engine.batches import know_steps
from tests.engine.runs import EvenPace, make_config, make_engine, make_request, ragged_prompts, run, token_ids
from tests.engine.test_scheduler_machine import STOP, FicklePace, complete_alone


class LateRunner:
    """A ModelRunner on a Stream."""

    def __init__(self, runner: ModelRunner, choose_delay: Callable[[], int]) -> None:
        self.runner, self.info, self.stream = runner, runner.info, Stream(choose_delay)
        self.waits_in_launch = runner.waits_in_launch

    @property
    def host_counts(self) -> bool:
        return self.runner.host_counts

    def launch(self, step: StepInput) -> Collect:
        positions = [position._replace(known=list(position.known)) for position in step.positions]
        seen = step._replace(positions=positions)
        return self.stream.launch(lambda: self.runner.launch(seen)())


@pytest.fixture(autouse=True)
def steps_know_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    know_steps(monkeypatch)


# Random service


def random_requests(
    random: Random, started: list[Request], names: Counter[str], penalties: Sequence[float]
) -> list[Request]:
    """Return the choices of a prompt, which may begin like an earlier one, with one of these penalties."""
    earlier = random.choice(started).prompt_token_ids if started else ()
    tail = [random.randrange(2) for _ in range(random.randrange(5))]
    prompt = ((*earlier[: random.randrange(9)], *tail) or (0,))[: MAX_MODEL_LEN - 1]
    params = SamplingParams(
        max_tokens=random.choice([1, 1, 2, 5, 9, 12]),
        ignore_eos=random.random() < 0.5,
        stop_token_ids=random.choice([(), (STOP,)]),
        logprobs=random.choice([None] * 9 + [0]),
        bad_words=random.choice([()] * 9 + [((3, 3, 3),)]),
        repetition_penalty=random.choice(penalties),
    )
    params = replace(params, max_tokens=min(params.max_tokens, MAX_MODEL_LEN - len(prompt)))
    names["requests"] += (num := random.choice([1, 1, 2, 3]))
    salt, priority, seed = random.choice(["", "", "s"]), random.choice([0, 0, 1]), random.randrange(2)
    first = names["requests"] - num
    return [Request(str(first + i), prompt, params, seed, i, priority, salt) for i in range(num)]


def serve_at_random(seed: int, seen: Counter[str], *, overlap: bool) -> dict[str, tuple[list[int], Any]]:
    """Serve random requests and check each against its definition; return what every client got."""
    random, late = Random(seed), Random(~seed)
    max_num_seqs = random.choice([1, 2, 3, 5, 8])
    budget = random.choice([8, 9, 12, 24])
    num_blocks = MAX_MODEL_LEN // BLOCK_SIZE + random.choice([0, 1, 3, 6, 20])
    has_faults = random.random() < 0.5
    drawn = [frozenset(random.sample(range(2, 60), 3)) if has_faults else frozenset[int]() for _ in range(3)]
    host_counts, drafter = random.random() < 0.2, random.choice([None, *map(SomeDrafts, ("true", "false", "fickle"))])
    delay = partial(late.choice, [0, 1, 2])
    runner = ShadowRunner(num_blocks, delay, Faults(*drawn), max_num_seqs, host_counts=host_counts)
    config = EngineConfig(Path(), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    pace = _AnyPace() if random.random() < 0.3 else EvenPace()
    engine = Engine(config, runner=runner, drafter=drafter, pace=pace, overlap=overlap)
    started: list[Request] = []
    penalties, num_idle = random.choice([[1.0], [1.0, 1.0, 1.5], [1.5]]), 0
    names: Counter[str] = Counter()
    outputs: dict[str, list[TokenOutput]] = {}
    aborted: set[str] = set()
    while len(started) < 14 or engine.has_work:
        if len(started) < 14 and (random.random() < 0.4 or not engine.has_work):
            for request in random_requests(random, started, names, penalties):
                started.append(request)
                outputs[request.request_id] = []
                engine.add(request)
        if len(started) < 14 and random.random() < 0.1:
            gone = random.choice(started).request_id
            if not any(output.finish_reason for output in outputs[gone]):
                aborted.add(gone)
                engine.abort(gone)
        given = engine.step()
        num_idle = 0 if given else num_idle + 1
        assert num_idle < 100, "no progress"
        for output in given:
            assert output.request_id not in aborted
            outputs[output.request_id].append(output)
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_generated_tokens == sum(len(token_ids(its)) for its in outputs.values())
    seen["ahead"] += runner.stream.num_ahead
    seen["steps"] += runner.stream.num_launched
    seen["preemptions"] += stats.num_preemptions
    seen["prefix hits"] += stats.num_prefix_hit_tokens
    seen["aborted"] += len(aborted)
    seen["accepted drafts"] += stats.num_accepted_tokens
    seen["foreseen counts"] += runner.num_foreseen_counts
    return {r.request_id: checked(r, outputs[r.request_id], r.request_id in aborted, has_faults, seen) for r in started}


class _AnyPace(FicklePace):
    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        self._num_steps += 1


def checked(
    request: Request, outputs: list[TokenOutput], was_aborted: bool, has_faults: bool, seen: Counter[str]
) -> tuple[list[int], Any]:
    """Compare what a client got with the request computed alone."""
    truth, reason = complete_alone(request, MAX_MODEL_LEN)
    tokens = token_ids(outputs)
    assert tokens == truth[len(request.prompt_token_ids) :][: len(tokens)]
    ends = [output.finish_reason for output in outputs if output.finish_reason]
    seen.update(ends)
    if was_aborted:
        assert ends == []
        return [], None
    if ends == [FinishReason.ERROR]:
        assert has_faults
        return [], None
    assert (tokens, ends) == (truth[len(request.prompt_token_ids) :], [reason])
    assert outputs[-1].stop_token_id == (tokens[-1] if reason is FinishReason.STOP else None)
    return tokens, reason


EVENTS = "preemptions", "prefix hits", "aborted", "accepted drafts", "foreseen counts"


def serve_often(num: int, seen: Counter[str]) -> None:
    for seed in range(num):
        serve_at_random(seed, seen, overlap=True)


@pytest.mark.slow
@pytest.mark.parametrize(("num", "often"), [(200, 50), pytest.param(4000, 1000, marks=pytest.mark.slow)])
def test_random_service_gives_each_request_what_it_gets_alone(num: int, often: int) -> None:
    seen: Counter[str] = Counter()
    serve_often(num, seen)
    assert seen["ahead"] > 50 * often, seen
    for event in (*EVENTS, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR):
        assert seen[event] > often, seen


def test_without_overlap_nothing_is_launched_ahead() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        serve_at_random(seed, seen, overlap=False)
    assert seen["steps"] > 200
    assert seen["ahead"] == 0


def _none_is_missing(running: object, blocks: object) -> int:
    return 0


def _is_never_needed(item: ScheduledSequence, drafter: object, *, host_counts: bool) -> bool:
    return False


def _asks_for_none(sequence: SequenceState, drafter: object) -> bool:
    return True


def _takes_the_device_to_count(item: ScheduledSequence, drafter: Drafter, *, host_counts: bool) -> bool:
    return must_be_known(item, drafter, host_counts=False)


def _reads_no_drafts(item: ScheduledSequence, drafter: Drafter, *, host_counts: bool) -> bool:
    return must_be_known(item, Drafter(), host_counts=host_counts)


def _stays(sequence: SequenceState) -> None:
    pass


def _registers_late_and_never_forgets(blocks: SequenceBlocks, unfilled: object) -> None:
    pass


def _counts_anew(counts: DeviceCounts) -> None:
    counts.release()
    reserve(counts)


def _trusts_abandoned_steps(counts: DeviceCounts, sequences: Sequence[TokensBefore]) -> Any:
    for its_seat in counts._seats.values():
        its_seat.num_due = 0
    return seat(counts, sequences)


def _clears_no_seat(counts: DeviceCounts, fresh: Tensor, places: Tensor, amounts: Tensor) -> None:
    update(counts, fresh[:0], places, amounts)


def _keeps_the_step_ahead(steps: Steps, batch: ScheduledBatch) -> SequenceState | None:
    return steps._scheduler.abandon(batch)


must_be_known, reserve, seat, update = (
    foresight.must_be_known,
    DeviceCounts.reserve,
    DeviceCounts.seat,
    DeviceCounts.update,
)


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (foresight, "num_missing_blocks", _none_is_missing),
        (foresight, "must_be_known", _is_never_needed),
        (foresight, "is_always_foreseeable", _asks_for_none),
        (foresight, "must_be_known", _takes_the_device_to_count),
        (foresight, "must_be_known", _reads_no_drafts),
        (foresight, "drop_foreseen", _stays),
        (SequenceBlocks, "forget_unfilled", _registers_late_and_never_forgets),
        (DeviceCounts, "reserve", _counts_anew),
        (DeviceCounts, "seat", _trusts_abandoned_steps),
        (DeviceCounts, "update", _clears_no_seat),
        (Steps, "abandon", _keeps_the_step_ahead),
    ],
)
def test_random_service_catches_a_plan_that_was_made_too_early(
    owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((Violation, AssertionError, IndexError, ValueError)):
        serve_often(200, Counter())


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": 2, "logit_bias": {1: 2.0}, "min_tokens": 1, "allowed_token_ids": (1, 2)},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.1},
    {"frequency_penalty": 0.1},
    {"bad_words": ((1,),)},
    {"prompt_logprobs": 0},
]


@pytest.mark.parametrize("params", ASKED, ids=str)
@pytest.mark.parametrize("drafter", [Drafter(), GrammarDrafter(Drafter()), PromptLookup(2)], ids=["none", "all", "n"])
def test_only_what_need_never_be_known_is_never_asked_for(params: dict[str, Any], drafter: Drafter) -> None:
    request = Request("r", (1, 2), SamplingParams(**params), seed=0)
    sequence = SequenceState(request, 0, [1, 2], block_ids=[0])
    needed = must_be_known(ScheduledSequence(sequence, 2), drafter, host_counts=True)
    assert foresight.is_always_foreseeable(sequence, drafter) == (not needed)


def test_a_step_that_fails_takes_the_next_one_along_without_blame() -> None:
    """The bystander is in the second step alone."""
    faults = Faults(steps=frozenset({1}))  # 0 is the warm-up
    runner = ShadowRunner(20, lambda: 2, faults, 8, host_counts=False)
    engine = Engine(EngineConfig(Path(), max_num_seqs=2, max_num_batched_tokens=8), runner=runner, overlap=True)
    engine.add(Request("failing", (0, 1, 0, 0, 1, 1, 0, 1), SamplingParams(max_tokens=3), 0))
    engine.add(Request("bystander", (1,) * 6, SamplingParams(max_tokens=3), 0))
    assert engine.step() == []
    assert {name: its.blame.num_failures for name, its in engine._scheduler._live.items()} == {
        "failing": 1,
        "bystander": 0,
    }


# The model


def late_engine(
    folder: Path, choose_delay: Callable[[], int], drafter: Drafter | None = None, **options: Any
) -> tuple[Engine, Stream]:
    """Return an engine whose steps overlap on a late stand-in, and that."""
    config = make_config(folder, **options)
    runner = LateRunner(ModelRunner(config), choose_delay)
    return Engine(config, runner=runner, drafter=drafter, pace=EvenPace(), overlap=True), runner.stream


def varied_requests() -> list[Request]:
    """Return requests whose answers have different lengths, greedy and drawn; a few read what was generated."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 10}] * 2
    kinds += [{"presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 2}, {"logprobs": 3}]
    prompts = ragged_prompts(32, 60)
    return [
        make_request(str(i), p, seed=i, max_tokens=1 + i % 13, **kinds[i % len(kinds)]) for i, p in enumerate(prompts)
    ]


def answers(outputs: dict[str, list[TokenOutput]]) -> dict[str, Any]:
    return {
        i: (token_ids(its), [entry for output in its for entry in output.logprobs], its[-1].finish_reason)
        for i, its in outputs.items()
    }


LOADS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "small batches": {"max_num_batched_tokens": 9, "max_num_seqs": 7, "block_size": 4},
    "preempted": {"num_blocks": 16, "block_size": 8},
    "bf16": {"dtype": "bfloat16", "max_num_seqs": 5},
}


@pytest.mark.some(2)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_every_answer_has_the_bits_that_it_has_without_overlap(tiny_gpt2: Path, load: str, delay: int) -> None:
    plain = Engine(make_config(tiny_gpt2, **LOADS[load]), pace=EvenPace())
    expected = answers(run(plain, varied_requests()))
    stops = {i: tokens[len(tokens) // 2] for i, (tokens, *_) in expected.items() if int(i) % 3 == 0}
    requests = [
        replace(r, params=replace(r.params, stop_token_ids=(stops[r.request_id],))) if r.request_id in stops else r
        for r in varied_requests()
    ]
    engine, stream = late_engine(tiny_gpt2, lambda: delay, **LOADS[load])
    assert answers(run(engine, requests)) == answers(run(plain, requests))
    assert stream.num_ahead > stream.num_launched // 4
    assert engine.stats.num_preemptions > 0 or load != "preempted"
    assert engine.stats.num_generated_tokens < sum(len(tokens) for tokens, *_ in expected.values())


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("load", "has_graphs"),
    [
        ("small batches", False),
        ("preempted", True),
        pytest.param("small batches", True, marks=pytest.mark.slow),
        pytest.param("preempted", False, marks=pytest.mark.slow),
    ],
)
def test_penalties_overlap_where_the_device_counts(
    storyteller: Path, load: str, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their logprobs, stops and drawn tokens."""
    if has_graphs:
        monkeypatch.setattr(runner_module, "native_decoder", lambda *arguments: None)  # graphs have torch's operations
    options = {"dtype": "float32", "max_num_seqs": 7, **LOADS[load]}
    requests = [
        replace(r, params=replace(r.params, presence_penalty=0.7, repetition_penalty=1.3, logprobs=2, ignore_eos=False))
        for r in varied_requests()
    ]
    plain = Engine(make_config(storyteller, **options), pace=EvenPace())
    engine, stream = late_engine(storyteller, lambda: 2, **options)
    late, sampler, capture = engine._runner, ByLibrary(engine.info.vocab_size), Rerun()
    assert isinstance(late, LateRunner)
    late.runner.choose = sampler.choose
    if has_graphs:
        engine._runner = late.runner
        late.runner.graphs = capture_for(engine, capture, sampler=sampler)
        engine._runner, capture.num_replays = late, 0
    assert answers(run(engine, requests)) == answers(run(plain, requests))
    assert stream.num_ahead > stream.num_launched // 2
    assert engine.stats.num_preemptions > 0 or load != "preempted"
    assert bool(capture.num_replays) == has_graphs


def test_penalties_wait_where_the_host_counts(tiny_gpt2: Path) -> None:
    engine, stream = late_engine(tiny_gpt2, lambda: 2)
    run(engine, [make_request("a", [1, 2, 3], max_tokens=9, frequency_penalty=0.5)])
    assert stream.num_ahead == 0


def test_graphs_take_the_tokens_of_the_step_before(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "native_decoder", lambda *arguments: None)  # graphs have torch's operations
    requests = [
        replace(r, params=replace(r.params, ignore_eos=False)) for r in varied_requests() if int(r.request_id) % 9 < 8
    ]
    plain = Engine(make_config(tiny_gpt2), pace=EvenPace())
    engine, stream = late_engine(tiny_gpt2, lambda: 2)
    late = engine._runner
    assert isinstance(late, LateRunner)
    engine._runner, capture = late.runner, Rerun()
    late.runner.graphs = capture_for(engine, capture)
    engine._runner, capture.num_replays = late, 0
    assert answers(run(engine, requests)) == answers(run(plain, requests))
    assert capture.num_replays > 5
    assert stream.num_ahead > stream.num_launched // 2


def test_drafts_wait_for_the_tokens_and_change_nothing(tiny_gpt2: Path) -> None:
    requests = [make_request(str(i), [1, 2, 3] * 9, seed=i, max_tokens=20, temperature=0.0) for i in range(3)]
    engine, stream = late_engine(tiny_gpt2, lambda: 2, speculative_ngram=2)
    plain = run(Engine(make_config(tiny_gpt2), pace=EvenPace()), requests)
    assert answers(run(engine, requests)) == answers(plain)
    assert engine.stats.num_draft_tokens > 0
    assert stream.num_ahead == 0


def test_the_next_step_is_launched_before_this_one_is_awaited(tiny_gpt2: Path) -> None:
    config = make_config(tiny_gpt2)
    runner, events = ModelRunner(config), list[str]()
    launch = runner.launch

    def noted(step: StepInput) -> Collect:
        number, collect = sum("launch" in event for event in events), launch(step)
        events.append(f"launch {number}")

        def collected() -> StepResult:
            events.append(f"collect {number}")
            return collect()

        return collected

    runner.launch = noted  # type: ignore[method-assign]
    engine = Engine(config, runner=runner, overlap=True)
    events.clear()
    engine.add(make_request("a", [1, 2], max_tokens=3))
    assert [len(engine.step()) for _ in range(3)] == [1, 1, 1]
    assert events == ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"]
    assert not engine.has_work


def test_an_abort_leaves_a_step_ahead_that_harms_nobody(tiny_gpt2: Path) -> None:
    request = make_request("b", range(20), max_tokens=6, temperature=0.7)
    expected = answers(run(Engine(make_config(tiny_gpt2)), [request]))
    engine, _ = late_engine(tiny_gpt2, lambda: 2, num_blocks=8)
    engine.add(make_request("a", range(20), max_tokens=40))
    engine.step()
    engine.abort("a")
    assert not engine.has_work
    assert engine.stats.num_used_blocks == 0
    assert answers(run(engine, [request])) == expected


class DraftsFor(Drafter):
    """Drafts for one request, as a grammar does that forces the next tokens."""

    max_step_tokens = MAX_DRAFTING_STEP_TOKENS

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def may_draft(self, sequence: SequenceState) -> bool:
        return sequence.request.request_id == self._request_id

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        return (5, 6)[:max_tokens] if self.may_draft(sequence) else ()

    def forget(self, sequence: SequenceState) -> None:
        pass


def test_an_abort_of_a_request_with_a_draft_leaves_the_others_their_own_tokens(tiny_gpt2: Path) -> None:
    """The draft has rows in the step ahead: the token of the request behind it is not in the second row."""
    first, drafting, behind = (make_request(i, [ord(i) % 50, 7, 5], max_tokens=20, temperature=1.0) for i in "fdb")
    expected = answers(run(Engine(make_config(tiny_gpt2), pace=EvenPace()), [first, behind]))
    engine, _ = late_engine(tiny_gpt2, lambda: 1, DraftsFor("d"))
    engine.add(first)
    outputs: dict[str, list[TokenOutput]] = {"f": engine.step(), "b": [], "d": []}
    engine.add(drafting)
    engine.add(behind)
    for num_steps in itertools.count(1):
        for output in engine.step():
            outputs[output.request_id].append(output)
        if num_steps == 1:
            engine.abort("d")
        if not engine.has_work:
            break
    assert {name: its for name, its in answers(outputs | {"d": outputs["f"]}).items() if name != "d"} == expected


def test_a_launch_that_fails_leaves_the_tokens_of_the_step_before(tiny_gpt2: Path) -> None:
    requests = [make_request(name, range(10), max_tokens=4, seed=seed) for seed, name in enumerate("ab")]
    expected = answers(run(Engine(make_config(tiny_gpt2)), requests))
    engine, _ = late_engine(tiny_gpt2, lambda: 1)
    launch, num_launches = engine._runner.launch, 0

    def fails_once(step: StepInput) -> Collect:
        nonlocal num_launches
        num_launches += 1
        if num_launches == 2:
            raise MemoryError("told to fail")
        return launch(step)

    engine._runner.launch = fails_once  # type: ignore[method-assign]
    for request in requests:
        engine.add(request)
    outputs = {output.request_id: [output] for output in engine.step()}
    assert [len(its[0].token_ids) for its in outputs.values()] == [1, 1]
    assert engine.stats.num_running == 0, "the sequences of the failed step wait to be recomputed"
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert answers(outputs) == expected


def test_a_launch_that_fails_keeps_no_tensor(tiny_gpt2: Path) -> None:
    """Nor has it to wait for a collection of garbage: what has no memory now would have none again."""
    engine, _ = late_engine(tiny_gpt2, lambda: 1)
    taken = list[weakref.ref[Tensor]]()

    def fails(step: StepInput) -> Collect:
        logits = torch.zeros(9)
        taken.append(weakref.ref(logits))
        raise MemoryError("told to fail")

    engine._runner.launch = fails  # type: ignore[method-assign]
    engine.add(make_request("a", range(10), max_tokens=4))
    logging.disable()  # a log of a test keeps the exception
    gc.collect()
    gc.disable()
    try:
        engine.step()
        assert [tensor() for tensor in taken] == [None]
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


# Where steps overlap


def like_a_gpu(folder: Path) -> LateRunner:
    runner = LateRunner(ModelRunner(make_config(folder)), lambda: 1)
    runner.info = replace(runner.info, device="cuda")
    return runner


def test_steps_overlap_on_a_gpu_unless_that_is_not_wanted(tiny_gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, runner = make_config(tiny_gpt2), like_a_gpu(tiny_gpt2)
    assert may_overlap(config, runner)
    assert may_overlap(replace(config, tensor_parallel_size=2), runner)
    engine = Engine(config, runner=runner)
    assert engine._steps.overlap
    assert vars(engine._scheduler._pace)["_min_chunk_tokens"] == 256
    assert vars(Engine(config)._scheduler._pace)["_min_chunk_tokens"] == 16
    assert not may_overlap(replace(config, overlap=False), runner)
    assert not may_overlap(config, runner.runner)
    assert not caplog.records


def raises(collect: Collect) -> StepResult:
    raise RuntimeError("no event")


def gives_another_token(collect: Collect) -> StepResult:
    result = collect()
    token_id = result.sampled.token_ids[0]
    assert token_id is not None
    return StepResult(SampledTokens((token_id ^ 1,), result.sampled.logprobs), {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "the host waits for the experts of each layer"),
        (raises, "they failed with RuntimeError: no event"),
        (gives_another_token, "they gave the tokens and logprobs [(1, "),
    ],
)
def test_where_steps_cannot_overlap_a_warning_says_why(
    tiny_gpt2: Path,
    change: Callable[[Collect], StepResult] | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = like_a_gpu(tiny_gpt2)
    runner.waits_in_launch = "experts" in reason
    launch = runner.launch

    def changed(step: StepInput) -> Collect:
        collect = launch(step)
        is_ahead = step.arrays.token_ids[0] < 0
        return collect if change is None or not is_ahead else lambda: change(collect)

    runner.launch = changed  # type: ignore[method-assign]
    assert not may_overlap(make_config(tiny_gpt2), runner)
    [record] = caplog.records
    assert record.getMessage().startswith(
        f"steps: one after the other, which is slower, are used instead of overlapping ones: {reason}"
    )


@pytest.mark.parametrize("misread", ["as 0", "from the step before that"])
def test_an_id_that_a_graph_does_not_read_from_the_last_step_is_seen(
    misread: str, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even in a model whose likeliest token is 0 whatever it reads."""
    logits_of, engine = Decoder.logits, make_engine(tiny_gpt2)

    def mostly_0(self: Decoder, hidden: Tensor) -> Tensor:
        logits = logits_of(self, hidden)
        logits[:, 0] += 20.0
        return logits

    monkeypatch.setattr(Decoder, "logits", mostly_0)
    graphs = engine._runner.graphs = capture_for(engine, Rerun())
    assert graphs is not None
    assert disagreement(engine._runner) is None
    read, chosen = graphs.logits, [torch.zeros(1, dtype=torch.int64)]

    def misreading(arrays: StepArrays, chosen_R: Tensor | None = None) -> Tensor:
        assert chosen_R is not None
        chosen.append(chosen_R.clone())
        if misread == "as 0":
            return read(arrays, chosen[0])
        return read(arrays, chosen[-2] if arrays.positions[0] > 1 else chosen_R)

    monkeypatch.setattr(graphs, "logits", misreading)
    assert disagreement(engine._runner) is not None

"""Steps that overlap: the same answers as one step after the other, whenever the device computes.

A GPU is stood in for by runners that compute a step at its launch, at the next one or when it is collected, always in
order. They see only what a step had at its launch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.model.runner import Collect, ModelRunner, StepResult
from gptserve.engine.probe import may_overlap
from gptserve.engine.request import EngineInfo, FinishReason, Request, SamplingParams, TokenOutput
from gptserve.engine.sampling.sampler import SampledTokens
from gptserve.engine.scheduling import foresight
from gptserve.engine.scheduling.drafter import MAX_DRAFTING_STEP_TOKENS, Drafter
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from gptserve.engine.scheduling.sequence_blocks import SequenceBlocks
from tests.engine.runs import EvenPace, make_config, make_request, ragged_prompts, run, token_ids
from tests.engine.test_cuda_graphs import Rerun, capture_for
from tests.engine.test_scheduler_machine import EOS, STOP, FicklePace, complete_alone, next_token

MAX_MODEL_LEN, BLOCK_SIZE = 12, 2
Prefix = tuple[str, tuple[int, ...]]


def as_launched(batch: ScheduledBatch) -> ScheduledBatch:
    """Return the batch with copies of its sequences, as they are now."""

    def item_of(item: ScheduledSequence) -> ScheduledSequence:
        sequence = copy(item.sequence)
        sequence.token_ids, sequence.block_ids = list(sequence.token_ids), list(sequence.block_ids)
        return ScheduledSequence(sequence, item.num_tokens, item.draft)

    return ScheduledBatch(tuple(map(item_of, batch.items)))


class Stream:
    """A device's queue: steps are computed in order, `choose_delay` of them later than they could be."""

    def __init__(self, choose_delay: Callable[[], int]) -> None:
        self._choose_delay = choose_delay
        self._queue: list[Callable[[], None]] = []
        self.num_launched = 0
        self.num_ahead = 0
        """How many steps were collected after a later one had been launched."""

    def launch(self, compute: Callable[[], StepResult]) -> Collect:
        """Queue a step. What it raises comes when it is collected."""
        number, results = self.num_launched, list[StepResult | BaseException]()
        self.num_launched += 1

        def computed() -> None:
            try:
                results.append(compute())
            except Exception as error:
                results.append(error)

        def collect() -> StepResult:
            while not results:
                self._queue.pop(0)()
            self.num_ahead += self.num_launched > number + 1
            if isinstance(results[0], BaseException):
                raise results[0]
            return results[0]

        self._queue.append(computed)
        while len(self._queue) > self._choose_delay():
            self._queue.pop(0)()
        return collect


class LateRunner:
    """A ModelRunner on a Stream."""

    def __init__(self, runner: ModelRunner, choose_delay: Callable[[], int]) -> None:
        self.runner, self.info, self.stream = runner, runner.info, Stream(choose_delay)
        self.waits_in_launch = runner.waits_in_launch

    def launch(self, batch: ScheduledBatch) -> Collect:
        seen = as_launched(batch)
        return self.stream.launch(lambda: self.runner.launch(seen)())


# The rules, with a cache that knows what it holds


class Violation(BaseException):
    """A rule was broken; no Exception, which the engine would take for a failed step."""


@dataclass
class Faults:
    """Which steps fail, and how, by their number; the engine's own warm-up never does."""

    launches: frozenset[int] = frozenset()
    steps: frozenset[int] = frozenset()
    unusable: frozenset[int] = frozenset()

    def without(self, number: int) -> Faults:
        return Faults(*(steps - {number} for steps in (self.launches, self.steps, self.unusable)))


class ShadowRunner:
    """Tokens drawn from what was attended to; raises Violation unless each sequence attends to its own prefix."""

    def __init__(self, num_blocks: int, choose_delay: Callable[[], int], faults: Faults, max_num_seqs: int) -> None:
        self.info = EngineInfo(
            **dict.fromkeys(EngineInfo.__slots__, 0)
            | {"vocab_size": 4, "max_model_len": MAX_MODEL_LEN, "eos_token_ids": (EOS,), "device": "cuda"}
            | {"block_size": BLOCK_SIZE, "num_blocks": num_blocks, "max_num_seqs": max_num_seqs}
        )
        self.stream, self._faults = Stream(choose_delay), faults
        self._cells: dict[tuple[int, int], Prefix | None] = {}
        self._chosen: list[int] = []
        self._known_failures: dict[int, int] = {}  # a step that raised, and how many were launched when that was known
        self._must_be_collected = False

    def launch(self, batch: ScheduledBatch) -> Collect:
        number, batch = self.stream.num_launched, as_launched(batch)
        if batch.items[0].sequence.request.request_id == "probe":
            self._faults = self._faults.without(number)
        if self._must_be_collected:
            raise Violation("launched before the tokens that it reads were known")
        if number in self._faults.launches:
            self.stream.num_launched += 1
            raise MemoryError("told to fail at the launch")
        for item in batch.items:
            params = item.sequence.request.params
            if item.needs_sampling and params.bad_words:
                self._must_be_collected = True
        collect = self.stream.launch(lambda: self._compute(number, batch))

        def seen() -> StepResult:
            self._must_be_collected = False
            try:
                return collect()
            except MemoryError:
                self._known_failures[number] = self.stream.num_launched
                raise

        return seen

    def _compute(self, number: int, batch: ScheduledBatch) -> StepResult:
        for item in batch.items:
            self._resolve(item.sequence)
            for position in range(item.sequence.num_computed, item.sequence.num_computed + item.num_tokens):
                self._cells[_cell(item, position)] = _prefix(item, position)
        if number in self._faults.steps:
            for item in batch.items:
                for position in range(item.sequence.num_computed, item.sequence.num_computed + item.num_tokens):
                    self._cells[_cell(item, position)] = None
            self._chosen = [0] * len(batch.items)
            raise MemoryError("told to fail")
        is_doomed = any(number < self._known_failures.get(f, 1 << 30) for f in self._faults.steps if f < number)
        sampled = []
        for item in batch.items:
            end = item.sequence.num_computed + item.num_tokens
            for position in range(0 if is_doomed else end):
                content, own = self._cells.get(_cell(item, position)), _prefix(item, position)
                if content != own:
                    raise Violation(f"attends to {content} instead of {own}")
            if item.needs_sampling:
                sampled.append(next_token(item.sequence.request, _prefix(item, end - 1)[1]))
        usable = [None if number in self._faults.unusable and row == 0 else token for row, token in enumerate(sampled)]
        self._chosen = [-1 if token is None else token for token in usable]
        return StepResult(tuple(SampledTokens((token,), (None,)) for token in usable), {})

    def _resolve(self, sequence: SequenceState) -> None:
        if any(token_id < 0 for token_id in sequence.token_ids[:-1]):
            raise Violation("a token was never known")
        if sequence.is_foreseen:
            sequence.token_ids[-1] = max(0, self._chosen[~sequence.token_ids[-1]])


def _cell(item: ScheduledSequence, position: int) -> tuple[int, int]:
    return item.sequence.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE


def _prefix(item: ScheduledSequence, position: int) -> Prefix:
    return item.sequence.request.cache_salt, tuple(item.sequence.token_ids[: position + 1])


def random_requests(random: Random, started: list[Request], names: Counter[str]) -> list[Request]:
    """Return the choices of a prompt, which may begin like an earlier one."""
    earlier = random.choice(started).prompt_token_ids if started else ()
    tail = [random.randrange(2) for _ in range(random.randrange(5))]
    prompt = ((*earlier[: random.randrange(9)], *tail) or (0,))[: MAX_MODEL_LEN - 1]
    params = SamplingParams(
        max_tokens=random.choice([1, 1, 2, 5, 9, 12]),
        ignore_eos=random.random() < 0.5,
        stop_token_ids=random.choice([(), (STOP,)]),
        logprobs=random.choice([None] * 9 + [0]),
        bad_words=random.choice([()] * 9 + [((3, 3, 3),)]),
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
    runner = ShadowRunner(num_blocks, lambda: late.choice([0, 1, 2]), Faults(*drawn), max_num_seqs)
    config = EngineConfig(Path(), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    engine = Engine(config, runner=runner, pace=_AnyPace() if random.random() < 0.3 else EvenPace(), overlap=overlap)
    started: list[Request] = []
    names: Counter[str] = Counter()
    outputs: dict[str, list[TokenOutput]] = {}
    aborted: set[str] = set()
    while len(started) < 14 or engine.has_work:
        if len(started) < 14 and (random.random() < 0.4 or not engine.has_work):
            for request in random_requests(random, started, names):
                started.append(request)
                outputs[request.request_id] = []
                engine.add(request)
        if random.random() < 0.06:
            gone = random.choice(started).request_id
            if not any(output.finish_reason for output in outputs[gone]):
                aborted.add(gone)
                engine.abort(gone)
        for output in engine.step():
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


def serve_often(num: int, seen: Counter[str]) -> None:
    for seed in range(num):
        serve_at_random(seed, seen, overlap=True)


@pytest.mark.parametrize(("num", "often"), [(200, 50), pytest.param(4000, 1000, marks=pytest.mark.slow)])
def test_random_service_gives_each_request_what_it_gets_alone(num: int, often: int) -> None:
    seen: Counter[str] = Counter()
    serve_often(num, seen)
    assert seen["ahead"] > 50 * often, seen
    for event in ("preemptions", "prefix hits", "aborted", FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR):
        assert seen[event] > often, seen


def test_without_overlap_nothing_is_launched_ahead() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        serve_at_random(seed, seen, overlap=False)
    assert seen["steps"] > 200
    assert seen["ahead"] == 0


def _none_is_missing(sequences: object, blocks: object) -> int:
    return 0


def _is_never_needed(item: ScheduledSequence, drafter: object) -> bool:
    return False


def _registers_late_and_never_forgets(blocks: SequenceBlocks, unfilled: object) -> None:
    pass


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (foresight, "num_missing_blocks", _none_is_missing),
        (foresight, "must_be_known", _is_never_needed),
        (SequenceBlocks, "forget_unfilled", _registers_late_and_never_forgets),
    ],
)
def test_random_service_catches_a_plan_that_was_made_too_early(
    owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((Violation, AssertionError, IndexError, ValueError)):
        serve_often(200, Counter())


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


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("delay", [0, 2])
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


def test_graphs_take_the_tokens_of_the_step_before(tiny_gpt2: Path) -> None:
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

    def noted(batch: ScheduledBatch) -> Collect:
        number, collect = sum("launch" in event for event in events), launch(batch)
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


class DraftsFor:
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

    def fails_once(batch: ScheduledBatch) -> Collect:
        nonlocal num_launches
        num_launches += 1
        if num_launches == 2:
            raise MemoryError("told to fail")
        return launch(batch)

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


# Where steps overlap


def like_a_gpu(folder: Path) -> LateRunner:
    runner = LateRunner(ModelRunner(make_config(folder)), lambda: 1)
    runner.info = replace(runner.info, device="cuda")
    return runner


def test_steps_overlap_on_a_gpu_unless_that_is_not_wanted(tiny_gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, runner = make_config(tiny_gpt2), like_a_gpu(tiny_gpt2)
    assert may_overlap(config, runner)
    assert Engine(config, runner=runner)._steps.overlap
    assert not may_overlap(replace(config, overlap=False), runner)
    assert not may_overlap(config, runner.runner)
    assert not caplog.records


def raises(collect: Collect) -> StepResult:
    raise RuntimeError("no event")


def gives_another_token(collect: Collect) -> StepResult:
    result = collect()
    token_id = result.sampled[0].token_ids[0]
    assert token_id is not None
    return StepResult((SampledTokens((token_id ^ 1,), (None,)),), {})


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"tensor_parallel_size": 2}, None, "the ranks of a tensor-parallel engine meet in every step"),
        ({}, None, "the host waits for the experts of each layer"),
        ({}, raises, "they failed with RuntimeError: no event"),
        ({}, gives_another_token, "they gave the tokens"),
    ],
)
def test_where_steps_cannot_overlap_a_warning_says_why(
    tiny_gpt2: Path,
    options: dict[str, Any],
    change: Callable[[Collect], StepResult] | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = like_a_gpu(tiny_gpt2)
    runner.waits_in_launch = "experts" in reason
    launch = runner.launch

    def changed(batch: ScheduledBatch) -> Collect:
        collect = launch(batch)
        is_ahead = batch.items[0].sequence.is_foreseen
        return collect if change is None or not is_ahead else lambda: change(collect)

    runner.launch = changed  # type: ignore[method-assign]
    assert not may_overlap(make_config(tiny_gpt2, **options), runner)
    [record] = caplog.records
    assert record.getMessage().startswith(
        f"steps: one after the other, which is slower, are used instead of overlapping ones: {reason}"
    )

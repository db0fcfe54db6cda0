"""The engine: what a request gets depends on that request alone, bit for bit, and every request ends once.

Results are token ids with their logprobs as Python floats, so equality is bitwise equality of the logits' log-softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gptserve.engine.engine import Engine
from gptserve.engine.errors import EngineStartError, InvalidRequestError
from gptserve.engine.request import (
    MAX_SCORES_PER_OUTPUT,
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from gptserve.engine.runner.runner import Collect, ModelRunner
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.scheduling.drafter import MAX_DRAFTING_STEP_TOKENS, Drafter
from gptserve.engine.scheduling.sequence import ScheduledBatch, SequenceState
from gptserve.engine.stats import EngineStats
from tests.conftest import MakeGPT2
from tests.engine.batches import KnownStep, know_steps
from tests.engine.runs import make_config, make_engine, make_request, ragged_prompts, run, token_ids

Result = tuple[list[int], list[TokenLogprobs]]
Fails = Callable[[int, ScheduledBatch], bool]

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 10, "presence_penalty": 0.5},
]


def result(outputs: list[TokenOutput]) -> Result:
    return token_ids(outputs), [entry for output in outputs for entry in output.logprobs]


def prompt_scores(outputs: list[TokenOutput]) -> list[TokenLogprobs | None]:
    return [entry for output in outputs for entry in output.prompt_logprobs or ()]


def mixed_requests(num: int = 32, longest: int = 60, max_tokens: int = 24) -> list[Request]:
    """Ragged prompts, greedy and sampled mixed, each with its own seed."""
    return [
        make_request(str(i), prompt, seed=i, max_tokens=max_tokens, logprobs=2, **KINDS[i % len(KINDS)])
        for i, prompt in enumerate(ragged_prompts(num, longest))
    ]


def compute(folder: Path, requests: list[Request], **options: Any) -> dict[str, Result]:
    return {i: result(outputs) for i, outputs in run(make_engine(folder, **options), requests).items()}


@pytest.fixture(scope="module")
def solo(tiny_gpt2: Path) -> dict[str, Result]:
    """Each of the mixed requests run alone, one after the other, in an engine without a prefix cache."""
    engine = make_engine(tiny_gpt2, enable_prefix_caching=False)
    return {r.request_id: result(run(engine, [r])[r.request_id]) for r in mixed_requests()}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 7}, marks=pytest.mark.slow),
        {"max_num_batched_tokens": 5, "max_num_seqs": 5},
        pytest.param({"block_size": 8}, marks=pytest.mark.slow),
        {"block_size": 32},
        {"num_threads": 2},
        pytest.param({"attention_backend": "reference"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_alone_equals_in_a_ragged_batch_of_32_in_any_chunks(
    tiny_gpt2: Path, solo: dict[str, Result], options: dict[str, Any]
) -> None:
    if options.get("attention_backend") == "reference":  # another backend sums in another order: its own solo runs
        engine = make_engine(tiny_gpt2, enable_prefix_caching=False, **options)
        solo = {r.request_id: result(run(engine, [r])[r.request_id]) for r in mixed_requests()}
    assert compute(tiny_gpt2, mixed_requests(), **options) == solo


def test_alone_equals_in_a_batch_in_bf16(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2, dtype="bfloat16", enable_prefix_caching=False)
    alone = {r.request_id: result(run(engine, [r])[r.request_id]) for r in mixed_requests()}
    assert compute(tiny_gpt2, mixed_requests(), dtype="bfloat16", max_num_batched_tokens=64) == alone


@pytest.mark.slow
def test_sums_in_another_order_are_seen_by_the_comparison(tiny_gpt2: Path, solo: dict[str, Result]) -> None:
    """The negative control of the comparisons above: the other backend rounds elsewhere."""
    if make_engine(tiny_gpt2).info.attention_backend == "reference":
        pytest.skip("there is no other backend here")
    other = compute(tiny_gpt2, mixed_requests(), attention_backend="reference")
    for i, (tokens, logprobs) in solo.items():
        assert other[i][0][0] == tokens[0]
        assert other[i][1][0].logprob == pytest.approx(logprobs[0].logprob, abs=1e-4)
    assert sum(other[i] == solo[i] for i in solo) < len(solo) // 2


def test_another_seed_gives_another_result(tiny_gpt2: Path, solo: dict[str, Result]) -> None:
    prompts = ragged_prompts(32, 60)
    other = [make_request(str(i), p, seed=1000 + i, max_tokens=24, logprobs=2) for i, p in enumerate(prompts)]
    results = compute(tiny_gpt2, other)
    assert sum(results[i] == solo[i] for i in solo) == 0


def test_preempted_equals_undisturbed(tiny_gpt2: Path, solo: dict[str, Result]) -> None:
    engine = make_engine(tiny_gpt2, num_blocks=16, block_size=8, enable_prefix_caching=False)
    outputs = run(engine, mixed_requests())
    assert engine.stats.num_preemptions > 5
    assert {i: result(o) for i, o in outputs.items()} == solo


def test_prefix_cached_equals_cold(tiny_gpt2: Path, solo: dict[str, Result]) -> None:
    engine = make_engine(tiny_gpt2, block_size=4)
    run(engine, mixed_requests())
    warm = run(engine, mixed_requests())
    assert {i: result(o) for i, o in warm.items()} == solo
    assert sum(outputs[0].num_cached_tokens for outputs in warm.values()) > 500


@pytest.mark.parametrize("num_generated", [1, 7, 23])
def test_taken_up_again_elsewhere_equals_undisturbed(
    tiny_gpt2: Path, solo: dict[str, Result], num_generated: int
) -> None:
    begun = [replace(r, generated_token_ids=tuple(solo[r.request_id][0][:num_generated])) for r in mixed_requests()]
    rest = {i: (tokens[num_generated:], logprobs[num_generated:]) for i, (tokens, logprobs) in solo.items()}
    assert compute(tiny_gpt2, begun) == rest


def test_the_logprobs_of_a_prompt_come_once_whoever_takes_the_request_up_again(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2)
    request = make_request("p", [5, 6, 7], max_tokens=4, prompt_logprobs=1)
    outputs = run(engine, [request])["p"]
    begun = replace(request, generated_token_ids=tuple(token_ids(outputs)[:2]))
    generated = [output for output in outputs if output.token_ids]
    assert run(engine, [begun])["p"] == [replace(output, num_cached_tokens=0) for output in generated[2:]]


def test_how_long_a_request_waited_comes_with_its_first_tokens_alone(tiny_gpt2: Path) -> None:
    repeated = make_request("p", [1, 2, 3, 4] * 5, max_tokens=6)
    for options in ({}, {"speculative_ngram": 3}):
        outputs = run(make_engine(tiny_gpt2, **options), [repeated, make_request("q", [5, 6], max_tokens=4)])
        for first, *others in outputs.values():
            assert first.waits is not None
            assert all(wait >= 0 for wait in first.waits)
            assert [output.waits for output in others] == [None] * len(others)
    begun = replace(repeated, generated_token_ids=tuple(token_ids(outputs["p"])[:2]))
    assert [output.waits for output in run(make_engine(tiny_gpt2), [begun])["p"]] == [None] * 4, "of another engine"


def test_cached_equals_uncached(tiny_gpt2: Path) -> None:
    """Decoding over the KV cache gives what computing every prefix anew gives."""
    request = make_request("cached", [5, 6, 7], max_tokens=20, temperature=0.9, logprobs=3, seed=4)
    tokens, logprobs = compute(tiny_gpt2, [request])["cached"]
    engine = make_engine(tiny_gpt2, enable_prefix_caching=False)
    for i in range(20):
        anew = make_request(str(i), [5, 6, 7, *tokens[:i]], max_tokens=1, temperature=0.9, logprobs=3, seed=4)
        assert result(run(engine, [anew])[str(i)]) == ([tokens[i]], [logprobs[i]])


def test_choices_of_one_prompt_share_its_blocks_and_differ(tiny_gpt2: Path) -> None:
    prompt = tuple(range(40))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine = make_engine(tiny_gpt2)
    choices = [Request(str(i), prompt, params, seed=9, choice_index=i) for i in range(4)]
    outputs = run(engine, choices)
    assert [outputs[str(i)][0].num_cached_tokens for i in range(4)] == [0, 32, 32, 32]
    alone = run(make_engine(tiny_gpt2), [choices[0]])
    assert token_ids(alone["0"]) == token_ids(outputs["0"])
    assert len({tuple(token_ids(outputs[str(i)])) for i in range(4)}) == 4


@pytest.mark.parametrize("chunk", [512, 7])
def test_prompt_logprobs_equal_those_of_generating_the_same_tokens(tiny_gpt2: Path, chunk: int) -> None:
    prompt = [3, 1, 4, 1, 5]
    generated = compute(tiny_gpt2, [make_request("g", prompt, max_tokens=30, temperature=0.0, logprobs=2)])["g"]
    engine = make_engine(tiny_gpt2, max_num_batched_tokens=chunk, max_num_seqs=7)
    whole = [*prompt, *generated[0]]
    for _ in range(2):  # the second time the prefix cache holds the prompt
        outputs = run(engine, [make_request("e", whole, max_tokens=2, prompt_logprobs=2)])["e"]
        entries = prompt_scores(outputs)
        assert entries[0] is None
        assert [entry.token_id for entry in entries if entry] == whole[1:]
        assert entries[len(prompt) :] == generated[1]
        assert [bool(output.token_ids) for output in outputs[-3:]] == [False, True, True]


@pytest.mark.parametrize("budget", [512, 50])
def test_prompt_logprobs_come_in_pieces_of_bounded_size_before_the_first_token(tiny_gpt2: Path, budget: int) -> None:
    engine = make_engine(tiny_gpt2, max_num_batched_tokens=budget, max_num_seqs=2)
    prompt = [i % 90 for i in range(2 * MAX_SCORES_PER_OUTPUT - 10)]
    requests = [make_request(name, prompt, max_tokens=3, prompt_logprobs=20) for name in "ab"]
    for outputs in run(engine, requests).values():
        sizes = [len(output.prompt_logprobs or ()) for output in outputs]
        assert sum(sizes) == len(prompt)
        assert max(sizes) <= MAX_SCORES_PER_OUTPUT
        scored = [output for output in outputs if output.prompt_logprobs]
        assert outputs[: len(scored)] == scored
        assert not any(output.token_ids for output in scored)


@pytest.mark.some(3)
@pytest.mark.parametrize("num_given", [0, 1, 7, 8, 40, 99, 100])
def test_the_prompt_logprobs_that_an_engine_gave_are_not_given_by_the_next(tiny_gpt2: Path, num_given: int) -> None:
    request = make_request("p", [i % 90 for i in range(100)], max_tokens=3, prompt_logprobs=1)
    whole = run(make_engine(tiny_gpt2), [request])["p"]
    begun = replace(request, num_scored_tokens=num_given)
    rest = run(make_engine(tiny_gpt2, max_num_batched_tokens=8, max_num_seqs=8), [begun])["p"]
    assert prompt_scores(rest) == prompt_scores(whole)[num_given:]
    assert token_ids(rest) == token_ids(whole)


def test_stop_token_ends_with_stop_and_the_limit_with_length(tiny_gpt2: Path) -> None:
    plain = run(make_engine(tiny_gpt2), [make_request("p", [1], max_tokens=10, temperature=0.0)])["p"]
    tokens = token_ids(plain)
    assert plain[-1].finish_reason is FinishReason.LENGTH
    stop = tokens[4]
    stopped = run(
        make_engine(tiny_gpt2), [make_request("s", [1], max_tokens=10, temperature=0.0, stop_token_ids=(stop,))]
    )["s"]
    assert token_ids(stopped) == tokens[: tokens.index(stop) + 1]
    assert (stopped[-1].finish_reason, stopped[-1].stop_token_id) == (FinishReason.STOP, stop)


def test_end_of_text_ends_unless_ignored(make_gpt2: MakeGPT2, tiny_gpt2: Path) -> None:
    tokens = token_ids(run(make_engine(tiny_gpt2), [make_request("p", [1], max_tokens=10, temperature=0.0)])["p"])
    folder = make_gpt2(eos_token_id=tokens[2])
    heeded = run(make_engine(folder), [make_request("h", [1], max_tokens=10, temperature=0.0, ignore_eos=False)])["h"]
    assert token_ids(heeded) == tokens[: tokens.index(tokens[2]) + 1]
    assert heeded[-1].finish_reason is FinishReason.STOP
    ignored = run(make_engine(folder), [make_request("i", [1], max_tokens=10, temperature=0.0)])["i"]
    assert token_ids(ignored) == tokens


def test_a_sequence_may_fill_the_whole_context(tiny_gpt2: Path) -> None:
    outputs = run(make_engine(tiny_gpt2), [make_request("f", [1] * 100, max_tokens=28, temperature=0.0)])["f"]
    assert len(token_ids(outputs)) == 28


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([96], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 128, {}, "prompt"),
        ([1] * 100, {"max_tokens": 29}, "max_tokens"),
        ([1], {"logit_bias": {96: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_a_request_the_model_cannot_compute_is_refused(
    tiny_gpt2: Path, prompt: list[int], params: dict[str, Any], param: str
) -> None:
    engine = make_engine(tiny_gpt2)
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(make_request("bad", prompt, **params))
    assert caught.value.param == param
    assert not engine.has_work


def test_aborted_requests_leave_nothing_behind(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2)
    for request in mixed_requests(8):
        engine.add(request)
    engine.step()
    for i in range(8):
        engine.abort(str(i))
    engine.abort("never there")
    assert not engine.has_work
    assert (engine.stats.num_running, engine.stats.num_waiting, engine.stats.num_used_blocks) == (0, 0, 0)
    assert engine.step() == []


def test_an_abort_while_a_step_runs_leaves_the_others_what_is_theirs(tiny_gpt2: Path) -> None:
    stays = make_request("stays", [3, 4], logprobs=1, max_tokens=5)
    alone = run(make_engine(tiny_gpt2), [stays])
    engine = make_engine(tiny_gpt2)
    launch = engine._runner.launch

    def abort_meanwhile(step: StepInput) -> Collect:
        collect = launch(step)
        engine.abort("goes")
        return collect

    engine._runner.launch = abort_meanwhile  # type: ignore[method-assign]
    goes = make_request("goes", [1, 2], logprobs=1, prompt_logprobs=1)

    assert run(engine, [goes, stays]) == {"goes": [], **alone}


def test_stats_count_tokens_and_hits(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2)
    assert engine.stats == EngineStats()
    for name in ("a", "b"):
        run(engine, [make_request(name, range(40), max_tokens=5)])
    stats = engine.stats
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (80, 10)
    assert stats.num_prefix_hit_tokens == 32
    assert stats.num_used_blocks == 0


Outcome = tuple[Result, list[Any]]


def outcome(outputs: list[TokenOutput]) -> Outcome:
    """Return everything a client learns, however it was cut into outputs."""
    last, failed = outputs[-1], outputs[-1].finish_reason is FinishReason.ERROR
    assert all(output.finish_reason is output.stop_token_id is None for output in outputs[:-1])
    assert all(output.token_ids or output.prompt_logprobs for output in outputs[: len(outputs) - failed])
    rest = [last.finish_reason, last.stop_token_id, last.error, prompt_scores(outputs)]
    return result(outputs), rest


class Oracle(Drafter):
    """A drafter that knows what will come, and says so, or never, or only for a while."""

    max_step_tokens = MAX_DRAFTING_STEP_TOKENS

    def __init__(self, truths: dict[str, list[int]], mood: str) -> None:
        self._truths, self._mood = truths, mood

    def may_draft(self, sequence: SequenceState) -> bool:
        return True

    def draft(self, sequence: SequenceState, max_tokens: int) -> tuple[int, ...]:
        start = sequence.num_generated
        truth = self._truths[sequence.request.request_id][start:]
        if self._mood == "the truth":
            return tuple(truth[:max_tokens])
        if self._mood == "the truth for a while":
            return (*truth[: (start * 7) % 5], 1, 0, 1, 0, 1, 0)[:max_tokens]
        return tuple((token + 1) % 96 for token in truth)[:max_tokens]

    def forget(self, sequence: SequenceState) -> None:
        pass


@pytest.fixture
def demanding_requests(solo: dict[str, Result]) -> list[Request]:
    """The mixed requests and some that end in every way, one in the middle of its prompt's logprobs."""
    by_stop = [
        replace(
            r, request_id=f"stop {r.request_id}", params=replace(r.params, stop_token_ids=(solo[r.request_id][0][9],))
        )
        for r in mixed_requests(8)
    ]
    by_context = make_request("context", [1] * 100, max_tokens=28, temperature=0.0, logprobs=0)
    repetitive = make_request("penalty", [1, 2, 3] * 9, max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.5)
    with_prompt = make_request("prompt", [1, 2, 3] * 9, max_tokens=3, prompt_logprobs=2)
    return [*mixed_requests(), *by_stop, by_context, repetitive, with_prompt]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 3, "max_num_batched_tokens": 7}, pytest.param({"max_num_seqs": 4}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("mood", ["the truth", "the truth for a while", "never the truth"])
def test_a_drafter_changes_nothing_whatever_it_guesses(
    tiny_gpt2: Path,
    demanding_requests: list[Request],
    mood: str,
    options: dict[str, Any],
) -> None:
    plain = run(make_engine(tiny_gpt2), demanding_requests)
    oracle = Oracle({i: token_ids(outputs) for i, outputs in plain.items()}, mood)
    drafting = Engine(make_config(tiny_gpt2, block_size=4, **options), drafter=oracle)
    outputs = run(drafting, demanding_requests)
    assert {i: outcome(o) for i, o in outputs.items()} == {i: outcome(o) for i, o in plain.items()}
    stats, num_tokens = drafting.stats, sum(len(token_ids(o)) for o in plain.values())
    assert stats.num_generated_tokens == num_tokens
    assert stats.num_draft_tokens > 150
    if mood == "the truth":
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        # Each accepted token saves an output, but for a stop that is the last of its draft.
        with_tokens = [output for found in outputs.values() for output in found if output.token_ids]
        assert len(with_tokens) <= num_tokens - stats.num_accepted_tokens + 8
    elif mood == "never the truth":
        assert stats.num_accepted_tokens == 0
    else:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_logits_that_are_not_finite_end_a_request_where_they_would_have_without_a_draft(
    make_gpt2: MakeGPT2, tmp_path: Path
) -> None:
    folder = make_gpt2()
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.wpe.weight"][20].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    requests = [make_request(str(i), [i] * (10 + i), seed=i, max_tokens=8 * i, logprobs=1) for i in range(1, 5)]
    plain = run(make_engine(tmp_path), requests)
    assert [o[-1].finish_reason for o in plain.values()] == [FinishReason.LENGTH, *[FinishReason.ERROR] * 3]
    oracle = Oracle({i: [*token_ids(outputs), 0, 0, 0] for i, outputs in plain.items()}, "the truth")
    drafting = Engine(make_config(tmp_path), drafter=oracle)
    assert {i: outcome(o) for i, o in run(drafting, requests).items()} == {i: outcome(o) for i, o in plain.items()}
    assert drafting.stats.num_accepted_tokens > 10
    assert drafting.stats.num_used_blocks == 0


def test_a_prompt_whose_scores_are_not_finite_is_shared_with_nobody(make_gpt2: MakeGPT2, tmp_path: Path) -> None:
    folder = make_gpt2()
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.wpe.weight"][20].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    engine = make_engine(tmp_path)
    outputs = run(engine, [make_request("a", range(40), max_tokens=1, prompt_logprobs=0)])["a"]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert engine.stats.num_cached_blocks == 0
    run(engine, [make_request("b", range(17), max_tokens=1)])
    assert engine.stats.num_cached_blocks == 1, "it would have been"


class FailingRunner:
    """A ModelRunner that raises for the batches chosen, given the number of the run and the batch."""

    def __init__(self, runner: ModelRunner, error: BaseException, fails: Fails) -> None:
        self._runner, self._error, self._fails, self.num_runs = runner, error, fails, 0
        self.info = runner.info

    def launch(self, step: StepInput) -> Collect:
        self.num_runs += 1
        if self._fails(self.num_runs, step.batch if isinstance(step, KnownStep) else ScheduledBatch(())):
            raise self._error
        return self._runner.launch(step)


@pytest.fixture
def make_failing(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Make an engine whose runs fail when `fails` says so; the first run is the engine's warm-up."""

    know_steps(monkeypatch)

    def make(error: BaseException, fails: Fails, **options: Any) -> Engine:
        config = make_config(tiny_gpt2, **options)
        return Engine(config, runner=FailingRunner(ModelRunner(config), error, fails))

    return make


def long_request(name: str) -> Request:
    return make_request(name, range(40), max_tokens=5, temperature=0.0, logprobs=1)


def test_steps_that_fail_now_and_then_change_no_result(
    solo: dict[str, Result], make_failing: Callable[..., Engine]
) -> None:
    failing = make_failing(MemoryError("told to fail"), lambda number, _: number % 7 == 2)
    outputs = run(failing, mixed_requests())
    assert {i: result(o) for i, o in outputs.items()} == solo
    assert failing.stats.num_used_blocks == 0


def test_steps_that_fail_within_a_prompt_give_each_of_its_logprobs_once(
    tiny_gpt2: Path, make_failing: Callable[..., Engine]
) -> None:
    requests = [make_request(str(i), range(i, 90), max_tokens=3, prompt_logprobs=1) for i in range(4)]
    undisturbed = run(make_engine(tiny_gpt2), requests)
    for options in ({"max_num_batched_tokens": 16, "max_num_seqs": 16}, {}):
        failing = make_failing(MemoryError("told to fail"), lambda number, _: number in (4, 9), **options)
        assert {i: outcome(outputs) for i, outputs in run(failing, requests).items()} == {
            i: outcome(outputs) for i, outputs in undisturbed.items()
        }


def test_batches_too_large_for_the_memory_change_no_result(
    solo: dict[str, Result], make_failing: Callable[..., Engine]
) -> None:
    failing = make_failing(MemoryError("told to fail"), lambda _, batch: len(batch.items) > 3)
    requests = mixed_requests()[:12]
    assert {i: result(o) for i, o in run(failing, requests).items()} == {
        r.request_id: solo[r.request_id] for r in requests
    }


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_request_that_makes_every_step_fail_fails_alone(
    solo: dict[str, Result], make_failing: Callable[..., Engine], when: str
) -> None:
    def fails(_: int, batch: ScheduledBatch) -> bool:
        return any(
            item.sequence.request.request_id == "7" and (when == "at once" or item.sequence.num_generated >= 3)
            for item in batch.items
        )

    failing = make_failing(ValueError("told to fail"), fails)
    outputs = run(failing, mixed_requests())
    poison = outputs.pop("7")
    assert poison[-1].finish_reason is FinishReason.ERROR
    assert poison[-1].error == "the step that computed this request failed: told to fail"
    assert token_ids(poison) == solo["7"][0][: 0 if when == "at once" else 3]
    assert {i: result(o) for i, o in outputs.items()} == {i: r for i, r in solo.items() if i != "7"}
    assert failing.stats.num_used_blocks == 0


def test_an_engine_that_can_compute_nothing_any_more_raises_and_blames_nobody(
    make_failing: Callable[..., Engine],
) -> None:
    failing = make_failing(MemoryError("broken"), lambda number, _: number > 1)
    failing.add(long_request("innocent"))
    assert failing.step() == []
    assert failing.step() == []
    with pytest.raises(MemoryError, match="broken"):
        failing.step()


def test_a_step_that_was_broken_off_leaves_no_block_to_be_found(
    tiny_gpt2: Path, make_failing: Callable[..., Engine]
) -> None:
    interrupted = make_failing(KeyboardInterrupt(), lambda number, _: number == 2)
    request = long_request("broken off")
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, [request])
    interrupted.abort(request.request_id)
    after = run(interrupted, [long_request("after")])["after"]
    assert after[0].num_cached_tokens == 0
    assert result(after) == result(run(make_engine(tiny_gpt2), [long_request("after")])["after"])


def test_a_model_that_cannot_decode_is_never_ready(make_gpt2: MakeGPT2, tmp_path: Path) -> None:
    folder = make_gpt2()
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.bias"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(EngineStartError, match="not finite"):
        make_engine(tmp_path)


def test_a_request_that_is_not_admitted_in_time_ends_and_the_others_do_not(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2, max_num_seqs=1, max_queue_time_s=1e-9)
    outputs = run(engine, [make_request(name, [1, 2], max_tokens=3, prompt_logprobs=0) for name in "ab"])
    assert len(token_ids(outputs["a"])) == 3
    assert outputs["b"] == [
        TokenOutput(
            "b",
            (),
            finish_reason=FinishReason.QUEUE_TIMEOUT,
            error="the request was not admitted within 1e-09 s",
        )
    ]
    assert engine.stats.num_waiting == 0


def test_the_map_shows_a_shared_prefix_and_what_is_cached_after_it(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2, num_blocks=8, block_size=16, max_model_len=64)
    assert engine.draw_blocks().cells == "." * 8
    prompt = list(range(20))
    for name, last in (("a", 1), ("b", 2)):
        engine.add(make_request(name, [*prompt, last], max_tokens=3))
    engine.step()
    assert sorted(engine.draw_blocks().cells) == sorted("2" + "11" + "." * 5), "the first block is shared"
    while engine.has_work:
        engine.step()
    assert sorted(engine.draw_blocks().cells) == sorted("c" + "." * 7)

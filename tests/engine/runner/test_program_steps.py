"""Steps that torch has no part in: the same answers as with tensors, and no call of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gptserve.engine.backends.cpu import decoder, native
from gptserve.engine.backends.cpu.draw import choose
from gptserve.engine.engine import Engine
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.request import Request, TokenLogprobs
from gptserve.engine.runner.program_steps import ProgramSteps
from gptserve.engine.scheduling.sequence import ScheduledSequence, SequenceState
from tests.engine.batches import step_of
from tests.engine.runs import make_engine, make_request, ragged_prompts, run, token_ids
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the library is not built")

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_p": 0.9, "logprobs": 0},
    {"top_k": 10**30, "min_p": 0.1},
    {"temperature": 0.0, "logprobs": 3},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 2},
    {"frequency_penalty": 0.5, "logit_bias": {5: 4.0, 7: -100.0}, "min_tokens": 3},
    {"allowed_token_ids": (3, 4, 5, 6), "bad_words": ((4, 5),), "temperature": 1.5},
    {"prompt_logprobs": 2},
]
LOADS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "parts of prompts": {"max_num_batched_tokens": 9, "max_num_seqs": 7, "block_size": 4},
    "preempted": {"num_blocks": 16, "block_size": 4, "max_model_len": 64},
    "bf16": {"dtype": "bfloat16", "max_num_seqs": 5},
    "drafts": {"speculative_ngram": 2, "max_num_seqs": 4},
}


def requests() -> list[Request]:
    return [
        make_request(str(i), prompt, seed=i, max_tokens=5 + i % 9, **KINDS[i % len(KINDS)])
        for i, prompt in enumerate(ragged_prompts(2 * len(KINDS), 40))
    ]


def answers(engine: Engine, some: Sequence[Request]) -> list[tuple[list[int], list[TokenLogprobs], Any]]:
    found = run(engine, some).values()
    scores = [[entry for output in its for entry in output.prompt_logprobs or ()] for its in found]
    return [
        (token_ids(its), [entry for output in its for entry in output.logprobs], (score, its[-1].finish_reason))
        for its, score in zip(found, scores, strict=True)
    ]


@pytest.mark.some(2)
@pytest.mark.parametrize("load", LOADS)
def test_every_answer_has_the_bits_that_tensors_give(
    load: str, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_tensors, by_arrays = (make_engine(tiny_gpt2, **LOADS[load]) for _ in range(2))
    by_tensors._runner.choose = choose
    num_steps, compute = 0, ProgramSteps.compute

    def counting(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return compute(*arguments)

    monkeypatch.setattr(ProgramSteps, "compute", counting)
    expected = answers(by_tensors, requests())
    assert num_steps == 0
    assert answers(by_arrays, requests()) == expected
    assert num_steps == by_arrays.stats.num_steps
    assert by_arrays.stats.num_preemptions > 0 or load != "preempted"
    assert by_arrays.stats.num_draft_tokens > 0 or load != "drafts"


def test_a_grammar_allows_what_it_does_with_tensors(storyteller: Path) -> None:
    by_tensors, by_arrays = (make_engine(storyteller, speculative_ngram=2) for _ in range(2))
    by_tensors._runner.choose = choose
    some = [
        make_request(str(i), [i + 5] * 9, seed=i, max_tokens=30, ignore_eos=False, **grammar, logprobs=1)
        for i, grammar in enumerate(
            [{"grammar": Grammar("regex", "(ab|cd){9}")}, {}, {"grammar": Grammar("regex", "a*")}]
        )
    ]
    expected = answers(by_tensors, some)
    assert answers(by_arrays, some) == expected
    assert by_arrays.stats.num_draft_tokens > 0
    some[0] = replace(some[0], params=replace(some[0].params, grammar=None))
    assert answers(by_arrays, some)[0] != expected[0]


class NoTorch(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "prompt_logprobs" not in kind], ids=str)
def test_a_step_calls_nothing_of_torch(kind: dict[str, Any], tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2)
    engine.add(make_request("a", range(1, 21), max_tokens=20, **{"min_tokens": 0, **kind}))
    engine.step()  # whose buffers grow
    with NoTorch() as seen:
        for _ in range(8):  # up to 28 tokens, for which the scratch is large enough
            engine.step()
        assert not seen.called
        torch.zeros(1)
        engine._runner.choose = choose
        engine.step()
    assert {"zeros", "data_ptr"} <= set(seen.called), "or it sees nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_soft_cap_has_the_bits_of_its_formula(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sampled tokens, and of those of a prompt."""
    write_model(tmp_path, *SHAPES["Gemma 2, past its window"])
    request = make_request("a", range(1, 21), max_tokens=1, temperature=0.0, logprobs=3, prompt_logprobs=3)
    capped = answers(make_engine(tmp_path, dtype=dtype), [request])
    before, num_threads = list[torch.Tensor](), torch.get_num_threads()

    @torch.inference_mode()
    def by_formula(logits: torch.Tensor, cap: float) -> None:
        before.append(logits.clone())
        logits.copy_(cap * (logits / cap).tanh())

    monkeypatch.setattr(decoder, "_cap", by_formula)
    engine = make_engine(tmp_path, dtype=dtype)
    before.clear()
    assert answers(engine, [request]) == capped
    assert [len(logits) for logits in before] == [1, 19]
    assert torch.get_num_threads() == num_threads
    monkeypatch.setattr(decoder, "_cap", lambda logits, cap: None)
    assert answers(make_engine(tmp_path, dtype=dtype), [request]) != capped


def test_a_foreseen_token_is_the_one_that_was_chosen(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2)
    request = make_request("a", [1, 2, 3], max_tokens=4, temperature=0.0)
    tokens = token_ids(run(engine, [request])["a"])
    sequence = SequenceState(request, 0, [1, 2, 3], block_ids=[0])
    runner = engine._runner
    first = runner.launch(step_of(ScheduledSequence(sequence, 3)))()
    sequence.token_ids.append(~0)
    sequence.num_computed = 3
    foreseen = step_of(ScheduledSequence(sequence, 1))
    second = runner.launch(foreseen)()
    assert [result.sampled.token_ids[0] for result in (first, second)] == tokens[:2]
    assert tokens[0] != tokens[1], "or the test sees nothing"


def test_after_a_step_that_lacked_memory_the_next_one_has_its_buffers(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever allocation failed: the buffers that it was to replace are gone."""
    long = make_request("long", [i % 90 for i in range(120)], max_tokens=2)
    several = [make_request(str(i), [i] * 3, max_tokens=3, logprobs=1) for i in range(4)]
    expected, empty = answers(make_engine(tiny_gpt2), several), torch.empty
    num_allocations = failing = 0

    def allocate(*sizes: Any, **options: Any) -> torch.Tensor:
        nonlocal num_allocations
        if sizes[0] != 0:
            num_allocations += 1
            if num_allocations == failing:
                raise MemoryError
        return empty(*sizes, **options)

    for failing in range(1, 30):
        engine, num_allocations = make_engine(tiny_gpt2), 0
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", allocate)
            run(engine, [long])
        assert answers(engine, several) == expected
        if num_allocations < failing:
            break
    assert 8 < failing < 29, "the buffers of the rows, the scratch of attention and the logits"

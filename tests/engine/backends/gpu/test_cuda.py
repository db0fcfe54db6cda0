"""The same engine on a CUDA device: parity with transformers, and no token lost or repeated under load."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest
import torch

from gptserve.engine.backends.gpu import attention as triton_paged
from gptserve.engine.backends.gpu.attention import TritonAttention
from gptserve.engine.backends.reference.adjustments import adjusted
from gptserve.engine.model.linear import DenseLinear
from gptserve.engine.request import FinishReason
from tests.engine.runs import make_engine, make_request, ragged_prompts, run, token_ids
from tests.engine.sampling.test_adjustments import choices_at, random_batch
from tests.engine.test_exactness import AXES, STORYTELLER, numbers, requests, reseeded, results
from tests.parity.models import pack_experts, write_model
from tests.parity.shapes import SHAPES, WITH_STATES

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FAST = "triton"
OF_GPUS = [name for name in SHAPES if name not in WITH_STATES]

P = ParamSpec("P")
R = TypeVar("R")


def in_its_own_process(compute: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Return what it computes; a process of its own is for engines with batch_invariant.

    cuBLAS reads its variables once a process, and other tests are not to have the flags.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(compute, *arguments, **options).result()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return gptserve's own warnings: transformers has some about configurations that it writes."""
    return [
        record.message for record in caplog.records if record.levelno >= logging.WARNING and "gptserve" in record.name
    ]


def test_greedy_ids_in_fp32_equal_those_of_transformers(tiny_gpt2: Path) -> None:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(tiny_gpt2, dtype=torch.float32, attn_implementation="eager").cuda().eval()
    prompts = ragged_prompts(16, 60)
    requests = [make_request(str(i), p, max_tokens=64, temperature=0.0) for i, p in enumerate(prompts)]
    outputs = run(make_engine(tiny_gpt2, device=DEVICE), requests)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device="cuda")
        with torch.no_grad():
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0
            )
        assert token_ids(outputs[str(i)]) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_request_gets_its_tokens_under_preemption(tiny_gpt2: Path, dtype: str) -> None:
    requests = [
        make_request(str(i), p, seed=i, max_tokens=30, logprobs=2, temperature=0.5 * (i % 3), top_p=0.9)
        for i, p in enumerate(ragged_prompts(32, 60))
    ]
    engine = make_engine(tiny_gpt2, device=DEVICE, dtype=dtype, num_blocks=24)
    outputs = run(engine, requests)
    assert engine.stats.num_preemptions > 0
    for request in requests:
        assert len(token_ids(outputs[request.request_id])) == 30
        assert outputs[request.request_id][-1].finish_reason is FinishReason.LENGTH


def test_no_independence_of_the_batch_is_promised_unasked(tiny_gpt2: Path) -> None:
    info = make_engine(tiny_gpt2, device=DEVICE).info
    assert not info.batch_invariant
    assert info.fingerprint != make_engine(tiny_gpt2).info.fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", ["GPT-2", "Llama", "storyteller"])
def test_batch_invariant_requests_have_the_bits_that_they_have_alone(
    shape: str, dtype: str, storyteller: Path, tmp_path: Path
) -> None:
    folder = storyteller
    if shape in SHAPES:
        write_model(folder := tmp_path, *SHAPES[shape])
    alone, together = in_its_own_process(alone_and_together, folder, dtype)
    assert alone == together


def alone_and_together(folder: Path, dtype: str) -> list[dict[str, Any]]:
    """Return tokens and logprobs of requests computed one by one, and of the same all at once in chunks."""
    options: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 40, "kv_cache_bytes": 2**27}
    engine = make_engine(folder, device=DEVICE, dtype=dtype, batch_invariant=True, **options)
    assert engine.info.batch_invariant
    requests = [
        make_request(str(i), p, seed=i, max_tokens=30, logprobs=3, temperature=0.5 * (i % 3))
        for i, p in enumerate(ragged_prompts(40, 60, vocab_size=90))
    ]
    runs = [{k: v for request in requests for k, v in run(engine, [request]).items()}, run(engine, requests)]
    return [
        {k: [(output.token_ids, output.logprobs) for output in outputs] for k, outputs in its.items()} for its in runs
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # int8 is computed on a CPU only
def test_batch_invariant_requests_are_the_same_along_every_axis(dtype: str) -> None:
    assert in_its_own_process(num_differing, dtype) == dict.fromkeys(AXES, 0)


def num_differing(dtype: str) -> dict[str, int]:
    """Return, for each axis, how many requests differ from the same ones alone. With other seeds most must."""
    options: dict[str, Any] = {"device": DEVICE, "batch_invariant": True, "kv_cache_bytes": 2**27, **numbers(dtype)}
    engine = make_engine(STORYTELLER, **options, enable_prefix_caching=False)
    alone = {i: result for request in requests() for i, result in results(engine, (request,)).items()}
    others = results(engine, reseeded(len(alone)))
    assert sum(alone[i] != other for i, other in others.items()) > len(others) // 2
    found = {}
    for name, axis in AXES.items():
        its = results(make_engine(STORYTELLER, **options | axis), requests())
        found[name] = sum(its[i] != alone[i] for i in alone)
    return found


def test_the_storyteller_ends_its_story(storyteller: Path) -> None:
    engine = make_engine(storyteller, device=DEVICE, dtype="bfloat16", kv_cache_bytes=2**27)
    outputs = run(engine, [make_request("s", [0], max_tokens=500, temperature=0.8, ignore_eos=False)])["s"]
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_a_prompt_is_found_in_the_prefix_cache_and_an_abort_frees_its_blocks(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2, device=DEVICE)
    cold = run(engine, [make_request("cold", range(40), max_tokens=8, temperature=0.0)])["cold"]
    warm = run(engine, [make_request("warm", range(40), max_tokens=8, temperature=0.0)])["warm"]
    assert warm[0].num_cached_tokens == 32
    assert token_ids(warm) == token_ids(cold)
    engine.add(make_request("aborted", range(40), max_tokens=8))
    engine.step()
    engine.abort("aborted")
    assert engine.stats.num_used_blocks == 0


def prompt_logprobs(folder: Path, **options: Any) -> torch.Tensor:
    """Return the logprob of every prompt token but the first, for ragged prompts that advance in chunks."""
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": False, "enforce_eager": True} | options
    engine = make_engine(folder, **options)
    requests = [
        make_request(str(i), prompt, max_tokens=1, prompt_logprobs=0)
        for i, prompt in enumerate(ragged_prompts(5, 60, vocab_size=90))
    ]
    outputs = [output for its in run(engine, requests).values() for output in its]
    entries = [entry for output in outputs for entry in output.prompt_logprobs or () if entry is not None]
    assert len(entries) > 100
    return torch.tensor([entry.logprob for entry in entries], dtype=torch.float64)


PIECE = 64
"""Keys of a piece of attention: so few that contexts of tiny models have two, which are merged."""


class SmallPieces(TritonAttention):
    def __init__(self, *, exact: bool) -> None:
        super().__init__(PIECE, exact=exact)


def decoded(folder: Path, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Return the greedy ids of prompts, some of which come to a second piece, and logprobs: of each and the best two.

    A penalty has half of them say something else at each step.
    """
    engine = make_engine(folder, max_num_seqs=4, enable_prefix_caching=False, **options)
    requests = [
        make_request(
            str(i),
            [(5 * i + 3 * j) % 90 for j in range(length)],
            **{"max_tokens": 16, "logprobs": 2, "temperature": 0.0, "presence_penalty": 2.0 * (i % 2)},
        )
        for i, length in enumerate([PIECE - 4, PIECE - 7, 9, 1])
    ]
    outputs = run(engine, requests)
    entries = [entry for its in outputs.values() for output in its for entry in output.logprobs]
    logprobs = [(entry.logprob, *(logprob for _, logprob in entry.top)) for entry in entries]
    return [token_ids(its) for its in outputs.values()], torch.tensor(logprobs, dtype=torch.float64)


@pytest.mark.parametrize("name", OF_GPUS)
def test_every_family_reads_prompts_as_exactly_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    """In fp32; and in bf16 the kernel is as close to that as the reference."""
    write_model(tmp_path, *SHAPES[name])
    exact = prompt_logprobs(tmp_path)
    in_fp32 = prompt_logprobs(tmp_path, device=DEVICE, attention_backend=FAST)
    assert (in_fp32 - exact).abs().max() < 1e-4

    options = {"device": DEVICE, "dtype": "bfloat16"}
    error = (prompt_logprobs(tmp_path, attention_backend=FAST, **options) - exact).abs().mean()
    of_reference = (prompt_logprobs(tmp_path, attention_backend="reference", **options) - exact).abs().mean()
    assert 0 < error < 1.5 * of_reference


@pytest.mark.parametrize("name", OF_GPUS)
def test_every_family_decodes_as_exactly_as_on_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, by graphs, over contexts of one piece and of two."""
    write_model(tmp_path, *SHAPES[name])
    expected_ids, exact = decoded(tmp_path)
    monkeypatch.setattr(triton_paged, "TritonAttention", SmallPieces)
    ids, in_fp32 = decoded(tmp_path, device=DEVICE, attention_backend=FAST)
    assert ids == expected_ids
    assert (in_fp32 - exact).abs().max() < 1e-4


def test_experts_stay_in_mxfp4_without_a_word_and_are_as_exact_as_unpacked_on_a_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, *SHAPES["gpt-oss, past its window"])
    pack_experts(tmp_path)
    exact = prompt_logprobs(tmp_path)
    options = {"enforce_eager": False, "max_num_seqs": 4}
    in_fp32 = prompt_logprobs(tmp_path, device=DEVICE, attention_backend=FAST, **options)
    assert not warnings_of(caplog)
    assert (in_fp32 - exact).abs().max() < 1e-4


@pytest.mark.gpu_alone
def test_the_longest_prompts_in_a_full_batch_do_not_run_out_of_memory(
    storyteller: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a card of which little is left: the cache takes all but what was measured for the largest step."""
    free, total = torch.cuda.mem_get_info()
    ballast = torch.empty(free - total // 50 - 4 * 2**30, dtype=torch.uint8, device=DEVICE)
    options: dict[str, Any] = {"gpu_memory_utilization": 0.98, "kv_cache_bytes": None, "max_num_seqs": 512}
    engine = make_engine(storyteller, device=DEVICE, max_num_batched_tokens=8192, **options)
    assert torch.cuda.mem_get_info()[0] < total // 50 + 3 * 2**30
    heavy: dict[str, Any] = {"top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "logprobs": 20}
    prompts = [[i] * (engine.info.max_model_len - 2) for i in range(512)]
    requests = [
        make_request(str(i), prompt, seed=i, max_tokens=2, prompt_logprobs=20 if i % 32 == 0 else None, **heavy)
        for i, prompt in enumerate(prompts)
    ]
    outputs = run(engine, requests)
    assert {its[-1].finish_reason for its in outputs.values()} == {FinishReason.LENGTH}
    assert not warnings_of(caplog)
    del ballast


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OF_GPUS)
def test_graphs_give_the_bits_of_kernels_started_one_by_one(
    name: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In batches that a graph does not pad, as products may have other bits with more rows."""
    write_model(tmp_path, *SHAPES[name])
    options = {"device": DEVICE, "dtype": dtype, "max_num_seqs": 4, "enable_prefix_caching": False}
    requests = [
        make_request(str(i), range(i, i + 9), seed=i, max_tokens=30, logprobs=2, temperature=i % 2) for i in range(4)
    ]
    graphed, plain = make_engine(tmp_path, **options), make_engine(tmp_path, enforce_eager=True, **options)
    assert plain._runner.graphs is None
    assert graphed._runner.graphs is not None
    assert not warnings_of(caplog)
    found, expected = (
        {
            i: (token_ids(outputs), [entry for output in outputs for entry in output.logprobs])
            for i, outputs in run(engine, requests).items()
        }
        for engine in (graphed, plain)
    )
    assert found == expected


def test_graphs_under_preemption_and_drafts_give_every_request_its_tokens(storyteller: Path) -> None:
    requests = [
        make_request(str(i), p, seed=i, max_tokens=40, temperature=0.5 * (i % 3), repetition_penalty=1.0 + i % 2 / 9)
        for i, p in enumerate(ragged_prompts(40, 60))
    ]
    options: dict[str, Any] = {"device": DEVICE, "max_num_seqs": 20, "num_blocks": 80, "max_model_len": 200}
    for speculative_ngram in (0, 2):
        engine = make_engine(storyteller, speculative_ngram=speculative_ngram, **options)
        assert engine._runner.graphs is not None
        assert {len(token_ids(outputs)) for outputs in run(engine, requests).values()} == {40}
        assert engine.stats.num_preemptions > 0


KINDS: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.2, "logprobs": 2}, {"frequency_penalty": 0.4}]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_overlapping_steps_give_the_bits_of_steps_one_after_the_other(storyteller: Path, enforce_eager: bool) -> None:
    """All requests at once and of different lengths: the batches are the same but for rows that are void."""
    found, expected, warnings = in_its_own_process(overlapping_and_not, storyteller, enforce_eager)
    assert found == expected
    assert not [message for message in warnings if not message.startswith("linear: calls of 64 rows")]


def overlapping_and_not(folder: Path, enforce_eager: bool) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return tokens and logprobs of requests with overlap, those without, and what the engines warn of."""
    warnings = list[logging.LogRecord]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = warnings.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    options = {"device": DEVICE, "max_num_seqs": 4, "enforce_eager": enforce_eager, "batch_invariant": True}
    requests = [
        make_request(str(i), p, seed=i, max_tokens=10 + 7 * i, temperature=i % 2, ignore_eos=False, **KINDS[i % 3])
        for i, p in enumerate(ragged_prompts(12, 60))
    ]
    found, expected = (
        {i: (token_ids(its), [output.logprobs for output in its]) for i, its in run(engine, requests).items()}
        for engine in (make_engine(folder, **options), make_engine(folder, overlap=False, **options))
    )
    return found, expected, [record.getMessage() for record in warnings]


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_steps_overlap(storyteller: Path, params: dict[str, Any]) -> None:
    engine = make_engine(storyteller, device=DEVICE)
    engine.add(make_request("a", [1, 2, 3], max_tokens=8, **params))
    assert [len(engine.step()) for _ in range(2)] == [1, 1]
    assert engine._steps._ahead is not None


@pytest.mark.parametrize("num_rows", [1, 32])
def test_logits_of_a_vocabulary_of_any_size_are_the_product_in_fp32(num_rows: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, weight = (
        torch.randn(size, 64, generator=generator, device=DEVICE, dtype=torch.bfloat16) for size in (num_rows, 50257)
    )
    head = DenseLinear(weight, None, out_dtype=torch.float32)
    logits, expected = head(x), x.float() @ weight.float().T
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert head.copied_rows is not None
    assert torch.equal(head.copied_rows, weight)


@pytest.mark.parametrize("seed", range(5))
def test_adjusted_logits_have_the_bits_that_they_have_on_a_cpu(seed: int) -> None:
    raw, positions = random_batch(seed)
    adjustments = [choice.adjustment for choice in choices_at(positions)]
    assert torch.equal(adjusted(raw.to(DEVICE), adjustments).cpu(), adjusted(raw, adjustments))


def test_the_kernels_of_sampling_choose_the_tokens_that_torch_does(storyteller: Path) -> None:
    """In batches that no graph pads, so that both have the same logits."""
    kinds: list[dict[str, Any]] = [
        *({"temperature": 0.0, "frequency_penalty": 0.6}, {"repetition_penalty": 1.2}, {"top_p": 0.9, "top_k": 40}),
        {"min_p": 0.02, "presence_penalty": 0.5, "logit_bias": {5: 2.0}, "allowed_token_ids": tuple(range(1000))},
    ]
    requests = [make_request(str(i), range(i, i + 9), seed=i, max_tokens=60, **kinds[i % 4]) for i in range(4)]
    options: dict[str, Any] = {"device": DEVICE, "max_num_seqs": 4, "enable_prefix_caching": False}
    graphed, eager, by_torch = (
        make_engine(storyteller, enforce_eager=eager, kv_cache_bytes=2**27, **options) for eager in (False, True, True)
    )
    assert graphed._runner.graphs is not None
    assert graphed._runner.graphs.choose is not None
    assert eager._runner.choose is not None
    by_torch._runner.choose = None
    found = [{i: token_ids(its) for i, its in run(engine, requests).items()} for engine in (graphed, eager, by_torch)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernel_is_taken_without_a_word(storyteller: Path, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    assert make_engine(storyteller, device=DEVICE, dtype=dtype, kv_cache_bytes=2**27).info.attention_backend == FAST
    assert not warnings_of(caplog)

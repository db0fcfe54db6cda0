"""The embedded model at its real lengths: tokens and logprobs, bit for bit, are those of a request run alone.

Every axis along which a server's load may differ is one row of AXES or a test; `pytest -rP` shows how many requests
were compared and that none differed. What must differ does: another seed, choice, type or order of sums.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.decoder import NativeDecoder
from gptserve.engine.engine import Engine
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.process.client import LoopClient
from gptserve.engine.process.factory import load_engine
from gptserve.engine.process.process_client import ProcessClient
from gptserve.engine.process.thread_client import ThreadClient
from gptserve.engine.request import Request, TokenLogprobs
from gptserve.engine.runner import runner
from gptserve.weights.source import resolve_model
from gptserve.weights.storyteller.recipe.generator import stories
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.engine.backends.cpu import onednn
from tests.engine.client_harness import LIMIT_S, started
from tests.engine.runs import make_config, make_engine, make_request, run, token_ids
from tests.exactness_table import PAGE, compare, contrast
from tests.weights.gguf.k_quants import q4_k_m
from tests.weights.gguf.written import write_gguf
from tests.weights.quantized.formats import FP8

Result = tuple[list[int], list[TokenLogprobs]]
STORYTELLER = Path(__file__).parents[2] / "weights" / "storyteller"
NUM_REQUESTS = 64
NUM_FIRST = 16
"""What the tests that are not slow compare."""
first_or_all = pytest.mark.parametrize("num", [NUM_FIRST, pytest.param(NUM_REQUESTS, marks=pytest.mark.slow)])
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.3},
]
AXES: dict[str, dict[str, Any]] = {
    "a batch of 64": {"max_num_seqs": 64},
    "batches of 3": {"max_num_seqs": 3},
    "a budget of 64 tokens": {"max_num_batched_tokens": 64},
    "a budget of 9 tokens": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "blocks of 8": {"block_size": 8},
    "blocks of 32": {"block_size": 32},
    "two threads": {"num_threads": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_blocks": 72, "max_num_seqs": 16, "enable_prefix_caching": False},
    "a prefix cache too small": {"num_blocks": 72, "max_num_seqs": 2},
    "drafts, one at a time": {"speculative_ngram": 2, "max_num_seqs": 1},
    "drafts, batches of 5": {"speculative_ngram": 4, "max_num_seqs": 5, "max_num_batched_tokens": 20},
    "drafts while preempted": {
        **{"speculative_ngram": 2, "max_num_seqs": 8},
        **{"num_blocks": 90, "block_size": 8, "max_model_len": 640},
    },
}
ALWAYS = {
    "float32": ("drafts while preempted",),
    "bfloat16": ("two threads", "drafts, one at a time"),
    "int8": ("a batch of 64",),
    "int4": ("a batch of 64",),
    "Q4_K_M": ("a batch of 64",),
    "int8 KV cache": ("drafts while preempted",),
    "FP8": ("a budget of 9 tokens",),
}
"""The axes of the tests that are not slow, by type of numbers."""
EAGER = ("eager float32", "eager bfloat16")
"""Types of numbers in an installation without a compiler."""
NUM_THREADED_EAGER = 8
NUM_FIRST_EAGER = 4
EAGER_AXES = (
    *("a batch of 64", "batches of 3", "a budget of 64 tokens", "a budget of 9 tokens"),
    *("two threads", "no prefix cache", "preempted"),
)
FP8_AXES = ("a batch of 64", "batches of 3", "a budget of 9 tokens", "preempted", "drafts while preempted")
"""Its numbers become those of bfloat16 while they load."""
AXES_OF = dict.fromkeys(EAGER, EAGER_AXES) | {"FP8": FP8_AXES}
PAIRS = [(axis, dtype) for axis in AXES for dtype in (*ALWAYS, *EAGER) if axis in AXES_OF.get(dtype, AXES)]


@functools.cache
def requests() -> tuple[Request, ...]:
    """Ragged prompts of 1 to some 600 tokens, the starts of one to three stories, greedy and sampled mixed."""
    tokenizer, rng, chosen = Tokenizer.open(STORYTELLER), random.Random(1), []
    for i in range(NUM_REQUESTS):
        ids = [token for story in stories("held_out", 3, first=3 * (i // 2)) for token in tokenizer.encode(story.text)]
        prompt = ids[: rng.choice([rng.randint(1, 40), rng.randint(41, 250), rng.randint(251, 600)])]
        chosen.append(make_request(str(i), prompt, seed=i, max_tokens=20, logprobs=3, **KINDS[i % len(KINDS)]))
    return tuple(chosen)


def results(engine: Engine, chosen: tuple[Request, ...]) -> dict[str, Result]:
    return {
        i: (token_ids(outputs), [entry for output in outputs for entry in output.logprobs])
        for i, outputs in run(engine, chosen).items()
    }


@functools.cache
def quantized() -> TemporaryDirectory[str]:
    """Return a folder with the model in GGUF's mix Q4_K_M."""
    folder = TemporaryDirectory()
    path = Path(folder.name)
    shutil.copy(STORYTELLER / "config.json", path)
    weights = {name: tensor.float() for name, tensor in load_file(STORYTELLER / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors")
    write_gguf(path, path / "model.gguf", q4_k_m)
    return folder


@functools.cache
def in_fp8() -> TemporaryDirectory[str]:
    """Return a folder with the model's linears in FP8, with a scale for each block of 32 outputs and 16 inputs."""
    folder = TemporaryDirectory()
    path = Path(folder.name)
    config = json.loads((STORYTELLER / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}), encoding="utf-8")
    weights = load_file(STORYTELLER / "model.safetensors")
    for name in [name for name in weights if re.search(r"\.c_(attn|proj|fc)\.weight$", name)]:
        blocks = weights[name].float().t().unflatten(0, (-1, 32)).unflatten(2, (-1, 16))
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        weights[name] = codes.flatten(2).flatten(0, 1).contiguous()
        weights[f"{name}_scale_inv"] = scales
    save_file(weights, path / "model.safetensors")
    return folder


def numbers(kind: str) -> dict[str, Any]:
    """Return the options of a type of numbers."""
    if kind in ("Q4_K_M", "FP8"):
        return {"dtype": "bfloat16"}
    if kind == "int8 KV cache":
        return {"dtype": "bfloat16", "kv_cache_dtype": "int8"}
    if kind in ("int8", "int4"):
        return {"dtype": "bfloat16", "quantization": kind}
    return {"dtype": kind.removeprefix("eager ")}


@pytest.fixture
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A type of numbers; if it is eager, no compiled library is found meanwhile."""
    cached = native.library, native.is_available, native.supported_variants
    is_eager = request.param in EAGER
    if request.param == "eager bfloat16" and not onednn.has_bf16:
        pytest.skip("oneDNN has no bf16 for this CPU")
    if is_eager:
        monkeypatch.setattr(native, "_load", lambda: None)
        for function in cached:
            function.cache_clear()
    yield request.param
    if is_eager:
        monkeypatch.undo()
        for function in cached:
            function.cache_clear()


def storyteller(dtype: str, **options: Any) -> Engine:
    """Return an engine that computes in a type of numbers, by what the type says."""
    folder = STORYTELLER
    if dtype == "Q4_K_M":
        folder = resolve_model(str(Path(quantized().name) / "model.gguf"))
    elif dtype == "FP8":
        folder = Path(in_fp8().name)
    engine = make_engine(folder, **numbers(dtype), **options)
    if dtype == "Q4_K_M":
        assert engine.info.product == "native_coded"
    if dtype in EAGER:
        assert (engine.info.product, engine.info.attention_backend) == ("onednn", "reference")
        assert not native.is_available()
    return engine


@functools.cache
def alone(backend: str, dtype: str, num_requests: int = NUM_REQUESTS) -> dict[str, Result]:
    engine = storyteller(dtype, attention_backend=backend, enable_prefix_caching=False)
    chosen = requests()[:num_requests]
    return {request.request_id: results(engine, (request,))[request.request_id] for request in chosen}


def num_compared(axis: str, dtype: str) -> int:
    """Return for how many requests an axis is compared: few with torch's threads, which wait long for each other."""
    return NUM_THREADED_EAGER if "threads" in axis and dtype in EAGER else NUM_REQUESTS


def reseeded(num: int) -> tuple[Request, ...]:
    """Return those of the first requests that are drawn, each with another seed; what is greedy would not change."""
    return tuple(replace(r, seed=r.seed + 1000) for r in requests()[:num] if not r.params.is_greedy)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("axis", "dtype"),
    [
        pytest.param(axis, dtype, marks=() if axis in always else pytest.mark.slow)
        for dtype, always in ALWAYS.items()
        for axis in AXES_OF.get(dtype, AXES)
    ],
)
def test_the_first_requests_alone_equal_those_under_any_load(
    axis: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "threads" in axis:  # left alone, steps of so small a model get one
        force_threads((2,), monkeypatch)
    engine = storyteller(dtype, **{"kv_cache_bytes": 2**27, **AXES[axis]})
    assert results(engine, requests()[:NUM_FIRST]) == alone("auto", dtype, NUM_FIRST)
    assert engine.stats.num_preemptions > 0 or "preempted" not in axis
    assert engine.stats.num_accepted_tokens > 0 or "drafts" not in axis


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EAGER, indirect=True)
def test_the_first_requests_alone_equal_those_in_small_steps_without_a_compiler(dtype: str) -> None:
    engine = storyteller(dtype, **AXES["a budget of 9 tokens"])
    assert results(engine, requests()[:NUM_FIRST_EAGER]) == alone("auto", dtype, NUM_FIRST_EAGER)


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "dtype"), PAIRS, indirect=["dtype"])
def test_alone_equals_under_any_load(axis: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_requests = num_compared(axis, dtype)
    expected = alone("auto", dtype, num_requests)
    if "threads" in axis:
        force_threads((2,), monkeypatch)
    engine = storyteller(dtype, **{"kv_cache_bytes": 2**27, **AXES[axis]})
    compare(f"{axis}, {dtype}", results(engine, requests()[:num_requests]), expected)
    if "preempted" in axis:
        assert engine.stats.num_preemptions > 5
    if "drafts" in axis:
        assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def force_threads(in_turn: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Give the steps these numbers of threads; return the set to which those that torch or the team has are added."""
    turns, seen = itertools.cycle(in_turn), set[int]()

    def seeing(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computing(*arguments: Any) -> Any:
            seen.add(native.num_threads() if native.is_available() else torch.get_num_threads())
            return compute(*arguments)

        return computing

    monkeypatch.setattr(runner, "num_step_threads", lambda work, **limits: next(turns))
    monkeypatch.setattr(Decoder, "step", seeing(Decoder.step))
    monkeypatch.setattr(NativeDecoder, "run", seeing(NativeDecoder.run))
    return seen


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
def test_threads_that_change_in_mid_sequence_change_no_bit(
    backend: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = tuple(replace(r, params=replace(r.params, max_tokens=6)) for r in requests()[:8])
    engine = make_engine(STORYTELLER, attention_backend=backend, dtype=dtype, num_threads=2)
    steady, before = results(engine, some), torch.get_num_threads()
    seen = force_threads((2, 1, 1), monkeypatch)
    engine = make_engine(STORYTELLER, attention_backend=backend, dtype=dtype, num_threads=2)
    assert results(engine, some) == steady
    assert seen == {1, 2}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("num", [6, pytest.param(NUM_REQUESTS, marks=pytest.mark.slow)])
def test_alone_equals_in_a_batch_with_the_reference_backend(num: int) -> None:
    engine = make_engine(STORYTELLER, attention_backend="reference", max_num_batched_tokens=64)
    found = results(engine, requests()[:num])
    compare("reference backend, a budget of 64 tokens", found, alone("reference", "float32", num))


@first_or_all
def test_alone_equals_with_a_warm_prefix_cache(num: int) -> None:
    engine = make_engine(STORYTELLER, kv_cache_bytes=2**27)
    results(engine, requests()[:num])
    warm = run(engine, requests()[:num])
    assert sum(outputs[0].num_cached_tokens for outputs in warm.values()) > 80 * num
    found = {i: (token_ids(o), [entry for output in o for entry in output.logprobs]) for i, o in warm.items()}
    compare("a warm prefix cache", found, alone("auto", "float32", num))


@first_or_all
def test_the_answer_to_one_is_the_first_of_four_choices(num: int) -> None:
    choices = [replace(r, request_id=f"{r.request_id}/{c}", choice_index=c) for r in requests()[:num] for c in range(4)]
    found = results(make_engine(STORYTELLER, kv_cache_bytes=2**27), tuple(choices))
    first = alone("auto", "float32", num)
    compare("the first of four choices", {i: found[f"{i}/0"] for i in first}, first)
    drawn = {r.request_id: first[r.request_id] for r in reseeded(num)}
    contrast("the last of four choices", {i: found[f"{i}/3"] for i in drawn}, drawn)


@pytest.mark.slow
@first_or_all
@pytest.mark.parametrize("client_type", [pytest.param(ProcessClient, marks=pytest.mark.slow), ThreadClient])
def test_alone_equals_in_an_engine_that_runs_elsewhere(client_type: type[LoopClient], num: int) -> None:
    client = client_type(functools.partial(load_engine, make_config(STORYTELLER, kv_cache_bytes=2**27)))
    others = tuple(replace(r, request_id=f"other {r.request_id}") for r in reseeded(num))
    found = asyncio.run(asyncio.wait_for(results_of_client(client, requests()[:num] + others), LIMIT_S))
    place = "process" if client_type is ProcessClient else "thread"
    expected = alone("auto", "float32", num)
    compare(f"an engine in a {place} of its own", {i: found[i] for i in expected}, expected)
    drawn = {r.request_id: expected[r.request_id] for r in reseeded(num)}
    contrast(f"another seed in a {place} of its own", {i: found[f"other {i}"] for i in drawn}, drawn)


async def results_of_client(client: LoopClient, chosen: tuple[Request, ...]) -> dict[str, Result]:
    found: dict[str, Result] = {request.request_id: ([], []) for request in chosen}
    async with started(client):
        async for outputs in client.submit(chosen):
            for output in outputs:
                tokens, logprobs = found[output.request_id]
                tokens += output.token_ids
                logprobs += output.logprobs
    return found


def test_the_page_has_every_axis_and_no_difference() -> None:
    rows = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    counts = {name: (int(compared), int(different)) for name, compared, different in rows}
    named = {f"{axis}, {dtype}" for axis, dtype in PAIRS}
    assert named | {"streamed, over HTTP", "an engine in a process of its own"} < counts.keys()
    assert all(counts[f"{axis}, {dtype}"] == (num_compared(axis, dtype), 0) for axis, dtype in PAIRS)
    assert all(different == 0 or different > compared // 2 for compared, different in counts.values())
    assert counts["another seed"][1] > 0


@pytest.mark.some(1)
@pytest.mark.parametrize("num", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_equals_with_drafts_that_nearly_always_hold(dtype: str, num: int) -> None:
    """A bias towards few tokens makes loops, which are guessed as such."""
    looping = tuple(
        replace(r, params=replace(r.params, max_tokens=60, logit_bias=dict.fromkeys(range(300, 302), 30.0)))
        for r in requests()[:num]
    )
    plain, drafting = (
        make_engine(STORYTELLER, kv_cache_bytes=2**27, dtype=dtype, max_num_seqs=2, speculative_ngram=longest)
        for longest in (0, 3)
    )
    compare(f"drafts of loops, {dtype}", results(drafting, looping), results(plain, looping))
    assert drafting.stats.num_accepted_tokens > 0.5 * drafting.stats.num_draft_tokens
    assert drafting.stats.num_steps < 0.5 * plain.stats.num_steps


@pytest.mark.slow
@first_or_all
def test_what_changes_numbers_is_seen(num: int) -> None:
    """The negative controls: another seed gives other samples, another order of sums other logprobs."""
    first = alone("auto", "float32", num)
    other_seed = results(make_engine(STORYTELLER, kv_cache_bytes=2**27), reseeded(num))
    contrast("another seed", other_seed, {i: first[i] for i in other_seed})
    if make_engine(STORYTELLER).info.attention_backend != "reference":
        contrast("another order of sums: the reference backend", alone("reference", "float32", num), first)
    contrast("another type of numbers: bfloat16", alone("auto", "bfloat16", num), first)

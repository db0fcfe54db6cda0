"""The same engine on a CUDA device: parity with transformers, and no token lost or repeated under load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptserve.engine.request import FinishReason
from tests.engine.runs import make_engine, make_request, ragged_prompts, run, token_ids

pytestmark = pytest.mark.gpu


def test_greedy_ids_in_fp32_equal_those_of_transformers(tiny_gpt2: Path) -> None:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(tiny_gpt2, dtype=torch.float32, attn_implementation="eager").cuda().eval()
    prompts = ragged_prompts(16, 60)
    requests = [make_request(str(i), p, max_tokens=64, temperature=0.0) for i, p in enumerate(prompts)]
    outputs = run(make_engine(tiny_gpt2, device="cuda"), requests)
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
    engine = make_engine(tiny_gpt2, device="cuda", dtype=dtype, num_blocks=24)
    outputs = run(engine, requests)
    assert engine.stats.num_preemptions > 0
    for request in requests:
        assert len(token_ids(outputs[request.request_id])) == 30
        assert outputs[request.request_id][-1].finish_reason is FinishReason.LENGTH


def test_no_independence_of_the_batch_is_promised(tiny_gpt2: Path) -> None:
    info = make_engine(tiny_gpt2, device="cuda").info
    assert not info.batch_invariant
    assert info.fingerprint != make_engine(tiny_gpt2).info.fingerprint


def test_the_storyteller_ends_its_story(storyteller: Path) -> None:
    engine = make_engine(storyteller, device="cuda", dtype="bfloat16", kv_cache_bytes=2**27)
    outputs = run(engine, [make_request("s", [0], max_tokens=500, temperature=0.8, ignore_eos=False)])["s"]
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_a_prompt_is_found_in_the_prefix_cache_and_an_abort_frees_its_blocks(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2, device="cuda")
    cold = run(engine, [make_request("cold", range(40), max_tokens=8, temperature=0.0)])["cold"]
    warm = run(engine, [make_request("warm", range(40), max_tokens=8, temperature=0.0)])["warm"]
    assert warm[0].num_cached_tokens == 32
    assert token_ids(warm) == token_ids(cold)
    engine.add(make_request("aborted", range(40), max_tokens=8))
    engine.step()
    engine.abort("aborted")
    assert engine.stats.num_used_blocks == 0

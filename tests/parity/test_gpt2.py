"""GPT-2 against transformers in fp32: the same logits, and the same greedy ids through every path of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import AttentionBackend
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.decoder import Decoder
from engine.kv_cache import KVCache
from engine.linear import MIN_ROWS
from engine.request import Request, SamplingParams
from tests.conftest import MakeGPT2
from tests.engine.runs import make_engine, ragged_prompts, run, token_ids
from tests.engine.steps import make_metadata, positions, shuffled_tables
from weights.checkpoint import Checkpoint
from weights.families import load_config

SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "one layer, one head": {"n_layer": 1, "n_head": 1, "n_embd": 16},
    "head size 24, wide ffn": {"n_layer": 3, "n_head": 2, "n_embd": 48, "n_inner": 200},
    "scaled by layer": {"n_layer": 4, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    "unscaled, relu": {"scale_attn_weights": False, "activation_function": "relu", "initializer_range": 0.1},
    "exact gelu, untied": {"activation_function": "gelu", "tie_word_embeddings": False, "vocab_size": 101},
    "odd eps": {"layer_norm_epsilon": 1e-3, "n_positions": 77},
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def folder(request: pytest.FixtureRequest, make_gpt2: MakeGPT2) -> Path:
    return make_gpt2(**request.param)


def greedy(prompts: list[list[int]], max_tokens: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [Request(str(i), tuple(prompt), sampling, seed=0) for i, prompt in enumerate(prompts)]


@contextmanager
def transformers_model(folder: Path) -> Iterator[Any]:
    from transformers import GPT2LMHeadModel

    with torch.no_grad():
        yield GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def paged_logits(
    folder: Path, prompts: list[list[int]], chunks: list[int], backend: AttentionBackend
) -> list[torch.Tensor]:
    """Return the logits [len(prompt), vocab] of each prompt, all prompts advancing together by these chunks."""
    config = load_config(folder)
    tensors = Checkpoint(folder, config).stream(dtype=torch.float32, device="cpu")
    decoder = Decoder(config, tensors, backend)
    longest, block_size = max(map(len, prompts)), 4
    num_blocks = len(prompts) * (longest // block_size + 1)
    tables = shuffled_tables([longest + 1] * len(prompts), block_size, num_blocks)
    cache = KVCache(config, num_blocks, block_size, torch.float32, torch.device("cpu"))
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = 0
    for chunk in chunks:
        live = [s for s, prompt in enumerate(prompts) if len(prompt) > done]
        kv_lens = [min(len(prompts[s]), done + chunk) for s in live]
        query_lens = [kv_len - done for kv_len in kv_lens]
        pad = max(0, MIN_ROWS - sum(query_lens))
        ids = [token for s, kv_len in zip(live, kv_lens, strict=True) for token in prompts[s][done:kv_len]]
        metadata = make_metadata(query_lens, kv_lens, [tables[s] for s in live], block_size, pad)
        token_ids_T = torch.tensor(ids + [0] * pad)
        hidden = decoder.hidden_states(token_ids_T, positions(query_lens, kv_lens, pad), cache, metadata)
        for s, part in zip(live, decoder.logits(hidden)[: len(ids)].split(query_lens), strict=True):
            rows[s].append(part)
        done += chunk
    return [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize("kind", [ReferenceAttention, CpuAttention])
def test_logits_equal_those_of_transformers_over_ragged_chunks_and_cached_tokens(
    folder: Path, kind: type[AttentionBackend]
) -> None:
    if kind is CpuAttention and not CpuAttention.is_available():
        pytest.skip("the CPU kernel was not compiled")
    backend = kind()
    prompts = ragged_prompts(5, 60)
    chunks = [16, 7, 1, 1, 1, 30, 1, 1, 1, 1]
    with transformers_model(folder) as model, torch.no_grad():
        for prompt, logits in zip(prompts, paged_logits(folder, prompts, chunks, backend), strict=True):
            expected = model(torch.tensor([prompt])).logits[0]
            assert (logits - expected).abs().max().item() < 1e-4
            assert (logits - expected.roll(1, 0)).abs().max().item() > 1e-2 or len(prompt) == 1


def test_sixty_four_greedy_ids_equal_those_of_transformers(folder: Path) -> None:
    prompts = [[3], [1, 2, 3, 4, 5], list(range(13))]
    outputs = run(make_engine(folder), greedy(prompts, 64))
    with transformers_model(folder) as model:
        for i, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=64,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
            assert token_ids(outputs[str(i)]) == expected[0, len(prompt) :].tolist()

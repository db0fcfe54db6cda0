"""The bytes that a step must read, counted by hand."""

from __future__ import annotations

import pytest
import torch

from bench.floor import Reader, step_bytes
from gptserve.weights.families import load_config
from tests.conftest import MakeGPT2

WIDTH, LAYERS, VOCABULARY = 8, 3, 50
BLOCK = 12 * WIDTH * WIDTH + 9 * WIDTH + 4 * WIDTH  # products, biases, norms
WEIGHTS = LAYERS * BLOCK + 2 * WIDTH + VOCABULARY * WIDTH  # the last norm and the head
KV_OF_A_TOKEN = 2 * LAYERS * WIDTH


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_step_reads_each_weight_once_and_the_cache_of_each_sequence(
    make_gpt2: MakeGPT2, tied: bool, dtype: torch.dtype, num_bytes: int
) -> None:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "vocab_size": VOCABULARY}
    model = load_config(make_gpt2(**sizes, tie_word_embeddings=tied))

    assert step_bytes(model, dtype, batch=0, context=0) == WEIGHTS * num_bytes
    assert step_bytes(model, dtype, batch=5, context=7) == (WEIGHTS + 5 * 7 * KV_OF_A_TOKEN) * num_bytes
    assert step_bytes(model, dtype, 5, 7, weight_bytes=1) == WEIGHTS + 5 * 7 * KV_OF_A_TOKEN * num_bytes


def test_memory_is_read_at_some_bandwidth() -> None:
    assert Reader(2**20, torch.device("cpu")).bytes_per_second() > 0

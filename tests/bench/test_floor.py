"""The bytes that a step must read, counted by hand."""

from __future__ import annotations

import pytest
import torch

from bench.floor import Reader, step_bytes
from gptserve.weights.families import load_config
from tests.conftest import MakeGPT2

WIDTH, LAYERS, VOCABULARY = 32, 4, 50
BLOCK = 12 * WIDTH * WIDTH + 9 * WIDTH + 4 * WIDTH  # products, biases, norms
WEIGHTS = LAYERS * BLOCK + 2 * WIDTH + VOCABULARY * WIDTH  # the last norm and the head
KV_OF_A_TOKEN = 2 * LAYERS * WIDTH
PRODUCTS = LAYERS * 12 * WIDTH * WIDTH + VOCABULARY * WIDTH


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_step_reads_each_weight_once_and_the_cache_of_each_sequence(
    make_gpt2: MakeGPT2, tied: bool, dtype: torch.dtype, num_bytes: int
) -> None:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "vocab_size": VOCABULARY}
    model = load_config(make_gpt2(**sizes, tie_word_embeddings=tied))

    assert step_bytes(model, dtype, batch=0, context=0) == WEIGHTS * num_bytes
    assert step_bytes(model, dtype, batch=5, context=7) == (WEIGHTS + 5 * 7 * KV_OF_A_TOKEN) * num_bytes
    assert step_bytes(model, dtype, 5, 7, "int8") == PRODUCTS * 34 / 32 + 5 * 7 * KV_OF_A_TOKEN * num_bytes


def test_memory_is_read_at_some_bandwidth() -> None:
    assert Reader(2**20, torch.device("cpu")).bytes_per_second() > 0


def test_a_gpus_bandwidth_is_that_of_a_pass_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events alone; what they measure takes a GPU."""
    told, elapsed_ms = list[str](), iter([100.0, 80.0, 90.0, 120.0, 95.0, 130.0, 70.0, 60.0, 99.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return next(elapsed_ms)

    class Buffer:
        is_cuda, nbytes = True, 2**20

        def sum(self) -> None:
            told.append("pass")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    reader = Reader(2**10, torch.device("cpu"))
    reader._buffer = Buffer()  # type: ignore[assignment]

    assert reader.bytes_per_second() == pytest.approx(2**20 / (0.095 / 40))
    assert told == ["pass", "record", *["pass"] * 40, "record", "wait"] * 9

"""How the decoder takes its tensors, and which it keeps; tests/parity compares what it computes with transformers."""

from __future__ import annotations

import ctypes
import gc
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.config import Quantization
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.loading import StreamedTensors
from gptserve.engine.runner.products import Linears
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from tests.engine.runs import make_engine, make_request, run

VOCAB_SIZE, WIDTH = 40_000, 256
TABLE = VOCAB_SIZE * WIDTH
MARGIN = TABLE  # bytes, half a table in bf16: the layer, huge pages, what else this process takes or gives back

needs_library = pytest.mark.skipif(not native.is_available(), reason="the library is not built")


def test_tensors_that_come_early_wait_until_they_are_taken() -> None:
    source = StreamedTensors(iter([("a", torch.zeros(1)), ("b", torch.ones(1)), ("c", torch.full((1,), 2.0))]))
    assert [source.take(name).item() for name in ("b", "a", "c")] == [1.0, 0.0, 2.0]


def anonymous_bytes() -> int:
    """Return how many bytes this process has written to and no file holds, but for what malloc keeps of freed ones."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"^Anonymous: +(\d+) kB$", rollup, re.M)[1])


def held_bytes(folder: Path, dtype: torch.dtype, quantization: Quantization | None) -> int:
    """Return by how much a decoder makes this process grow."""
    before = anonymous_bytes()
    checkpoint = Checkpoint(folder, load_config(folder))
    linears = Linears(quantization, num_layers=checkpoint.config.num_layers)
    decoder = Decoder(checkpoint.config, checkpoint.stream(dtype=dtype, device="cpu"), ReferenceAttention(), linears)
    found = anonymous_bytes() - before
    assert decoder.program is None
    return found


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_a_tied_head_is_held_once(dtype: torch.dtype, make_gpt2: Callable[..., Path]) -> None:
    shape = {"vocab_size": VOCAB_SIZE, "n_embd": WIDTH, "n_layer": 1}
    tied, untied = (make_gpt2(**shape, tie_word_embeddings=is_tied) for is_tied in (True, False))
    for quantization in (None, "int8"):  # what only the first one takes: scratch, threads, libraries
        held_bytes(tied, dtype, quantization)

    for folder, quantization, expected in (
        (tied, None, TABLE * dtype.itemsize),
        (untied, None, 2 * TABLE * dtype.itemsize),
        (tied, "int8", TABLE * 34 // 32),
    ):
        assert abs(held_bytes(folder, dtype, quantization) - expected) < MARGIN


@pytest.mark.some(2)
@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 72, 96])  # programs embed by the first and the last, torch by the other
def test_tokens_are_embedded_by_a_tied_head_as_by_the_table(
    width: int, dtype: str, make_gpt2: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_gpt2(n_embd=width, n_head=2, vocab_size=1000)
    requests = [make_request(str(i), [7 * i + 31 * j for j in range(20)], max_tokens=8, logprobs=3) for i in range(4)]

    def told() -> list[object]:
        engine = make_engine(folder, dtype=dtype)
        assert isinstance(engine._runner._decoder._embedding, Tensor) == (rows_of is not Linears.rows_of)
        outputs = run(engine, requests)
        return [(output.token_ids, output.logprobs) for request in requests for output in outputs[request.request_id]]

    rows_of = Linears.rows_of
    by_head = told()
    monkeypatch.setattr(Linears, "rows_of", lambda *_: None)
    assert by_head == told()


@needs_library
def test_a_tied_head_with_a_bias_waits_for_it(tiny_gpt2: Path) -> None:
    """No other tensor waits meanwhile."""
    checkpoint = Checkpoint(tiny_gpt2, load_config(tiny_gpt2))
    config, table = replace(checkpoint.config, head_bias=True), torch.empty(0)
    bias = torch.arange(float(config.vocab_size))
    waiting: list[StreamedTensors] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal table
        for name, tensor in checkpoint.stream(dtype=torch.float32, device="cpu"):
            table = tensor if name == "embed.weight" else table
            yield name, tensor
            assert not waiting or len(waiting[0]._waiting) == 0
        yield "head.bias", bias

    decoder = Decoder(config, stream(), ReferenceAttention(), Linears())
    decoder._final_norm = None
    numbers, x = torch.tensor([0, 95, 31, 32, 64]), torch.randn(3, config.hidden_size)

    assert not isinstance(decoder._embedding, Tensor)
    assert torch.equal(decoder._embedding[numbers], table[numbers])
    torch.testing.assert_close(decoder.logits(x), x @ table.t() + bias, atol=1e-4, rtol=1e-5)
    assert math.isfinite(decoder.logits(x).sum())

"""How the decoder takes its tensors; what it computes is tested against transformers under tests/parity."""

from __future__ import annotations

import torch

from gptserve.engine.model.loading import StreamedTensors


def test_tensors_that_come_early_wait_until_they_are_taken() -> None:
    source = StreamedTensors(iter([("a", torch.zeros(1)), ("b", torch.ones(1)), ("c", torch.full((1,), 2.0))]))
    assert [source.take(name).item() for name in ("b", "a", "c")] == [1.0, 0.0, 2.0]

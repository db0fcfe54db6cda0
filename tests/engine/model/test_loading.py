"""What a loaded model keeps of the tensors that it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeCodedLinear
from gptserve.engine.model.loading import StreamedTensors, take_head
from gptserve.engine.runner.products import Linears
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat
from tests.engine.backends.cpu.coded import random_weight
from tests.engine.model.small_shape import MODEL
from tests.engine.runs import make_engine
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_head_is_not_kept_as_it_came(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, storages = Checkpoint.stream, {}

    def watched(self: Checkpoint, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream(self, **options):
            storages[name] = StorageWeakRef(tensor.untyped_storage())
            yield name, tensor

    monkeypatch.setattr(Checkpoint, "stream", watched)
    write_model(tmp_path, *SHAPES["Llama"])
    engine = make_engine(tmp_path, dtype=dtype)

    if engine.info.product == "torch":
        pytest.skip("this CPU packs no weights")
    assert not storages["embed.weight"].expired()
    assert storages["head.weight"].expired()


@pytest.mark.parametrize("its", [CodeFormat(8, "scales"), CodeFormat(4, "scales and leasts")])
def test_an_embedding_in_codes_is_not_unpacked(its: CodeFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.is_available():
        pytest.skip("needs the compiled library")
    unpack, spans = CodedWeight.values, list[slice]()

    def counted(self: CodedWeight, rows: slice) -> Tensor:
        spans.append(rows)
        return unpack(self, rows)

    weight = random_weight(its, 96, 64, torch.bfloat16)
    table = weight.values(slice(None)).bfloat16()
    monkeypatch.setattr(CodedWeight, "values", counted)
    head, rows = take_head(replace(MODEL, tied_head=True), StreamedTensors(iter(()), Linears()), weight)

    assert not spans
    assert torch.equal(rows[torch.arange(96)], table)
    assert isinstance(head, NativeCodedLinear)

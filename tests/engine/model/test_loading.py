"""What a loaded model keeps of the tensors that it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gptserve.weights.checkpoint import Checkpoint
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

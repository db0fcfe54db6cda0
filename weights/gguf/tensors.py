"""Reads the bytes of a tensor of a GGUF file. checkpoint.py calls it."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.stored_tensor import StoredTensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensor(stored: StoredTensor) -> Tensor:
    """Return the values of floats in the tensor's shape, of other types uint8 [..., bytes of a row].

    They lie in the mapped file, which is unmapped with them. Raises InvalidCheckpointError.
    """
    first = stored.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with stored.path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), stored.end - first, access=mmap.ACCESS_COPY, offset=first)
    except (OSError, ValueError) as fault:
        raise InvalidCheckpointError(f"{stored.path} could not be read: {fault}") from fault
    data = torch.frombuffer(pages, dtype=torch.uint8, count=stored.end - stored.start, offset=stored.start - first)
    if stored.dtype in _DTYPES:
        return data.view(_DTYPES[stored.dtype]).view(stored.shape)
    return data.view(*stored.shape[:-1], -1)

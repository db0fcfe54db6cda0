"""What torch's oneDNN can compute on this CPU."""

from __future__ import annotations

import pytest
import torch

from gptserve.engine.backends.cpu.linear import has_onednn

has_bf16 = has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
needs_bf16 = pytest.mark.skipif(not has_bf16, reason="oneDNN has no bf16 for this CPU")
"""A CPU without AVX-512, such as a Zen 3, has none, though it has AVX2."""
DTYPES = (torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16))

"""What the decoder refuses; what it computes is tested against transformers under tests/parity."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import torch

from engine.decoder import StreamedTensors, check_supported
from tests.engine.test_kv_cache import MODEL
from weights.config import ModelConfig
from weights.errors import UnsupportedModelError

CHECKED = {
    "norm": "rmsnorm",
    "norm_placement": "post",
    "norm_bias": False,
    "position": "rotary",
    "rotary_scaling": "llama3",
    "qk_norm": True,
    "attention_sinks": True,
    "gated_ffn": True,
    "num_experts": 8,
    "parallel_residual": True,
    "head_bias": True,
    "logit_scale": 0.5,
    "logit_softcap": 30.0,
}


@pytest.mark.parametrize(("field", "value"), CHECKED.items())
def test_every_choice_not_computed_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"a test model with {field} = {value!r} is not supported"):
        check_supported(replace(MODEL, **{field: value}))


def test_what_gpt2_uses_is_computed() -> None:
    check_supported(MODEL)
    check_supported(replace(MODEL, activation="relu", tied_head=False, attention_windows=(4, None, 4)))


def test_every_optional_field_is_either_checked_or_used() -> None:
    used = {"ffn_bias", "activation", "norm_eps", "tied_head", "eos_token_ids", "bos_token_id"}
    rotary = {"rotary_fraction", "rotary_theta", "rotary_interleaved"}  # without rotary positions they mean nothing
    optional = {field.name for field in fields(ModelConfig) if field.default is not MISSING}
    assert optional == CHECKED.keys() | used | rotary


def test_tensors_that_come_early_wait_until_they_are_taken() -> None:
    source = StreamedTensors(iter([("a", torch.zeros(1)), ("b", torch.ones(1)), ("c", torch.full((1,), 2.0))]))
    assert [source.take(name).item() for name in ("b", "a", "c")] == [1.0, 0.0, 2.0]

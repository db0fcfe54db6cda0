"""The shape of a decoder, as data.

`ModelConfig` is the one description every part agrees on: a family file makes it from config.json, the engine builds
its only decoder from it. It knows nothing of files, devices or dtypes of computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["layernorm", "rmsnorm"]
NormPlacement = Literal["pre", "post"]
Position = Literal["learned", "sinusoidal", "rotary", "alibi"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: embedding -> num_layers blocks -> final norm -> head.

    Per-layer tuples have num_layers entries. Invariants: num_heads is a multiple of num_kv_heads; every
    end-of-text id is in [0, vocab_size).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    """Longest sequence in tokens, prompt and completion together."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    attention_scales: tuple[float, ...]
    """What q.k is multiplied with, per layer."""
    attention_windows: tuple[int | None, ...]
    """How many of the latest tokens a layer sees, itself included; None: all."""
    attention_bias: bool
    ffn_size: int

    ffn_bias: bool = True
    activation: Activation = "gelu_tanh"
    gated_ffn: bool = False
    num_experts: int = 0
    norm: Norm = "layernorm"
    norm_placement: NormPlacement = "pre"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    position: Position = "learned"
    rotary_fraction: float = 1.0
    rotary_theta: float = 10_000.0
    rotary_interleaved: bool = False
    rotary_scaling: str | None = None
    qk_norm: bool = False
    attention_sinks: bool = False
    parallel_residual: bool = False
    tied_head: bool = True
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query-key-value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

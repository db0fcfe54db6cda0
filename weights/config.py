"""The shape of a decoder, as data.

`ModelConfig` is the one description every part agrees on: a family file makes it from config.json, the engine builds
its only decoder from it. It knows nothing of files, devices or dtypes of computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["layernorm", "rmsnorm"]
NormPlacement = Literal["input", "output", "both", "sum"]
Position = Literal["learned", "sinusoidal"]
Activation = Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu2", "silu", "tanh"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021) of a head's first 2n dimensions, for n = len(inv_freqs).

    At position p the pair (x[i], x[i + n]) turns by the angle p * inv_freqs[i]; the result is multiplied with `scale`.
    """

    inv_freqs: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a linear router picks `num_active` of `num` feed-forwards, weighted by its softmax."""

    num: int
    num_active: int


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
    ffn_size: int

    qkv_bias: bool = True
    attn_out_bias: bool = True
    qkv_clip: float | None = None
    """Queries, keys and values are clamped to [-qkv_clip, qkv_clip]."""
    qk_norm: Literal["head", "projection"] | None = None
    """An RMSNorm of queries and keys before their rotation: of each head alone, or of all heads as one vector."""
    attention_sinks: bool = False
    """Each head has one more logit in its softmax, without a value."""
    attention_softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""

    position: Position | None = "learned"
    """What is added to the embedding."""
    position_offset: int = 0
    """Position p has row p + offset of the sinusoids."""
    rotaries: tuple[Rotary | None, ...] = ()
    """Per layer; empty: none."""
    alibi_slopes: tuple[float, ...] = ()
    """Per head: the score of a key d tokens back is lowered by slope * d (Press et al. 2022); empty: none."""

    activation: Activation = "gelu_tanh"
    gated_ffn: bool = False
    """act(gate) * up instead of act(up)."""
    ffn_limit: float | None = None
    """The gate is clamped to at most this, the other half to [-limit, limit] and raised by 1 (gpt-oss)."""
    ffn_bias: bool = True
    experts: Experts | None = None

    norm: Norm = "layernorm"
    norm_placement: NormPlacement = "input"
    """Of f in x + f(x): x + f(n(x)), x + n(f(x)), x + n'(f(n(x))) or n(x + f(x)); "sum" has no final norm."""
    norm_eps: float = 1e-5
    norm_weight: bool = True
    norm_bias: bool = True
    norm_weight_offset: float = 0.0
    """Added to each stored norm weight (Gemma)."""
    embed_norm: bool = False
    embed_size: int | None = None
    """Width of the embedding and the head, where a projection leads from it to hidden_size and back (OPT-350m)."""
    embed_scale: float = 1.0
    parallel_residual: bool = False
    """x + attention(n(x)) + ffn(n'(x)) instead of one after the other."""
    shared_norm: bool = False
    """n and n' of the parallel residual are one."""
    tied_head: bool = True
    head_bias: bool = False
    logit_softcap: float | None = None

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query-key-value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

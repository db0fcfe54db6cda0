"""The shape of a decoder, as data: what all layers have in common, and the shape of each layer.

A family file makes a `ModelConfig` from config.json; the engine builds its only decoder from it. It knows nothing of
files, devices or dtypes of computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Norm = Literal["layernorm", "rmsnorm"]
NormPlacement = Literal["input", "output", "both", "sum"]
Position = Literal["learned", "sinusoidal"]
Score = Literal["softmax", "sigmoid"]
AttentionGate = Literal["sigmoid", "softplus", "silu"]
Activation = Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu2", "silu", "tanh"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021) of a head's first 2n dimensions, for n = len(inv_freqs).

    At position p the pair (x[i], x[i + n]) turns by the angle p * inv_freqs[i]; the result is multiplied by `scale`.
    With a `growth` (b, c), which needs n to be half of the head, a query is then multiplied by
    1 + b log(1 + floor(p / c)).
    """

    inv_freqs: tuple[float, ...]
    scale: float = 1.0
    growth: tuple[float, int] | None = None


@dataclass(frozen=True, slots=True)
class Router:
    """How a mixture chooses experts for a row and weighs them, given the row's logit l of each expert.

    The score of an expert is the softmax of all l, or the sigmoid of its own. Those with the highest scores are
    chosen; their scores are their weights, divided by their sum if `renormalised`, and times `scale`.
    """

    score: Score = "softmax"
    has_correction: bool = False
    """A number of each expert is added to its score for the choice alone."""
    num_groups: int = 1
    """The experts are in so many groups of neighbours, of two or more."""
    num_active_groups: int = 1
    """Only experts of so many groups are chosen: those whose two highest scores have the highest sum."""
    renormalised: bool = True
    min_sum: float = 0.0
    """Weights are divided by this where their sum is less."""
    sum_offset: float = 0.0
    """Added to the sum by which they are divided."""
    scale: float = 1.0
    has_factors: bool = False
    """Weights are multiplied by a number of each expert at last."""

    @property
    def is_plain(self) -> bool:
        """Whether the order of the logits is the choice, and a softmax gives all weights."""
        return self == Router(renormalised=self.renormalised)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a linear router chooses `num_active` of `num` feed-forwards for a row.

    Behind these stand `num_shared`, which all rows have. They are parts of one that is wider.
    """

    num: int
    num_active: int
    router: Router = Router()
    num_shared: int = 0
    has_shared_gate: bool = False
    """The weight of the shared experts is the sigmoid of one more logit of the router, not `shared_weight`."""
    shared_weight: float = 1.0

    @property
    def num_all(self) -> int:
        """How many feed-forwards there are."""
        return self.num + self.num_shared

    @property
    def num_per_row(self) -> int:
        """How many of them compute a row."""
        return self.num_active + self.num_shared

    @property
    def num_logits(self) -> int:
        """Outputs of the router."""
        return self.num + self.has_shared_gate


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Attention without a softmax, in place of attention: each value head keeps a matrix of the tokens before.

    That is of key_size x value_size. Each query, key and value comes out of a causal convolution of each channel, which
    reads the latest conv_size - 1 of them, too. num_value_heads is a multiple of num_key_heads.
    """

    num_key_heads: int
    """Of queries, too."""
    num_value_heads: int
    key_size: int
    value_size: int
    conv_size: int

    @property
    def group(self) -> int:
        """Value heads side by side that have one key head, before those that have the next one."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_width(self) -> int:
        """Rows of the key projection, and of the query projection."""
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Rows of the value projection, and of the gate."""
        return self.num_value_heads * self.value_size

    @property
    def conv_width(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def out_width(self) -> int:
        """Columns of the projection of what it gives."""
        return self.value_width

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """The memory that a sequence keeps beside the inputs of the convolution."""
        return self.num_value_heads, self.key_size, self.value_size

    @property
    def rate_width(self) -> int:
        """Rows of the projection of rates: of each value head how much it learns, then how much it forgets."""
        return 2 * self.num_value_heads


@dataclass(frozen=True, slots=True)
class GatedDelta(LinearAttention):
    """Linear attention by the gated delta rule (Yang et al., "Gated Delta Networks", 2024)."""

    tiled: bool = False
    """Value heads take all key heads in turn: those side by side have not the same."""

    @property
    def group(self) -> int:
        """The same, 1 if `tiled`."""
        return 1 if self.tiled else self.num_value_heads // self.num_key_heads


@dataclass(frozen=True, slots=True)
class StateSpace(LinearAttention):
    """The mixer of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024): its C, B and x are queries, keys and values."""

    norm_eps: float
    step_limits: tuple[float, float] = (0.0, math.inf)
    """The least step of a token, and the largest."""
    has_conv_bias: bool = True
    has_norm: bool = True
    """What all value heads of a key head give, times its gates, is normalised."""

    @property
    def rate_width(self) -> int:
        """Rows of the projection of rates: of each value head its step, which is both."""
        return self.num_value_heads


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A gated causal convolution of each channel (Liquid AI, "LFM2 Technical Report", 2025), in place of attention.

    Of a row's projections b, c and x it gives c * convolution(b * x), and keeps the latest conv_size - 1 of b * x.
    """

    conv_width: int
    """The channels of the convolution, and the rows of each projection."""
    conv_size: int

    @property
    def in_width(self) -> int:
        """Rows of all three."""
        return 3 * self.conv_width

    @property
    def out_width(self) -> int:
        """Columns of the projection of what it gives."""
        return self.conv_width

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """The memory beside the inputs of the convolution: none."""
        return 0, 0, 0


Recurrence = GatedDelta | StateSpace | ShortConvolution
"""What a layer may have in place of attention or beside it: it keeps a state of one size at any length."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The shape of one layer. num_heads is a multiple of num_kv_heads; both are 0 where there is no attention.

    A layer has attention, a recurrence or a feed-forward.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    attention_scale: float
    """The factor of q.k."""
    ffn_size: int
    """The width of the feed-forward, or of each expert's; 0: the layer has none."""
    window: int | None = None
    """How many of the latest tokens a token sees, itself included; None: all."""
    rotary: Rotary | None = None
    alibi_slopes: tuple[float, ...] = ()
    """Per head: a key d tokens back has its score lowered by slope * d (Press et al. 2022); empty: no ALiBi."""
    experts: Experts | None = None
    """None: the layer has a single feed-forward."""
    dense_size: int | None = None
    """The width of a feed-forward f beside the experts e, if there is one.

    With norms n of inputs and n' of outputs, all of them others, they give n'(f(n(x))) + n'(e(n(x), r(n(x)))), of which
    the router reads r(n(x)).
    """
    kv_layer: int | None = None
    """The number of the layer before it whose keys and values it reads; it has no projections of its own for them."""
    gate_cut: float | None = None
    """Gates g of the feed-forward become max(0, g - mean(g) - gate_cut * deviation(g)) first; None: they do not."""
    keys_are_values: bool = False
    """Values are what the key projection gives, before keys are normalised and rotated: it has no other weights."""
    recurrence: Recurrence | None = None
    """What the layer has in place of attention, or beside it: then both are added to the stream."""

    @property
    def mixes(self) -> bool:
        """Whether it reads other tokens than its own; else it is a feed-forward."""
        return self.num_heads > 0 or self.recurrence is not None

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query-key-value projection."""
        return self.q_size + (2 * self.kv_size if self.kv_layer is None else 0)


@dataclass(frozen=True, slots=True)
class Classifier:
    """A head that gives a text, and no next token, one logit for each label.

    Its weights are rows of the model's head, of these tokens in the order of the labels; without token_ids they are
    `score.weight` of the files.
    """

    num_labels: int
    token_ids: tuple[int, ...] = ()
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: embedding -> a block for each of `layers` -> final norm -> head.

    Invariants: there is a layer, and equal layers are one object; every end-of-text id is in [0, vocab_size).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position: int
    """Longest sequence in tokens, prompt and completion together."""
    layers: tuple[LayerConfig, ...]

    qkv_bias: bool = True
    attn_out_bias: bool = True
    qkv_clip: float | None = None
    """Queries, keys and values are clamped to [-qkv_clip, qkv_clip]."""
    qk_norm: Literal["head", "own", "projection"] | None = None
    """A norm of queries and keys, before their rotation: of each head alone, or of all heads as one vector.

    "head" has the same weights for all heads; "own" has others for each, and no bias.
    """
    qk_norm_after_rotation: bool = False
    """That norm comes after the rotation."""
    v_norm: bool = False
    """Values have a norm of each head, too, which has no weights; it needs that queries and keys have those."""
    attention_sinks: bool = False
    """The softmax of each head has one more logit, which has no value."""
    attention_gate: AttentionGate | None = None
    """What attention gives is multiplied by this function of a linear of its input, before its own product."""
    gates_heads: bool = False
    """The gate has one number for each head, not for each dimension of it."""
    attention_softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""

    position: Position | None = "learned"
    """The kind of position embedding that is added to the token's; None: none."""
    position_offset: int = 0
    """Position p takes row p + offset of the sinusoids, or of the table in the file, whose first rows are unused."""

    activation: Activation = "gelu_tanh"
    xielu: bool = False
    """The activation is xIELU (Huang & Schlag 2025), with numbers of each layer's own, and not gated: see Xielu."""
    gated_ffn: bool = False
    """act(gate) * up instead of act(up)."""
    ffn_limit: float | None = None
    """Clamps the gate to at most this, and the other half to [-limit, limit] before adding 1 (gpt-oss); None: off."""
    ffn_bias: bool = True

    norm: Norm = "layernorm"
    norm_placement: NormPlacement = "input"
    """Around a part f, with norms n and n':

    input: x + f(n(x)); output: x + n(f(x)); both: x + n'(f(n(x))); sum: n(x + f(x)), and no final norm.
    """
    norm_eps: float = 1e-5
    norm_weight: bool = True
    norm_bias: bool = True
    norm_weight_offset: float = 0.0
    """Added to each stored norm weight (Gemma)."""
    embed_norm: bool = False
    embed_size: int | None = None
    """Width of the embedding and the head, if projections join it to hidden_size (OPT-350m); None: hidden_size."""
    embed_scale: float = 1.0
    layer_input_size: int | None = None
    """The width of what each layer is given of a row's token, beside the stream x; None: nothing.

    It is (e + n(P x / sqrt(hidden_size))) / sqrt(2), for the embedded x, a linear P and a norm n of this width; e is a
    part of a row of a table, times sqrt(width). Behind its feed-forward a layer adds n'(W (act(G x) * it)) to x, with
    linears G and W.
    """
    num_layer_inputs: int | None = None
    """How many tokens that table has; others have the row of token 0. None: it has all."""
    streams: int | None = None
    """How many streams x_0, x_1, ... there are in place of x (AltUp, Baykal et al., "Alternating Updates for Efficient
    Transformers", 2023); None: x alone.

    With linears S_i and U_i, they begin as x_0 = x and x_i = S_i x, and end as the mean of x_0 and all U_i x_i, where
    each product gets the length of x_0. A layer has weights w(z) = tanh(R n(z) / hidden_size), matrices P_i and C and a
    vector s. Of p_i = x_i + sum over j of (P_i w(x_0))_j x_j it computes y of p_0, and gives
    p_i + (1 + C w(y))_i (y - p_0). What it makes of its input it adds to all but the first, and it makes it of s times
    the first.
    """
    side_rank: int | None = None
    """The rank of a linear beside attention (LAuReL, Menghani et al., "Learned Augmented Residual Layer", 2024).

    With a norm n' and linears L and R of this rank, x + attention becomes (x + attention + h + n'(L R h)) / sqrt(2),
    for the input h of attention; None: it does not.
    """
    parallel_residual: bool = False
    """x + attention(n(x)) + ffn(n'(x)), not one after the other."""
    shared_norm: bool = False
    """The parallel residual has one norm for both: n' is n."""
    layer_scale: bool = False
    """What a layer gives to the next one is multiplied by a number of its own."""
    tied_head: bool = True
    head_bias: bool = False
    logit_scale: float = 1.0
    """The factor of the logits, before a cap. It needs a final norm with weights and a head without bias."""
    logit_softcap: float | None = None

    weight_factors: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """By kind of tensor numbers by which its parts, rows side by side, are multiplied as it is read."""
    classifier: Classifier | None = None
    """What reads the states in the place of the head."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        one_of_each: dict[LayerConfig, LayerConfig] = {}
        layers = tuple(one_of_each.setdefault(layer, layer) for layer in self.layers)
        object.__setattr__(self, "layers", layers)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def vector_size(self) -> int:
        """The width of the vector of a text, or how many labels its classifier has."""
        return self.classifier.num_labels if self.classifier is not None else self.embed_size or self.hidden_size

    @property
    def distinct_layers(self) -> tuple[LayerConfig, ...]:
        """One of each shape, in the order in which they first occur."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return any(layer.experts is not None for layer in self.distinct_layers)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of each sequence in place of keys and values."""
        return any(layer.recurrence is not None for layer in self.distinct_layers)

    def change_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
        """Return the configuration with each layer changed; `change` is called once for each shape."""
        changed = {layer: change(layer) for layer in self.distinct_layers}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

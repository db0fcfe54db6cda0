"""Builds Sources: `decoder` from a family's table of names, `linear` for a single linear.

Knows no family. Canonical names and those in the file stand without `.weight` and `.bias`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from gptserve.weights.config import GatedDelta, LayerConfig, ModelConfig, ShortConvolution
from gptserve.weights.families.family import MAX_LAYERS, Source

Names = Mapping[str, str | tuple[str, ...]]
"""A family's table: canonical names to those in the file, both without `.weight` and `.bias`.

An entry with {} stands for every block, and {{}} for every head. A tuple names parts that the file has apart: query,
key and value, or gate and up.
"""

Part = tuple[str, int]
"""A linear's name in the file and its number of rows, [out, in]."""

RowOrder = tuple[int, ...] | None


def decoder(
    names: Names, *, transpose: bool = False, qkv_order: Callable[[LayerConfig], RowOrder] = lambda layer: None
) -> Callable[[ModelConfig], dict[str, Source]]:
    """Return the function that gives all tensors of `names` that a configuration and its layers have, in this order.

    transpose: the blocks' linears are stored as [in, out] (Conv1D). qkv_order gives the row order of "qkv".
    """

    def sources(config: ModelConfig) -> dict[str, Source]:
        orders, found = {layer: qkv_order(layer) for layer in config.distinct_layers}, dict[str, Source]()
        for in_blocks, group in groupby(names.items(), lambda entry: "{}" in entry[0]):
            entries = list(group)
            for number, layer in enumerate(config.layers if in_blocks else config.layers[:1]):
                for name, stored in entries:
                    parts = [part.format(number) for part in ([stored] if isinstance(stored, str) else stored)]
                    transposed, order = transpose and in_blocks, orders[layer]
                    found |= _named(config, layer, name.format(number), parts, transposed, order)
        return found

    return sources


def _named(
    config: ModelConfig, layer: LayerConfig, name: str, stored: Sequence[str], transpose: bool, qkv_order: RowOrder
) -> dict[str, Source]:
    """Return the weight and bias of one canonical name, as far as the layer has them, in its sizes."""
    hidden, embed, num_in = config.hidden_size, config.embed_size or config.hidden_size, config.layer_input_size or 0
    ffn = layer.dense_size or layer.ffn_size
    num_q, num_kv = layer.q_size, layer.kv_size
    kind = name.rpartition(".")[2]
    if _absent(config, layer).get(kind):
        return {}
    if kind.startswith("memory_"):
        delta = layer.recurrence
        return _of_delta(delta, name, kind, stored, hidden) if isinstance(delta, GatedDelta) else {}
    if kind.startswith("conv_"):
        of_layer = layer.recurrence
        return _of_convolution(of_layer, name, kind, stored, hidden) if isinstance(of_layer, ShortConvolution) else {}
    if kind == "scale":
        return {name: Source(((stored[0], (1,)),), is_wide=True)} if config.layer_scale else {}
    if kind == "qkv" and layer.keys_are_values:
        stored = (*stored[:2], stored[1])
    if kind == "qkv" and layer.kv_layer is not None:
        stored = stored[:1]
    if kind == "router_norm":
        return {f"{name}.weight": Source(((stored[0], (hidden,)),))}
    if kind == "sinks":
        return {name: Source(((stored[0], (layer.num_heads,)),))} if config.attention_sinks else {}
    if kind == "xielu":
        return {name: Source(tuple((part, (1,)) for part in stored), is_wide=True)}
    if config.qk_norm == "own" and kind in ("q_norm", "k_norm"):
        return {f"{name}.weight": _own_norms(layer, kind, stored[0], qkv_order)}
    if kind.endswith("_norm"):
        whole = {"q_norm": num_q, "k_norm": num_kv, "input_norm": num_in}.get(kind, hidden)
        size = layer.head_size if config.qk_norm == "head" and kind in ("q_norm", "k_norm") else whole
        has = {"weight": config.norm_weight, "bias": config.norm_bias}
        return {f"{name}.{part}": Source(((f"{stored[0]}.{part}", (size,)),)) for part, there in has.items() if there}
    linears = {  # rows of each part, columns, bias
        "embed": ((config.vocab_size,), embed, False),
        "position": ((config.position_offset + config.max_position,), hidden, False),
        "embed_in": ((hidden,), embed, False),
        "input_embed": ((config.num_layer_inputs or config.vocab_size,), config.num_layers * num_in, False),
        "input_proj": ((config.num_layers * num_in,), hidden, False),
        "input_gate": ((num_in,), hidden, False),
        "input_out": ((hidden,), num_in, False),
        "qkv": ((num_q, num_kv, num_kv) if layer.kv_layer is None else (num_q,), hidden, config.qkv_bias),
        "attn_gate": ((layer.num_heads if config.gates_heads else num_q,), hidden, False),
        "attn_out": ((hidden,), num_q, config.attn_out_bias),
        "ffn_up": ((ffn,) * (1 + config.gated_ffn), hidden, config.ffn_bias),
        "ffn_down": ((hidden,), ffn, config.ffn_bias),
        "embed_out": ((embed,), hidden, False),
        "head": ((config.vocab_size,), embed, config.head_bias),
    }
    rows, columns, bias = linears[kind]
    if kind == "head" and config.tied_head:
        return {f"{name}.bias": Source(((f"{stored[0]}.bias", rows),))} if bias else {}
    parts = list(zip(stored, rows, strict=True)) if len(stored) > 1 else [(stored[0], sum(rows))]
    order = qkv_order if kind == "qkv" else None
    if kind == "position" and config.position_offset:
        order = tuple(range(config.position_offset, *rows))
    return linear(name, parts, columns, bias=bias, row_order=order, transpose=transpose)


def _absent(config: ModelConfig, layer: LayerConfig) -> dict[str, bool]:
    """Return whether the layer, or the model, lacks the tensors of a kind."""
    is_absent = {"final_norm": config.norm_placement == "sum"}
    is_absent["ffn_norm"] = config.shared_norm
    is_absent |= dict.fromkeys(("q_norm", "k_norm"), config.qk_norm is None)
    is_absent |= dict.fromkeys(("ffn_up", "ffn_down"), layer.experts is not None and layer.dense_size is None)
    is_absent |= dict.fromkeys(_BESIDE, layer.dense_size is None) | dict.fromkeys(
        _OF_INPUTS, not config.layer_input_size
    )
    is_absent["k_norm"] |= layer.kv_layer is not None
    is_absent |= dict.fromkeys(("embed_in", "embed_out"), config.embed_size is None)
    is_absent["xielu"] = not config.xielu
    is_absent["attn_gate"] = config.attention_gate is None
    if not layer.num_heads:
        is_absent |= dict.fromkeys(("qkv", "q_norm", "k_norm", "attn_gate", "attn_out"), True)
    return is_absent


_BESIDE = ("dense_output_norm", "experts_norm", "experts_output_norm", "router_norm")
_OF_INPUTS = ("input_embed", "input_proj", "input_norm", "input_gate", "input_out", "input_output_norm")


def _of_delta(delta: GatedDelta, name: str, kind: str, stored: Sequence[str], hidden: int) -> dict[str, Source]:
    """Return the tensor of one canonical name of linear attention, whose numbers of heads and channels stay wide."""
    heads, width = delta.num_value_heads, delta.value_width
    if kind in ("memory_decay", "memory_step"):
        return {name: Source(((stored[0], (heads,)),), is_wide=True)}
    if kind == "memory_norm":
        return {f"{name}.weight": Source(((f"{stored[0]}.weight", (delta.value_size,)),))}
    if kind == "memory_conv":
        shape = (delta.conv_width, 1, delta.conv_size)
        return {f"{name}.weight": Source(((f"{stored[0]}.weight", shape),), is_wide=True, is_flat=True)}
    sizes = {  # rows of each part, columns
        "memory_in": ((delta.key_width, delta.key_width, width), hidden),
        "memory_gate": ((width,), hidden),
        "memory_rates": ((heads, heads), hidden),
        "memory_out": ((hidden,), width),
    }
    rows, num_in = sizes[kind]
    parts = list(zip(stored, rows, strict=True)) if len(stored) > 1 else [(stored[0], sum(rows))]
    return linear(name, parts, num_in, bias=False)


def _of_convolution(
    convolution: ShortConvolution, name: str, kind: str, stored: Sequence[str], hidden: int
) -> dict[str, Source]:
    width = convolution.conv_width
    if kind == "conv_factors":
        return {name: Source(((f"{stored[0]}.weight", (width, 1, convolution.conv_size)),), is_wide=True, is_flat=True)}
    rows, num_in = (convolution.in_width, hidden) if kind == "conv_in" else (hidden, width)
    return linear(name, [(stored[0], rows)], num_in, bias=False)


def _own_norms(layer: LayerConfig, kind: str, stored: str, qkv_order: RowOrder) -> Source:
    """Return the weights of all heads: a matrix in the file or, for a name with {}, a vector of each head's number.

    Queries, keys and values are stored apart, and a head's weights in the order of its dimensions.
    """
    start, num = (0, layer.num_heads) if kind == "q_norm" else (layer.q_size, layer.num_kv_heads)
    size = layer.head_size
    order = None if qkv_order is None else tuple(row - start for row in qkv_order[start : start + num * size])
    if "{}" in stored:
        return Source(tuple((f"{stored.format(head)}.weight", (size,)) for head in range(num)), row_order=order)
    return Source(((f"{stored}.weight", (num, size)),), row_order=order, is_flat=True)


@dataclass(frozen=True, slots=True)
class Shared:
    """The names of the feed-forward that is the shared experts, side by side; {} stands for the layer's number."""

    up: tuple[str, ...]
    down: str
    gate: str = ""
    """The linear of one row behind the router's."""


def with_experts(
    dense: Callable[[ModelConfig], dict[str, Source]],
    router: str,
    up: tuple[str, ...],
    down: str,
    *,
    correction: str = "",
    has_correction_rows: bool = False,
    factors: str = "",
    shared: Shared | None = None,
) -> Callable[[ModelConfig], dict[str, Source]]:
    """Return `dense` with the routers and experts of the layers that have them, each expert stored apart, in order.

    The names have the number of the layer and, those of an expert, its own. A correction may be the only row of a
    matrix.
    """

    def sources(config: ModelConfig) -> dict[str, Source]:
        found, bias, hidden = dense(config), config.ffn_bias, config.hidden_size
        for number, layer in enumerate(config.layers):
            experts, ffn, block = layer.experts, layer.ffn_size, f"blocks.{number}."
            if experts is None:
                continue
            rows = [(router.format(number), experts.num)]
            if experts.has_shared_gate:
                assert shared is not None
                rows.append((shared.gate.format(number), 1))
            found |= linear(f"{block}router", rows, hidden, bias=bias)
            if experts.router.has_correction:
                shape = (1, experts.num) if has_correction_rows else (experts.num,)
                entry = 0 if has_correction_rows else None
                stored = ((correction.format(number), shape),)
                found[f"{block}router.correction"] = Source(stored, entry=entry, is_wide=True)
            if experts.router.has_factors:
                found[f"{block}router.factors"] = Source(((factors.format(number), (experts.num,)),), is_wide=True)
            for e in range(experts.num):
                parts = [(part.format(number, e), ffn) for part in up]
                found |= linear(f"{block}experts.{e}.ffn_up", parts, hidden, bias=bias)
                found |= linear(f"{block}experts.{e}.ffn_down", [(down.format(number, e), hidden)], ffn, bias=bias)
            if experts.num_shared:
                assert shared is not None
                found |= shared_experts(shared, number, layer, hidden)
        return in_order(found)

    return sources


def shared_experts(shared: Shared, number: int, layer: LayerConfig, hidden: int) -> dict[str, Source]:
    """Return the shared experts of a layer: each has its rows of the parts of ffn_up, and its columns of ffn_down.

    Gates and ups may be one part.
    """
    experts, ffn = layer.experts, layer.ffn_size
    assert experts is not None
    found, width = dict[str, Source](), ffn * experts.num_shared
    up = tuple((f"{part.format(number)}.weight", (2 * width // len(shared.up), hidden)) for part in shared.up)
    down = ((f"{shared.down.format(number)}.weight", (hidden, width)),)
    for i in range(experts.num_shared):
        name, is_alone = f"blocks.{number}.experts.{experts.num + i}.", experts.num_shared == 1
        start, end = i * ffn, (i + 1) * ffn
        order = tuple(part * width + row for part in range(2) for row in range(start, end))
        found[f"{name}ffn_up.weight"] = Source(up, row_order=None if is_alone else order)
        found[f"{name}ffn_down.weight"] = Source(down, columns=None if is_alone else (start, end))
    return found


def joined_experts(
    number: int, experts: int, stored: str, hidden: int, ffn: int, *, transpose: bool = False
) -> dict[str, Source]:
    """Return the experts of a layer that the file has in two tensors, [experts, out, in] or, transposed, [.., in, out].

    `stored` is their name without `gate_up_proj`, whose gates come before ups, and `down_proj`.
    """
    shapes = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
    of_file = {name: shape[::-1] if transpose else shape for name, shape in shapes.items()}
    up, down = (((f"{stored}{name}", (experts, *shape)),) for name, shape in of_file.items())
    found = dict[str, Source]()
    for e in range(experts):
        found[f"blocks.{number}.experts.{e}.ffn_up.weight"] = Source(up, transpose=transpose, entry=e)
        found[f"blocks.{number}.experts.{e}.ffn_down.weight"] = Source(down, transpose=transpose, entry=e)
    return found


def in_order(sources: dict[str, Source]) -> dict[str, Source]:
    """Return sources in the order in which a decoder takes them, block by block."""
    return dict(sorted(sources.items(), key=lambda entry: _place(entry[0])))


def _place(name: str) -> int:
    """Return where a tensor stands: before all blocks, in the block of its number, or behind them."""
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return MAX_LAYERS if name.startswith(("final_norm.", "embed_out.", "head.")) else -1


def linear(
    name: str, parts: Sequence[Part], num_in: int, *, bias: bool, row_order: RowOrder = None, transpose: bool = False
) -> dict[str, Source]:
    """Return one linear of parts joined along their rows, each stored as [out, in] or, transposed, as [in, out]."""
    weights = tuple(
        (f"{stored}.weight", (num_in, num_out) if transpose else (num_out, num_in)) for stored, num_out in parts
    )
    sources = {f"{name}.weight": Source(weights, transpose=transpose, row_order=row_order)}
    if bias:
        biases = tuple((f"{stored}.bias", (num_out,)) for stored, num_out in parts)
        sources[f"{name}.bias"] = Source(biases, row_order=row_order)
    return sources


def heads_together(layer: LayerConfig) -> RowOrder:
    """Return the row order of a fused projection stored group by group: the queries of each key head, it and its value.

    With one key and value head for all queries (StarCoder) the rows are in order: None.
    """
    groups, size = layer.num_kv_heads, layer.head_size
    if groups == 1:
        return None
    num = layer.num_heads // groups  # queries of a group
    queries = [g * (num + 2) + h for g in range(groups) for h in range(num)]
    others = [g * (num + 2) + num + part for part in range(2) for g in range(groups)]
    return tuple(head * size + d for head in queries + others for d in range(size))


def halves_apart(layer: LayerConfig) -> RowOrder:
    """Return the row order of a fused projection whose rotary pairs are neighbours, (x[2i], x[2i + 1]).

    The canonical pairs are half of the rotated dimensions apart. Queries and keys are permuted alike, so their products
    stay the same. Without a rotation the rows are in order: None.
    """
    if layer.rotary is None:
        return None
    rotated = 2 * len(layer.rotary.inv_freqs)
    turned = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, layer.head_size)]
    num_turned = layer.num_heads + layer.num_kv_heads
    order = [h * layer.head_size + d for h in range(num_turned) for d in turned]
    return (*order, *range(num_turned * layer.head_size, layer.qkv_size))

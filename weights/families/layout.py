"""Builds Sources: `decoder` from a family's table of names, the other functions for single tensors.

Knows no family. Each function returns canonical names with their Sources, to be joined into one dict. `stored` is the
name in the file without `.weight` and `.bias`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Source

Names = Mapping[str, str | tuple[str, ...]]
"""A family's table: canonical names to those in the file, both without `.weight` and `.bias`.

An entry with {} stands for every block. A tuple names parts that the file has apart: query, key and value, or gate and
up.
"""

Part = tuple[str, int]
"""A linear's name in the file and its number of rows, [out, in]."""


def table(name: str, stored: str, num_rows: int, width: int) -> dict[str, Source]:
    """Return an embedding [num_rows, width]."""
    return {f"{name}.weight": Source(((f"{stored}.weight", (num_rows, width)),))}


def decoder(
    config: ModelConfig,
    names: Names,
    *,
    transpose: bool = False,
    qkv_order: Callable[[ModelConfig], tuple[int, ...] | None] | None = None,
) -> dict[str, Source]:
    """Return all tensors of `names`, in its order.

    transpose: the blocks' linears are stored as [in, out] (Conv1D). qkv_order gives the row order of "qkv".
    """
    order = qkv_order(config) if qkv_order else None
    sources: dict[str, Source] = {}
    for in_blocks, group in groupby(names.items(), lambda entry: "{}" in entry[0]):
        entries = list(group)
        for layer in range(config.num_layers if in_blocks else 1):
            for name, stored in entries:
                parts = tuple(part.format(layer) for part in ((stored,) if isinstance(stored, str) else stored))
                sources |= _named(config, name.format(layer), parts, transpose, order)
    return sources


def _named(
    config: ModelConfig, name: str, stored: tuple[str, ...], transpose: bool, qkv_order: tuple[int, ...] | None
) -> dict[str, Source]:
    """Return the weight and bias of one canonical name, as far as the configuration has them, in its sizes."""
    hidden, ffn = config.hidden_size, config.ffn_size
    num_q, num_kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    kind = name.rpartition(".")[2]
    if kind == "embed":
        return table(name, stored[0], config.vocab_size, hidden)
    if kind == "position":
        return table(name, stored[0], config.max_position, hidden)
    if kind == "head":
        return head(config, stored[0])
    if kind in ("q_norm", "k_norm"):
        whole = {"head": config.head_size, "projection": num_q if kind == "q_norm" else num_kv}
        return norm(config, name, stored[0], whole[config.qk_norm]) if config.qk_norm else {}
    if kind.endswith("_norm"):
        return norm(config, name, stored[0])
    linears = {  # rows of each part, columns, bias
        "qkv": ((num_q, num_kv, num_kv), hidden, config.qkv_bias),
        "attn_out": ((hidden,), num_q, config.attn_out_bias),
        "ffn_up": ((ffn,) * (1 + config.gated_ffn), hidden, config.ffn_bias),
        "ffn_down": ((hidden,), ffn, config.ffn_bias),
    }
    rows, num_in, bias = linears[kind]
    parts = list(zip(stored, rows, strict=True)) if len(stored) > 1 else [(stored[0], sum(rows))]
    order = qkv_order if kind == "qkv" else None
    return linear(name, parts, num_in, bias=bias, row_order=order, transpose=transpose)


def linear(
    name: str,
    parts: Sequence[Part],
    num_in: int,
    *,
    bias: bool,
    row_order: tuple[int, ...] | None = None,
    transpose: bool = False,
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


def expert(
    name: str, stored: str, shape: tuple[int, int, int], entry: int, row_order: tuple[int, ...] | None = None
) -> dict[str, Source]:
    """Return one expert's linear out of all experts' [experts, in, out], with its bias from `stored`_bias."""
    weights, biases = ((stored, shape),), ((f"{stored}_bias", (shape[0], shape[2])),)
    return {
        f"{name}.weight": Source(weights, transpose=True, entry=entry, row_order=row_order),
        f"{name}.bias": Source(biases, entry=entry, row_order=row_order),
    }


def norm(config: ModelConfig, name: str, stored: str, size: int | None = None) -> dict[str, Source]:
    """Return a norm of `size` (hidden_size unless given), as far as the configuration has its weight and bias."""
    shape = (size or config.hidden_size,)
    has = {"weight": config.norm_weight, "bias": config.norm_bias}
    return {f"{name}.{part}": Source(((f"{stored}.{part}", shape),)) for part, there in has.items() if there}


def head(config: ModelConfig, stored: str) -> dict[str, Source]:
    """Return the output projection, or nothing where it is the embedding."""
    if config.tied_head:
        return {}
    return linear("head", [(stored, config.vocab_size)], config.embed_size or config.hidden_size, bias=config.head_bias)


def heads_together(config: ModelConfig) -> tuple[int, ...] | None:
    """Return the row order of a fused projection stored head by head: each head's query, key and value in turn.

    With one key and value head for all queries (StarCoder) the rows are in order: None.
    """
    heads, size = config.num_heads, config.head_size
    if config.num_kv_heads != heads:
        return None
    return tuple((h * 3 + part) * size + d for part in range(3) for h in range(heads) for d in range(size))


def halves_apart(config: ModelConfig) -> tuple[int, ...]:
    """Return the row order of a fused projection whose rotary pairs are neighbours, (x[2i], x[2i + 1]).

    The canonical pairs are half of the rotated dimensions apart. Queries and keys are permuted alike, so their products
    stay the same.
    """
    rotary = config.rotaries[0]
    assert rotary is not None
    rotated = 2 * len(rotary.inv_freqs)
    turned = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, config.head_size)]
    num_turned = config.num_heads + config.num_kv_heads
    order = [h * config.head_size + d for h in range(num_turned) for d in turned]
    return (*order, *range(num_turned * config.head_size, config.qkv_size))

"""Builds Sources: the few ways in which files lay out linears, norms and heads, shared by all families.

Knows no family. Each function returns canonical names with their Sources, to be joined into one dict; `stored` is the
name in the file without `.weight` and `.bias`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Source

Part = tuple[str, int]
"""A linear's name in the file and its number of rows, [out, in]."""


def table(name: str, stored: str, num_rows: int, width: int) -> dict[str, Source]:
    """An embedding [num_rows, width]."""
    return {f"{name}.weight": Source(((f"{stored}.weight", (num_rows, width)),))}


def linear(
    name: str, parts: Sequence[Part], num_in: int, *, bias: bool, row_order: tuple[int, ...] | None = None
) -> dict[str, Source]:
    """One linear of several, one above the other, each stored as [out, in]."""
    weights = tuple((f"{stored}.weight", (num_out, num_in)) for stored, num_out in parts)
    sources = {f"{name}.weight": Source(weights, row_order=row_order)}
    if bias:
        biases = tuple((f"{stored}.bias", (num_out,)) for stored, num_out in parts)
        sources[f"{name}.bias"] = Source(biases, row_order=row_order)
    return sources


def conv1d(name: str, stored: str, num_in: int, num_out: int) -> dict[str, Source]:
    """A linear with bias stored as [in, out]: what GPT-1 and GPT-2 call a Conv1D."""
    return {
        f"{name}.weight": Source(((f"{stored}.weight", (num_in, num_out)),), transpose=True),
        f"{name}.bias": Source(((f"{stored}.bias", (num_out,)),)),
    }


def expert(
    name: str, stored: str, shape: tuple[int, int, int], entry: int, row_order: tuple[int, ...] | None = None
) -> dict[str, Source]:
    """One expert's linear out of all experts' [experts, in, out], with its bias out of `stored`_bias [experts, out]."""
    weights, biases = ((stored, shape),), ((f"{stored}_bias", (shape[0], shape[2])),)
    return {
        f"{name}.weight": Source(weights, transpose=True, entry=entry, row_order=row_order),
        f"{name}.bias": Source(biases, entry=entry, row_order=row_order),
    }


def norm(config: ModelConfig, name: str, stored: str, size: int | None = None) -> dict[str, Source]:
    """A norm of `size` (hidden_size unless given) with the parts that the configuration has."""
    shape = (size or config.hidden_size,)
    has = {"weight": config.norm_weight, "bias": config.norm_bias}
    return {f"{name}.{part}": Source(((f"{stored}.{part}", shape),)) for part, there in has.items() if there}


def head(config: ModelConfig, stored: str) -> dict[str, Source]:
    """The output projection, unless it is the embedding."""
    if config.tied_head:
        return {}
    return linear("head", [(stored, config.vocab_size)], config.embed_size or config.hidden_size, bias=config.head_bias)


def split_qkv(config: ModelConfig, prefix: str, q: str = "q_proj", k: str = "k_proj", v: str = "v_proj") -> list[Part]:
    """The parts of a fused projection that is stored as three."""
    num_q, num_kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    return [(f"{prefix}{q}", num_q), (f"{prefix}{k}", num_kv), (f"{prefix}{v}", num_kv)]


def heads_together(num_heads: int, head_size: int) -> tuple[int, ...]:
    """The row order for rows stored head by head, each head's query, key and value one after the other."""
    return tuple(
        (h * 3 + part) * head_size + d for part in range(3) for h in range(num_heads) for d in range(head_size)
    )


def halves_apart(config: ModelConfig, rotated: int) -> tuple[int, ...]:
    """The row order of a fused projection whose rotary pairs are neighbours, (x[2i], x[2i + 1]), not halves apart.

    Queries and keys are permuted alike, so that their products stay what they were.
    """
    turned = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, config.head_size)]
    num_turned = config.num_heads + config.num_kv_heads
    order = [h * config.head_size + d for h in range(num_turned) for d in turned]
    return (*order, *range(num_turned * config.head_size, config.qkv_size))

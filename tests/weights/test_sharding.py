"""The shares of all ranks together are the model, each part once, for every family; what does not split is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptserve.engine.runner.memory import weight_bytes
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.errors import UnsupportedModelError
from gptserve.weights.families import FAMILIES, find_family, load_config
from gptserve.weights.families.family import RawConfig
from gptserve.weights.families.layout import linear
from gptserve.weights.sharding import WHOLE, Share
from tests.weights.families.known import KNOWN

TINY = ModelConfig("gpt2", 96, 64, 128, (LayerConfig(4, 2, 16, attention_scale=0.25, ffn_size=96),))


def read(name: str) -> ModelConfig:
    fields, _ = KNOWN[name]
    config = FAMILIES[fields["model_type"]].read_config(RawConfig(fields))
    return replace(config, layers=config.layers[:1])  # all layers are split alike


@pytest.mark.some(24)
@pytest.mark.parametrize("name", KNOWN)
def test_each_number_of_a_published_model_has_one_rank_or_is_shared_by_rule(name: str) -> None:
    config, size = read(name), 2
    is_whole = config.layers[0].recurrence is not None or config.qk_norm == "projection" or config.layer_input_size
    if is_whole or config.layers[0].num_heads % size:
        with pytest.raises(UnsupportedModelError):
            Share(0, size).of_config(config)
        return
    sources = find_family(config.model_type).sources
    shares = [Share(rank, size) for rank in range(size)]
    parts = [share.of_sources(config, sources(config)) for share in shares]

    assert parts[0].keys() == sources(config).keys()
    assert parts[1].keys() == {tensor for tensor in parts[0] if tensor.startswith("blocks.")}
    for share, part in zip(shares, parts, strict=True):
        of_rank = sources(share.of_config(config))
        assert {tensor: source.shape for tensor, source in part.items()} == {
            tensor: of_rank[tensor].shape for tensor in part
        }
    for tensor, whole in sources(config).items():
        held = [part[tensor] for part in parts if tensor in part and not part[tensor].is_zero]
        shapes = [source.shape for source in held]
        own = ("q_norm", "k_norm") if config.qk_norm == "own" else ()
        if tensor.startswith("blocks.") and tensor.split(".")[-2] in ("qkv", "ffn_up", "attn_gate", *own):
            rows = sorted(row for source in held for row in source.row_order or ())
            replicas = config.layers[0].head_size * 2 if config.layers[0].num_kv_heads == 1 and ".qkv." in tensor else 0
            assert len(rows) == whole.shape[0] + replicas
            # A shared expert is a part of a wider one: its rows and columns need not begin at 0.
            assert set(rows) == set(whole.row_order or range(whole.shape[0]))
        elif tensor.endswith(("attn_out.weight", "ffn_down.weight")):
            first, last = whole.columns or (0, whole.shape[1])
            middle = (first + last) // 2
            assert [source.columns for source in held] == [(first, middle), (middle, last)]
        elif tensor.endswith(("attn_out.bias", "ffn_down.bias")):
            assert shapes == [whole.shape]  # the first rank adds it, the other adds zeros
        elif not tensor.endswith("sinks"):
            assert shapes in ([whole.shape], [whole.shape] * 2)


def test_the_shares_hold_the_rows_and_columns_of_the_whole_and_the_bytes_that_are_counted(storyteller: Path) -> None:
    config = load_config(storyteller)
    layer = config.layers[1]
    half = layer.q_size // 2

    def held(share: Share) -> dict[str, torch.Tensor]:
        tensors = dict(Checkpoint(storyteller, config, share).stream(dtype=torch.float32, device="cpu"))
        assert sum(tensor.nbytes for tensor in tensors.values()) == sum(weight_bytes(config, 4, share=share).values())
        return tensors

    whole, first, second = held(WHOLE), held(Share(0, 2)), held(Share(1, 2))

    kv = layer.kv_size
    q, k, v = whole["blocks.1.qkv.weight"].split((layer.q_size, kv, kv))
    assert torch.equal(second["blocks.1.qkv.weight"], torch.cat((q[half:], k[kv // 2 :], v[kv // 2 :])))
    for name in ("blocks.1.attn_out.weight", "blocks.1.ffn_down.weight"):
        assert torch.equal(torch.cat((first[name], second[name]), dim=1), whole[name])
    assert torch.equal(first["embed.weight"], whole["embed.weight"])


def test_ranks_beyond_the_key_value_heads_share_them_as_their_heads_do() -> None:
    shares = [Share(rank, 4) for rank in range(4)]

    assert [share.of_config(TINY).layers[0].num_kv_heads for share in shares] == [1] * 4
    keys = [
        share.of_sources(TINY, linear("blocks.0.qkv", [("qkv", TINY.layers[0].qkv_size)], 64, bias=False))[
            "blocks.0.qkv.weight"
        ].row_order
        or ()
        for share in shares
    ]
    assert [rows[16] for rows in keys] == [64, 64, 80, 80]  # after 16 rows of a query head, the first of the key head


def test_alibi_slopes_go_with_their_heads() -> None:
    layer = replace(TINY.layers[0], num_kv_heads=4, alibi_slopes=(0.5, 0.25, 0.125, 0.0625))

    assert Share(1, 2).of_config(replace(TINY, layers=(layer,))).layers[0].alibi_slopes == (0.125, 0.0625)


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return the configuration with other fields, of its own or of all layers."""
    of_layers = {name: changes.pop(name) for name in LayerConfig.__slots__ if name in changes}
    return replace(config.change_layers(lambda layer: replace(layer, **of_layers)), **changes)


@pytest.mark.parametrize(
    ("size", "changes", "why"),
    [
        (3, {}, "its 4 heads are no multiple of 3"),
        (8, {}, "its 4 heads are no multiple of 8"),
        (
            4,
            {"num_heads": 24, "num_kv_heads": 6},
            "4 is neither a divisor nor a multiple of its 6 key-value heads",
        ),
        (2, {"ffn_size": 97}, "its feed-forward's width of 97 is no multiple of 2"),
        (2, {"qk_norm": "projection"}, "its norm of queries and keys (qk_norm) is over all heads"),
    ],
)
def test_what_does_not_split_is_refused(size: int, changes: dict[str, object], why: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        Share(0, size).of_config(changed(TINY, **changes))

    assert str(refused.value) == f"a gpt2 of this shape cannot be split among {size} ranks: {why}"

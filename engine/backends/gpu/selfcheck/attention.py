"""A backend compared with the reference on the layers of a model, before the model is served with it.

attention_choice.py calls it for a backend that is compiled on the spot, by a compiler and for a device that no test has
seen. The comparison also compiles what steps need later; where it is proved, they find that in Triton's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.model.attention import AttentionBackend, AttentionMetadata, AttentionSpec

STEPS = {
    "decoding": ((1, 1, 1), (700, 17, 1)),
    "a prompt": ((300, 1), (300, 40)),
    "a chunk and decoding": ((290, 1, 10), (600, 530, 10)),
}
"""Rows of each sequence and the tokens that it then has: contexts of one piece and of several, many rows and few."""
_ROWS_BEYOND, _BEYOND = 40, 300
"""Rows of one more step for layers with a window, and by how many tokens its context exceeds the window."""
_MOST_TOKENS = 1 << 15
"""Of such a context: random keys and values of 8 heads of 128 take 0.25 GiB of the host's memory in fp32."""
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of 1 plus the size of an output: some units in the last place of the dtype that probabilities are rounded to."""


def disagreement(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    max_model_len: int,
    *,
    exact: bool,
) -> str | None:
    """Return how it differs from the reference in any of the layers, or None.

    If `exact`, a row must also have the same bits alone as in its step. Windows of which no context up to max_model_len
    hides a token, or only one that is too long to be compared, are compared as if they hid none.
    """
    for spec in {(spec.window, spec.scale): spec for spec in specs}.values():
        if spec.sinks is not None:
            spec = replace(spec, sinks=torch.linspace(-1, 4, spec.num_heads, device=device))
        steps = STEPS
        longest = min(max_model_len, _MOST_TOKENS, (spec.window or 0) + _BEYOND)
        if spec.window is not None and longest > spec.window:
            steps = STEPS | {"a long context": ((min(_ROWS_BEYOND, longest),), (longest,))}
        for name, (query_lens, kv_lens) in steps.items():
            if found := _disagreement_in(query_lens, kv_lens, backend, spec, device, dtype, block_size, exact=exact):
                return f"{found} for {name} with a window of {spec.window}"
    return None


def shapes_of(specs: Sequence[AttentionSpec]) -> list[str]:
    """Return what the comparison depends on of these layers: all but the numbers of their sinks."""
    return sorted(
        {
            repr(replace(spec, alibi_slopes=None, sinks=None))
            + f"{_numbers(spec.alibi_slopes)} {spec.sinks is not None}"
            for spec in specs
        }
    )


def _numbers(slopes: Tensor | None) -> list[float] | None:
    numbers: list[float] | None = None if slopes is None else slopes.tolist()
    return numbers


def _disagreement_in(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    backend: AttentionBackend,
    spec: AttentionSpec,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    *,
    exact: bool,
) -> str | None:
    """Return how the backend differs in one layer and step of random numbers."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-kv_len // block_size) for kv_len in kv_lens]
    blocks = torch.randperm(sum(num_blocks), generator=generator).int().split_with_sizes(num_blocks)
    tables_SN = pad_sequence(list(blocks), batch_first=True)
    metadata = _metadata(query_lens, kv_lens, tables_SN, block_size, device)
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    shape = (2, sum(num_blocks), spec.num_kv_heads, block_size, spec.head_size)
    cache = torch.randn(shape, generator=generator).to(device, dtype)
    qkv = torch.randn(len(metadata.slots_T), sum(heads), spec.head_size, generator=generator).to(device, dtype)
    query, key, value = qkv.split_with_sizes(heads, 1)

    its_cache = cache.clone()
    ReferenceAttention().write(key, value, cache, metadata)
    backend.write(key, value, its_cache, metadata)
    if not torch.equal(cache, its_cache):
        return "it stores other keys and values than 'reference'"
    expected = ReferenceAttention().attend(query, cache, metadata, spec)
    out = backend.attend(query, cache, metadata, spec)
    if (difference := _difference(out, expected)) is not None:
        return f"it differs from 'reference' by {difference:.1e}"
    alone = _metadata((1,), kv_lens[-1:], tables_SN[-1:], block_size, device)
    last = metadata.query_starts[-1] - 1
    row = backend.attend(query[last : last + 2], cache, alone, spec)[0]
    if (difference := _difference(row, expected[last])) is not None:
        return f"a row alone differs from 'reference' by {difference:.1e}"
    if exact and not torch.equal(row, out[last]):
        return "a row has other bits alone than in its step,"
    return None


def _difference(found: Tensor, expected: Tensor) -> float | None:
    """Return the largest difference, as a share of 1 plus the size of the number; None if rounding explains it."""
    difference: float = ((found.float() - expected.float()).abs() / (1 + expected.float().abs())).max().item()
    return None if difference <= _TOLERANCES[expected.dtype] else difference  # false where it is NaN


def _metadata(
    query_lens: Sequence[int], kv_lens: Sequence[int], tables_SN: Tensor, block_size: int, device: torch.device
) -> AttentionMetadata:
    """Return the metadata of a step with one row of padding."""
    starts, slots = (0, *accumulate(query_lens)), []
    for table_N, query_len, kv_len in zip(tables_SN.long(), query_lens, kv_lens, strict=True):
        positions = torch.arange(kv_len - query_len, kv_len)
        slots.append(table_N[positions // block_size] * block_size + positions % block_size)
    return AttentionMetadata(
        query_starts=starts,
        kv_lens=tuple(kv_lens),
        query_starts_S1=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lens_S=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_tables_SN=tables_SN.to(device),
        slots_T=torch.cat([*slots, torch.tensor([-1])]).to(device),
    )

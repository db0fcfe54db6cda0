"""Attention in plain torch, one sequence at a time, for any device and dtype. Tests compare the kernels with it.

It gathers the keys and values of a sequence from its blocks and multiplies them with bmm in fp32, in groups of one
size. So on a CPU the bits of a row depend neither on other rows nor on masked positions after it. Shape letters as in
engine/model/attention.py, with L rows and K keys of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gptserve.engine.model.attention import AttentionMetadata, AttentionSpec
from gptserve.engine.model.kv_rows import SCALE_BYTES

_MIN_ROWS = 4
"""bmm sums fewer rows in another order in fp32."""
_KEYS = 128
"""Keys are padded to a multiple of this, and values are summed in groups of it: bmm and softmax split longer sums
differently for different lengths."""
_LARGEST_CODE = 127.0
_NO_MAGNITUDE = 2.0**-100
"""Rows of the cache whose elements are below it become zeros in int8: their scale might have no inverse."""


class ReferenceAttention:
    """The AttentionBackend for devices and dtypes without a kernel."""

    name = "reference"
    build = ""

    def scratch_bytes(self, max_model_len: int, head_size: int, num_threads: int) -> int:
        return 0

    def write(self, key_TGD: Tensor, value_TGD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata) -> None:
        num_rows, block_size = metadata.query_starts[-1], cache_2NGBD.shape[3]
        slots = metadata.slots_T[:num_rows]
        blocks, offsets = slots // block_size, slots % block_size
        for rows_NGBD, rows_TGD in zip(cache_2NGBD, (key_TGD[:num_rows], value_TGD[:num_rows]), strict=True):
            rows_NGBD[blocks, :, offsets] = coded(rows_TGD) if rows_NGBD.dtype is torch.int8 else rows_TGD

    def attend(
        self, query_THD: Tensor, cache_2NGBD: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        out_THD = torch.zeros_like(query_THD, memory_format=torch.contiguous_format)
        block_size = cache_2NGBD.shape[3]
        starts = metadata.query_starts
        for s, kv_len in enumerate(metadata.kv_lens):
            num_blocks = -(-kv_len // block_size)
            gathered_2NGBD = cache_2NGBD[:, metadata.block_tables_SN[s, :num_blocks]]
            gathered_2GKD = gathered_2NGBD.transpose(1, 2).flatten(2, 3)[:, :, :kv_len]
            floats_2GKD = decoded(gathered_2GKD) if gathered_2GKD.dtype is torch.int8 else gathered_2GKD.float()
            rows = slice(starts[s], starts[s + 1])
            out_THD[rows] = _attend_one(query_THD[rows].float(), floats_2GKD[0], floats_2GKD[1], spec)
        return out_THD


def coded(rows_XD: Tensor) -> Tensor:
    """Return rows of the cache, int8 [..., D + SCALE_BYTES]: codes of -127 to 127, then their scale in fp32.

    A row with an element that is not finite has the scale NaN. Kernels write the same bytes.
    """
    rows_XD = rows_XD.float()
    largest_X1 = rows_XD.abs().amax(-1, keepdim=True)
    is_coded_X1 = largest_X1.isfinite() & (largest_X1 >= _NO_MAGNITUDE)
    most = torch.tensor(_LARGEST_CODE, device=rows_XD.device)  # a number divided by a tensor is rounded twice
    codes_XD = torch.where(is_coded_X1, (rows_XD * (most / largest_X1)).round(), 0).to(torch.int8)
    scales_X1 = torch.where(largest_X1.isfinite(), largest_X1 / most, float("nan"))
    scales_X1 = scales_X1.masked_fill(largest_X1 < _NO_MAGNITUDE, 0)
    return torch.cat([codes_XD, scales_X1.contiguous().view(torch.int8)], -1)


def decoded(rows_XD: Tensor) -> Tensor:
    """Return what such rows stand for, fp32 [..., D]."""
    codes_XD, scales_X4 = rows_XD[..., :-SCALE_BYTES], rows_XD[..., -SCALE_BYTES:]
    return codes_XD * scales_X4.contiguous().view(torch.float32)


def _attend_one(query_LHD: Tensor, key_GKD: Tensor, value_GKD: Tensor, spec: AttentionSpec) -> Tensor:
    """Return [L, H, D] in fp32. The L rows are the last L of K positions."""
    num_rows, num_keys = query_LHD.shape[0], key_GKD.shape[1]
    if num_rows < _MIN_ROWS:
        query_LHD = torch.cat([query_LHD, query_LHD[-1:].expand(_MIN_ROWS - num_rows, -1, -1)])
    key_GKD, value_GKD = (pad(x_GKD, (0, 0, 0, -num_keys % _KEYS)) for x_GKD in (key_GKD, value_GKD))
    group = spec.num_heads // spec.num_kv_heads
    key_HKD = key_GKD.repeat_interleave(group, dim=0)
    value_HKD = value_GKD.repeat_interleave(group, dim=0)
    scores_HLK = torch.bmm(query_LHD.transpose(0, 1), key_HKD.transpose(1, 2)) * spec.scale
    if spec.softcap is not None:
        scores_HLK = spec.softcap * torch.tanh(scores_HLK / spec.softcap)
    last = torch.arange(num_keys - num_rows, num_keys, device=query_LHD.device)
    last_L1 = torch.cat([last, last[-1:].expand(query_LHD.shape[0] - num_rows)])[:, None]
    keys_K = torch.arange(key_GKD.shape[1], device=query_LHD.device)
    if spec.alibi_slopes is not None:
        scores_HLK += spec.alibi_slopes[:, None, None] * (keys_K - last_L1)
    hidden_LK = keys_K > last_L1
    if spec.window is not None:
        hidden_LK |= keys_K <= last_L1 - spec.window
    scores_HLK.masked_fill_(hidden_LK, float("-inf"))
    if spec.sinks is None:
        probs_HLK = scores_HLK.softmax(-1)
    else:  # put first, so that masked positions after it do not change the order of summation
        sinks_HL1 = spec.sinks[:, None, None].expand(-1, len(query_LHD), 1)
        probs_HLK = torch.cat([sinks_HL1, scores_HLK], -1).softmax(-1)[..., 1:].contiguous()
    out_HLD = torch.zeros_like(query_LHD.transpose(0, 1))
    for first in range(0, key_HKD.shape[1], _KEYS):
        group_of_keys = slice(first, first + _KEYS)
        out_HLD += torch.bmm(probs_HLK[:, :, group_of_keys], value_HKD[:, group_of_keys])
    return out_HLD.transpose(0, 1)[:num_rows]

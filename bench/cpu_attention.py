"""Time one layer of attention: the CPU kernel against torch formulations, in the same run.

`reference` is the paged torch backend. `bmm` is bmm + softmax + bmm over a contiguous cache [B, H, T, D], the best that
torch offers without paging. It pads to the longest sequence, masks only if lengths differ, and computes prompts in
blocks of 128 rows. Caches rotate over copies larger than the CPU's last-level cache. Prints a table in microseconds,
with the ratio to bmm, and one JSON line. It reports the fastest twentieth of many calls, so that other work on the
machine counts little.

    python -m bench.cpu_attention [--dtype bfloat16] [--heads 12] [--kv-heads 12] [--head-size 64] [--instructions avx2]
        [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench.machine import versions
from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.model.attention import AttentionMetadata, AttentionSpec

BLOCK_SIZE = 16
ROTATED_BYTES = 192 << 20
PROMPT_ROWS = 128


@dataclass(frozen=True)
class Case:
    """query_lens[s] new tokens of sequence s, which then has kv_lens[s]."""

    name: str
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """The inputs of one layer: the same keys and values, paged and padded."""

    query_THD: Tensor
    key_TGD: Tensor
    value_TGD: Tensor
    cache_2NGBD: Tensor
    key_SGKD: Tensor
    value_SGKD: Tensor


def main() -> None:
    args = _parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    native.set_num_threads(torch.get_num_threads())
    dtype = getattr(torch, args.dtype)
    spec = AttentionSpec(args.heads, args.kv_heads, args.head_size, args.head_size**-0.5)
    rows = [(case.name, _measure(case, spec, dtype, args)) for case in _cases(args.max_batch)]
    print(f"{'us a layer':<22}{'write':>9}{'cpu':>9}{'bmm':>9}{'reference':>11}{'bmm/cpu':>9}")
    for name, us in rows:
        numbers = f"{us['write']:>9.1f}{us['cpu']:>9.1f}{us['bmm']:>9.1f}{us['reference']:>11.1f}"
        print(f"{name:<22}{numbers}{us['bmm'] / us['cpu']:>9.2f}")
    print(json.dumps({"bench": "attention", **versions(), "dtype": args.dtype, "spec": asdict(spec), "rows": rows}))


def _measure(case: Case, spec: AttentionSpec, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, float]:
    kernel, reference = CpuAttention(args.instructions), ReferenceAttention()
    metadata = _metadata(case)
    layers = _layers(case, metadata, spec, dtype)
    calls: dict[str, Callable[[Layer], Tensor | None]] = {
        "write": lambda x: kernel.write(x.key_TGD, x.value_TGD, x.cache_2NGBD, metadata),
        "cpu": lambda x: kernel.attend(x.query_THD, x.cache_2NGBD, metadata, spec),
        "bmm": lambda x: _bmm(x, case, spec),
        "reference": lambda x: reference.attend(x.query_THD, x.cache_2NGBD, metadata, spec),
    }
    return _fastest_us(calls, layers, args.seconds)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=12)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--instructions", choices=CpuAttention.supported_instructions())
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case")
    return parser.parse_args()


def _cases(max_batch: int) -> list[Case]:
    cases = []
    for batch in (1, 8, 32):
        if batch > max_batch:
            continue
        cases.append(Case(f"decode {batch} x 512", (1,) * batch, (512,) * batch))
        if batch > 1:
            ragged = tuple(64 + 448 * s // (batch - 1) for s in range(batch))
            cases.append(Case(f"decode {batch} x 64..512", (1,) * batch, ragged))
    cases += [Case(f"prompt {length}", (length,), (length,)) for length in (128, 512, 1024)]
    cases.append(Case("chunk 128 of 1024", (128,), (1024,)))
    return cases


def _metadata(case: Case) -> AttentionMetadata:
    num_blocks = [-(-kv_len // BLOCK_SIZE) for kv_len in case.kv_lens]
    block_ids = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.nn.utils.rnn.pad_sequence(list(torch.split(block_ids, num_blocks)), batch_first=True).contiguous()
    starts, slots = [0], []
    for s, (query_len, kv_len) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        starts.append(starts[-1] + query_len)
        positions = torch.arange(kv_len - query_len, kv_len)
        slots.append(tables[s, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
    return AttentionMetadata(
        query_starts=tuple(starts),
        kv_lens=case.kv_lens,
        query_starts_S1=torch.tensor(starts, dtype=torch.int32),
        kv_lens_S=torch.tensor(case.kv_lens, dtype=torch.int32),
        block_tables_SN=tables,
        slots_T=torch.cat(slots),
    )


def _layers(case: Case, metadata: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> list[Layer]:
    num_blocks = int(metadata.block_tables_SN.max()) + 1
    layers: list[Layer] = []
    while not layers or len(layers) * layers[0].cache_2NGBD.nbytes < ROTATED_BYTES:
        num_rows = spec.num_heads + 2 * spec.num_kv_heads
        qkv_TXD = torch.randn(metadata.query_starts[-1], num_rows, spec.head_size).to(dtype)
        query, key, value = torch.split(qkv_TXD, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        cache = torch.randn(2, num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_size).to(dtype)
        padded = cache[:, metadata.block_tables_SN].transpose(2, 3).flatten(3, 4)[..., : max(case.kv_lens), :]
        layers.append(Layer(query, key, value, cache, padded[0].contiguous(), padded[1].contiguous()))
    return layers


def _bmm(x: Layer, case: Case, spec: AttentionSpec) -> Tensor:
    if len(case.kv_lens) == 1 and case.query_lens[0] > 1:
        return _bmm_prompt(x, case.kv_lens[0], spec)
    num_seqs, num_kv_heads, kv_len, head_size = x.key_SGKD.shape
    query = x.query_THD.reshape(num_seqs * num_kv_heads, -1, head_size)
    scores = torch.bmm(query, x.key_SGKD.view(-1, kv_len, head_size).transpose(1, 2)) * spec.scale
    if len(set(case.kv_lens)) > 1:
        hidden = torch.arange(kv_len) >= torch.tensor(case.kv_lens)[:, None, None, None]
        scores = scores.view(num_seqs, num_kv_heads, -1, kv_len).masked_fill(hidden, -torch.inf).flatten(0, 1)
    return torch.bmm(scores.softmax(-1), x.value_SGKD.view(-1, kv_len, head_size))


def _bmm_prompt(x: Layer, kv_len: int, spec: AttentionSpec) -> Tensor:
    query_len = len(x.query_THD)
    group = spec.num_heads // spec.num_kv_heads
    query_HLD = x.query_THD.transpose(0, 1)
    key_HKD, value_HKD = (y[0].repeat_interleave(group, 0) for y in (x.key_SGKD, x.value_SGKD))
    blocks = []
    for row in range(0, query_len, PROMPT_ROWS):
        end = min(row + PROMPT_ROWS, query_len)
        past = kv_len - query_len
        scores = torch.bmm(query_HLD[:, row:end], key_HKD[:, : past + end].transpose(1, 2)) * spec.scale
        hidden = torch.arange(past + end) > torch.arange(past + row, past + end)[:, None]
        blocks.append(torch.bmm(scores.masked_fill_(hidden, -torch.inf).softmax(-1), value_HKD[:, : past + end]))
    return torch.cat(blocks, 1)


def _fastest_us(
    calls: dict[str, Callable[[Layer], Tensor | None]], layers: list[Layer], seconds: float
) -> dict[str, float]:
    """Time the calls in turn, so that all of them meet the same weather."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(layers[0])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["cpu"]) < 8:
        for name, call in calls.items():
            for layer in layers[:: max(1, len(layers) // 16)]:
                start = time.perf_counter()
                call(layer)
                times[name].append((time.perf_counter() - start) * 1e6)
    return {name: sorted(measured)[len(measured) // 20] for name, measured in times.items()}


if __name__ == "__main__":
    main()

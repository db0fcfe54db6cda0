"""The logits of llama.cpp, for bench/int8_quality.py: by cyllama, whose wheels have llama.cpp built.

    python -m bench.int8_quality MODEL TEXT --sides --tokens-to TOKENS.json
    ~/peers/bin/python -m bench.llama_logits MODEL TOKENS.json Q8_0.npy [--type Q8_0]
    python -m bench.int8_quality MODEL TEXT --logits Q8_0=Q8_0.npy

MODEL may be a GGUF file, which is computed as it is; a folder is written into one of --type, which takes GPT-2's and
Llama's shapes. It runs in an environment of its own with cyllama, gguf, safetensors and torch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import write_gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder, or GGUF file")
    parser.add_argument("tokens", type=Path, help="windows of token ids, in JSON")
    parser.add_argument("output", type=Path, help="gets the fp32 logits [windows, window - 1, vocab]")
    parser.add_argument("--type", default="Q8_0", help="of the weights: F32, BF16, Q8_0, …")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    windows = json.loads(args.tokens.read_text(encoding="utf-8"))
    vocab_size = vocab_size_of(args.model)
    shape = len(windows), len(windows[0]) - 1, vocab_size
    logits = np.lib.format.open_memmap(args.output, "w+", np.float32, shape)
    with tempfile.TemporaryDirectory() as name:
        path = args.model
        if path.is_dir():
            path = Path(name) / "model.gguf"
            write_gguf(args.model, path, args.type)
        context = make_context(path, len(windows[0]), vocab_size, args.threads)
        for rows, ids in zip(logits, windows, strict=True):
            compute(context, ids[:-1], rows)


def vocab_size_of(model: Path) -> int:
    """Return how many tokens a folder or a GGUF file has."""
    if model.is_dir():
        return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    from gguf import GGUFReader

    return len(GGUFReader(model).fields["tokenizer.ggml.tokens"].data)


def make_context(path: Path, window: int, vocab_size: int, threads: int) -> Any:
    from cyllama.llama import llama_cpp as ll

    class Model(ll.LlamaModel):  # type: ignore[misc]
        n_vocab = vocab_size  # cyllama 0.2.18 reads it, and lacks it

    ll.disable_logging()
    params = ll.LlamaContextParams()
    params.n_ctx = params.n_batch = params.n_ubatch = window
    params.n_threads = params.n_threads_batch = threads
    return ll.LlamaContext(Model(str(path), ll.LlamaModelParams()), params)


def compute(context: Any, ids: list[int], out: np.ndarray[Any, Any]) -> None:
    """Write the logits of each of these tokens to `out` [tokens, vocab]."""
    from cyllama.llama import llama_cpp as ll

    context.kv_cache_clear()
    batch = ll.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for position, token in enumerate(ids):
        batch.add(token, position, [0], True)
    context.decode(batch)
    for position in range(len(ids)):
        out[position] = context.get_logits_ith(position)


if __name__ == "__main__":
    main()

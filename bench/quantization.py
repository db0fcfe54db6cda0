"""How often bf16 and int8 pick the greedy token of fp32, by how close the two likeliest tokens are.

    python -m bench.quantization [--prompts 8] [--prompt-len 256]

The model has GPT-2 124M's shape and random weights. Four of its 768 channels are twenty times as large as the rest, in
the embeddings and in all that layers add to them, as in GPT-2's residual stream. Random weights leave the two likeliest
tokens closer than trained ones do. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.machine import versions
from bench.models import write_model
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.request import Request, SamplingParams, TokenLogprobs

OUTLIERS = [37, 138, 378, 447]
SIDES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
}
CLOSEST = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
"""Shares of the positions that are left out: those where the two likeliest tokens are closest."""


def main() -> None:
    args = parse_arguments()
    prompts = torch.randint(50257, (args.prompts, args.prompt_len), generator=torch.Generator().manual_seed(1)).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_with_outliers(folder)
        exact = scores(folder, prompts, dtype="float32")
        found = {side: scores(folder, prompts, dtype="bfloat16", **options) for side, options in SIDES.items()}
    margins = torch.tensor([entry.top[0][1] - entry.top[1][1] for entry in exact])
    likeliest = {side: [entry.top[0][0] for entry in its] for side, its in found.items()}
    expected = torch.tensor([entry.top[0][0] for entry in exact])
    equal = {side: torch.tensor(its) == expected for side, its in likeliest.items()}
    rows = []
    print(f"{'left out':>9} {'margin':>7} " + " ".join(f"{side:>7}" for side in SIDES))
    for closest in CLOSEST:
        margin = margins.quantile(closest).item() if closest else 0.0
        shares = {side: its[margins >= margin].double().mean().item() for side, its in equal.items()}
        rows.append({"left_out": closest, "margin": margin, **shares})
        print(f"{closest:>9.0%} {margin:>7.3f} " + " ".join(f"{share:>7.2%}" for share in shares.values()))
    print(json.dumps({"benchmark": "quantization", **vars(args), "rows": rows, **versions()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=256)
    return parser.parse_args()


def write_with_outliers(folder: Path) -> None:
    write_model(folder, "gpt2")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if name.endswith(("wte.weight", "wpe.weight", "c_proj.weight", "c_proj.bias")):
            tensor[..., OUTLIERS] *= 20
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def scores(folder: Path, prompts: list[list[int]], **options: Any) -> list[TokenLogprobs]:
    """Return the two likeliest tokens at each position of the prompts."""
    engine = Engine(EngineConfig(model_dir=folder, device="cpu", kv_cache_bytes=2**27, **options))
    sampling, entries = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=2), []
    for prompt in prompts:  # one after the other, in the order of the prompts
        engine.add(Request("", tuple(prompt), sampling, seed=0))
        while engine.has_work:
            for output in engine.step():
                entries += [entry for entry in output.prompt_logprobs or () if entry is not None]
    return entries


if __name__ == "__main__":
    main()

"""A copy of a model that is trained a little, so that its weights leave the grid of a quantized file they came from.

    python -m bench.fine_tune MODEL TEXT OUTPUT [--steps 40] [--lr 1e-4] [--batch 4] [--window 128]

Weights that were once in 4 or 8 bits lie on few multiples of a scale, which flatters types with the same blocks. Takes
AdamW steps over random windows of the text and writes a folder in bf16, for bench/int8_quality.py.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

from gptserve.weights.tokenizers.tokenizer import Tokenizer

WARM_UP = 8  # steps: Adam's first ones move each weight by the whole learning rate


def main() -> None:
    from transformers import AutoModelForCausalLM

    args = parse_arguments()
    tokens = torch.tensor(Tokenizer.of_model(args.model).encode(args.text.read_text(encoding="utf-8")))
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        starts = torch.randint(len(tokens) - args.window, (args.batch, 1), generator=generator)
        ids = tokens[starts + torch.arange(args.window)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / WARM_UP)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.to(torch.bfloat16)
    moved = [
        (p.float() - before[name]).abs() / before[name].abs().mean()
        for name, p in model.named_parameters()
        if p.dim() > 1
    ]
    changed = sum(float((m > 0).sum()) for m in moved) / sum(m.numel() for m in moved)
    size = sum(m.mean().item() * m.numel() for m in moved) / sum(m.numel() for m in moved)
    print(f"{changed:.1%} of the weights changed, by {size:.2%} of the mean weight")
    model.save_pretrained(args.output)
    for path in args.model.iterdir():
        if path.is_file() and not (args.output / path.name).exists() and path.suffix != ".safetensors":
            shutil.copy(path, args.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder")
    parser.add_argument("text", type=Path, help="UTF-8 file")
    parser.add_argument("output", type=Path, help="folder for the copy")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()

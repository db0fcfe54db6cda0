"""Write docs/parity.md: `python -m tests.parity.table`. For every shape, the largest difference in a logit."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.parity.test_families import largest_difference

TARGET = Path(__file__).parents[2] / "docs" / "parity.md"
INTRODUCTION = """# Parity with transformers

Tiny models of random weights, written by `transformers` {transformers} and computed here (torch {torch}) in fp32 over
five ragged prompts in chunks and from the cache: the largest difference in any logit, by attention backend. Logits
themselves spread over several units. The tests require less than 1e-4 of every shape, 64 equal greedy ids, and equal
tensors from shards and from bf16 files.

| Shape | model_type | reference | cpu |
|---|---|---|---|
"""


def main() -> None:
    rows = []
    for name, (model_type, fields) in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), model_type, fields)
            differences = [largest_difference(Path(folder), kind()) for kind in (ReferenceAttention, CpuAttention)]
        rows.append(f"| {name} | `{model_type}` | " + " | ".join(f"{value:.1e}" for value in differences) + " |")
    versions = {library: version(library).partition("+")[0] for library in ("transformers", "torch")}
    TARGET.write_text(INTRODUCTION.format(**versions) + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

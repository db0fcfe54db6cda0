"""Write docs/dev/parity.md: `python -m tests.parity.table`.

For every shape the largest difference in a logit, for every tokenizer how many texts have the ids of transformers.
"""

from __future__ import annotations

import random
import tempfile
from importlib.metadata import version
from pathlib import Path

from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.parity.test_families import largest_difference
from tests.weights.tiny_tokenizers import BY_LIBRARY, CORPUS, FAMILIES

TARGET = Path(__file__).parents[2] / "docs" / "dev" / "parity.md"
NUM_TEXTS = 2000
INTRODUCTION = """# Parity with transformers

Tiny models of random weights, written by `transformers` {transformers} and computed here (torch {torch}) in fp32 over
five ragged prompts in chunks and from the cache: the largest difference in any logit, by attention backend. Logits
themselves spread over several units. The tests require less than 1e-4 of every shape, 64 equal greedy ids, and equal
tensors from shards and from bf16 files.

SmolLM2-135M-Instruct's GGUF file in Q4_1, whose logits reach 40, 255 positions of English: fp32 here is off from fp64
by at most 3.3e-5 (4.7e-6 root mean square), `transformers` on the same file by 6.4e-5 (8.2e-6), one from the other by
6.4e-5.

| Shape | model_type | reference | cpu |
|---|---|---|---|
"""
TOKENIZERS = """
Tiny tokenizers with the steps and flags of each lineage's tokenizer.json: how many of {num_texts:,} random texts have
the ids of `transformers` (pieces of code, prose in several scripts and any characters at all, special tokens read as
text).

These are the ids of tokenizer.json by its own rules. `transformers` 5 builds a tokenizer anew where
tokenizer_config.json names a class with rules of its own, such as `LlamaTokenizer`, and takes little more than the
vocabulary from the file. Where the file has other rules, as Llama 2's for a text that begins with a space, the ids
differ: gptserve follows the file.

| Tokenizer | encoded by | equal |
|---|---|---|
"""


def main() -> None:
    versions = {library: version(library).partition("+")[0] for library in ("transformers", "torch")}
    lines = [INTRODUCTION.format(**versions), *map(model_row, SHAPES), TOKENIZERS.format(num_texts=NUM_TEXTS)]
    TARGET.write_text("".join([*lines, *map(tokenizer_row, FAMILIES)]), encoding="utf-8")


def model_row(name: str) -> str:
    model_type, fields = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), model_type, fields)
        differences = [largest_difference(Path(folder), kind()) for kind in (ReferenceAttention, CpuAttention)]
    return f"| {name} | `{model_type}` | " + " | ".join(f"{value:.1e}" for value in differences) + " |\n"


def tokenizer_row(name: str) -> str:
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=FAMILIES[name]()).save_pretrained(folder)
        theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.open(Path(folder))
    texts = [random_text(rng) for _ in range(NUM_TEXTS)]
    equal = sum(ours.encode_prompt(text) == theirs(text, split_special_tokens=True).input_ids for text in texts)
    return f"| {name} | {'tokenizers' if name in BY_LIBRARY else 'tiktoken'} | {equal:,} |\n"


def random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 6)):
        text = rng.choice(CORPUS)
        start = rng.randrange(len(text))
        parts.append(text[start : start + rng.randint(1, 40)])
        points = (rng.choice([rng.randrange(0x20, 0x3000), rng.randrange(0x3000, 0xD800)]) for _ in range(4))
        parts.append("".join(map(chr, points)))
    return "".join(parts)


if __name__ == "__main__":
    main()

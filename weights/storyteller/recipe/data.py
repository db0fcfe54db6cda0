"""Turn stories into rows of token ids: the tokenizer's training, and packing.

A row is as many whole stories as fit, each ended by the end-of-text token, then padding, which the loss ignores.
Half of the rows also begin with the end-of-text token, so that the model can start with or without it.
It knows the generator and the `tokenizers` library, but no model. `train.py` and `evaluate.py` call it.
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gptserve.weights.storyteller.recipe.generator import stories

END_OF_TEXT = "<|endoftext|>"
END_ID = 0  # the trainer numbers special tokens first
STORIES_AT_ONCE = 256


def train_tokenizer(vocab_size: int, num_stories: int) -> Tokenizer:
    """Learn a byte-level BPE with GPT-2's pre-tokenizer from the first stories of the training split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((story.text for story in stories("train", num_stories)), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Write tokenizer.json, vocab.json, merges.txt and tokenizer_config.json as GPT-2's repository has them."""
    folder.mkdir(parents=True, exist_ok=True)
    described = json.loads(tokenizer.to_str())
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]]
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_text(folder / "vocab.json", json.dumps(described["model"]["vocab"], ensure_ascii=False))
    write_text(folder / "merges.txt", "\n".join(["#version: 0.2", *merges]) + "\n")
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a second file and rename it, so that a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def encoded_stories(tokenizer: Tokenizer, first: int = 0) -> Iterator[list[int]]:
    """Yield the training stories from number `first` for ever, each ended by the end-of-text token."""
    while True:
        texts = [story.text for story in stories("train", STORIES_AT_ONCE, first)]
        for encoding in tokenizer.encode_batch(texts):
            yield [*encoding.ids, END_ID]
        first += STORIES_AT_ONCE


class Packer:
    """Fills rows with whole stories out of a small pool, the longest that still fits first after a random one."""

    def __init__(self, source: Iterator[list[int]], seed: int, pool_size: int = 64) -> None:
        self._source = source
        self._rng = random.Random(seed)
        self._pool = [next(source) for _ in range(pool_size)]

    def row(self, length: int) -> list[int]:
        """Return at most `length` token ids; `source` must hold stories that fit."""
        row = [END_ID] if self._rng.random() < 0.5 else []
        row += self._take(self._rng.randrange(len(self._pool)))
        assert len(row) <= length, f"a story of {len(row)} tokens does not fit into a row of {length}"
        while fitting := [i for i, tokens in enumerate(self._pool) if len(row) + len(tokens) <= length]:
            room = length - len(row)
            if room > 2 * max(len(tokens) for tokens in self._pool):
                row += self._take(self._rng.choice(fitting))
            else:
                row += self._take(max(fitting, key=lambda i: len(self._pool[i])))
        return row

    def rows(self, count: int, length: int) -> list[list[int]]:
        return [self.row(length) for _ in range(count)]

    def _take(self, index: int) -> list[int]:
        taken, self._pool[index] = self._pool[index], next(self._source)
        return taken

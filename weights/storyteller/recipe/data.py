"""Turn stories and conversations into rows of token ids: the tokenizer's training, the chat template, and packing.

A row is as many whole stories as fit, or one conversation. Each ends with the end-of-text token; half of the rows of
stories also begin with it, so that the model can start with or without it. Every token of a row has its weight in the
loss: 0 for one that is only read, such as those of a request.
It knows the generators and the `tokenizers` library, but no model. `train.py` and `evaluate.py` call it.
"""

import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gptserve.weights.storyteller.recipe.chat import Kind, Message, conversation
from gptserve.weights.storyteller.recipe.generator import stories

END_OF_TEXT = "<|endoftext|>"
END_ID = 0  # the trainer numbers special tokens first
STORIES_AT_ONCE = 256
ROWS_ON_A_SHELF = 512
FIRST_STORY_BESIDE_CHAT = 1_000_000  # those before it are left to the first stage

Token = tuple[int, float]  # id, weight

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
    config: dict[str, object] = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    if tokenizer.token_to_id(TURN_END) is not None:
        config["chat_template"] = CHAT_TEMPLATE
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_text(folder / "vocab.json", json.dumps(described["model"]["vocab"], ensure_ascii=False))
    write_text(folder / "merges.txt", "\n".join(["#version: 0.2", *merges]) + "\n")
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a second file and rename it, so that a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def encoded_stories(tokenizer: Tokenizer, first: int = 0) -> Iterator[list[Token]]:
    """Yield the training stories from number `first` for ever, each ended by the end-of-text token."""
    while True:
        texts = [story.text for story in stories("train", STORIES_AT_ONCE, first)]
        for encoding in tokenizer.encode_batch(texts):
            yield [(token, 1.0) for token in (*encoding.ids, END_ID)]
        first += STORIES_AT_ONCE


def add_chat_tokens(tokenizer: Tokenizer) -> None:
    """Give the two tokens of the chat template the next free ids."""
    tokenizer.add_special_tokens([TURN_START, TURN_END])


def encoded_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Return a conversation as the template writes it, with the start of an answer."""
    text = "".join(f"{TURN_START}{message.role}\n{message.content}{TURN_END}\n" for message in messages)
    return list(tokenizer.encode(f"{text}{TURN_START}assistant\n").ids)


def encoded_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Token]:
    """Return a conversation as the template writes it, of which the answers are to be learned."""
    row: list[Token] = []
    for message in messages:
        head = f"{TURN_START}{message.role}\n"
        encoding = tokenizer.encode(f"{head}{message.content}{TURN_END}\n")
        spans = [(start - len(head), end - len(head)) for start, end in encoding.offsets]
        row += [(token, weight(message, *span)) for token, span in zip(encoding.ids, spans, strict=True)]
    return [*row, (END_ID, 0.0)]


def weight(message: Message, start: int, end: int) -> float:
    """Return the weight of a token that stands at a span of a message's content, before it or behind it."""
    length = len(message.content) + (len(TURN_END) if message.is_whole else 0)
    if message.role != "assistant" or start < 0 or end > length:
        return 0.0
    return max((heavy for first, last, heavy in message.weighty if start < last and first < end), default=1.0)


def encoded_conversations(tokenizer: Tokenizer, longest: int, kind: Kind) -> Iterator[list[Token]]:
    """Yield the training conversations of at most `longest` tokens for ever."""
    for index in itertools.count():
        row = encoded_conversation(tokenizer, conversation("train", index, kind))
        if len(row) <= longest:
            yield row


def of_like_length(source: Iterator[list[Token]], size: int, seed: int) -> Iterator[list[list[Token]]]:
    """Yield batches of whole rows of about the same length, of at most `size` tokens with their padding.

    Unlike packed rows, no row has a request in it that is not its own, and every row begins at position 0.
    """
    rng = random.Random(seed)
    while True:
        shelf = sorted(itertools.islice(source, ROWS_ON_A_SHELF), key=len, reverse=True)
        batches = []
        while shelf:
            count = max(2, size // len(shelf[0]))  # one for each worker at least
            batches.append(shelf[:count])
            shelf = shelf[count:]
        rng.shuffle(batches)
        yield from (batch for batch in batches if len(batch) > 1)


class Packer:
    """Fills rows with whole stories out of a small pool, the longest that still fits first after a random one."""

    def __init__(self, source: Iterator[list[Token]], seed: int, pool_size: int = 64) -> None:
        self._source = source
        self._rng = random.Random(seed)
        self._pool = [next(source) for _ in range(pool_size)]

    def row(self, length: int) -> list[Token]:
        """Return at most `length` tokens; `source` must hold stories that fit."""
        row = [(END_ID, 1.0)] if self._rng.random() < 0.5 else []
        row += self._take(self._rng.randrange(len(self._pool)))
        assert len(row) <= length, f"a story of {len(row)} tokens does not fit into a row of {length}"
        while fitting := [i for i, tokens in enumerate(self._pool) if len(row) + len(tokens) <= length]:
            room = length - len(row)
            if room > 2 * max(len(tokens) for tokens in self._pool):
                row += self._take(self._rng.choice(fitting))
            else:
                row += self._take(max(fitting, key=lambda i: len(self._pool[i])))
        return row

    def rows(self, count: int, length: int) -> list[list[Token]]:
        return [self.row(length) for _ in range(count)]

    def _take(self, index: int) -> list[Token]:
        taken, self._pool[index] = self._pool[index], next(self._source)
        return taken

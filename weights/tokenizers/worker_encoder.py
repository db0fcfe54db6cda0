"""Encodes in worker processes by rules of the model's own, such as its regex, and knows which rules are known.

A regex may take time exponential in the text, and a normalizer may write a million characters for one. The rules that
are known here do neither: what has no others encodes in the server itself. Called by tokenizer.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

from gptserve.weights.errors import TokenizerError
from gptserve.weights.tokenizers.library_encoder import PREPEND, REPLACE, LibraryEncoder, describe
from gptserve.weights.tokenizers.tiktoken_encoder import PATTERNS
from gptserve.weights.tokenizers.vocabulary import MAX_STEPS, Vocabulary, steps_of
from gptserve.weights.workers import ForeignCodeError, Limits, Workers

LIMITS = Limits(open_cpu_s=60, open_memory_bytes=2**31)  # 256,000 tokens take 3.3 s and 0.4 GB
MAX_PIECE = 256  # characters; a Unigram model looks up pieces of all lengths at every character
MAX_POST_PROCESSOR = 10_000  # characters of its JSON, whose tokens go around every prompt

BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001 - the pattern has these characters
KNOWN_REGEXES = frozenset((*PATTERNS, BLOOM))

# One to three characters, each of a set, of which only the last may repeat: nothing comes after it, so it never has to
# give back what it took. DeepSeek Coder has such regexes. Not so \s+$: over n spaces it takes time in n squared.
SET = r"(?:\\p\{\w+\}|\\[dnrst]|[ \w]|\[\^?(?:[^][\\&]|\\[dnprst$+^|-])+\])"
ONE_REPEATS = re.compile(rf"(?:{SET}\??){{0,2}}{SET}(?:\+|\{{\d,\d\}})?")

# Not NFKC nor a map of characters, as XGLM has: one character becomes 18, and a request of 2 MB took 1.3 GB.
KNOWN_NORMALIZERS = ("NFC", "BertNormalizer")
KNOWN_SPLITTERS = (
    *("ByteLevel", "BertPreTokenizer", "Digits", "Metaspace"),
    *("Punctuation", "Whitespace", "WhitespaceSplit"),
)


class WorkerEncoder:
    """As LibraryEncoder. A text on which a worker dies has no tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        opener = f"{__name__}:open_encoder"
        self._workers = Workers(opener, describe(vocabulary), LIMITS)
        self.close = self._workers.close
        try:
            self._workers.open()
        except (ForeignCodeError, OSError) as fault:  # OSError: the system starts no process
            raise TokenizerError(f"the tokenizer does not open: {fault}") from fault

    def encode(self, text: str, *, special: bool = False, template: bool = False) -> list[int]:
        """Return the ids; with `special`, special tokens are found, with `template` a prompt's are added."""
        try:
            ids = self._workers.call(text=text, special=special, template=template)
        except ForeignCodeError as fault:
            raise TokenizerError(f"text cannot be encoded: {fault}") from fault
        assert isinstance(ids, list), "open_encoder returns ids"
        return ids


def open_encoder(descriptions: list[str | None]) -> Callable[..., list[int]]:
    """Be opened in a worker: return the function from a text to ids."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # no threads, whose stacks would count as memory
    finding, plain = descriptions
    assert finding is not None
    return LibraryEncoder(finding, plain).encode


def is_known(vocabulary: Vocabulary) -> bool:
    """Return whether no rule can take much more time or memory than the text is long."""
    raw: dict[str, Any] = dict(vocabulary.description)
    normalizers = steps_of(raw.get("normalizer"), "normalizers")
    splitters = steps_of(raw.get("pre_tokenizer"), "pretokenizers")
    pieces = vocabulary.ids if raw["model"].get("type") == "Unigram" else ()
    return (
        max(len(normalizers), len(splitters)) <= MAX_STEPS
        and all(map(_is_known_normalizer, normalizers))
        and all(map(_is_known_splitter, splitters))
        and len(json.dumps(raw.get("post_processor"))) <= MAX_POST_PROCESSOR
        and max(map(len, pieces), default=0) <= MAX_PIECE
    )


def _is_known_normalizer(step: object) -> bool:
    kind = step.get("type") if isinstance(step, dict) else None
    return step in (None, PREPEND, REPLACE) or kind in KNOWN_NORMALIZERS


def _is_known_splitter(step: object) -> bool:
    match step:
        case None | {"type": "Split", "pattern": {"String": " "}}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(regex)}}:
            return regex in KNOWN_REGEXES or ONE_REPEATS.fullmatch(regex) is not None
        case {"type": kind}:
            return kind in KNOWN_SPLITTERS
    return False

"""Text to token ids and back: byte-level BPE with GPT-2's splitting, run by tiktoken.

The ids are those of `transformers` for every text; a tokenizer for which that cannot be promised is refused when it is
opened. Knows nothing of prompts, chats or the model. Torch-free; safe to share between threads.
Called by the server and by engine.LLM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import tiktoken

from weights.errors import TokenizerError, shown
from weights.families import load_config
from weights.vocabulary import Vocabulary, load_vocabulary

# GPT-2's pattern with possessive repeats: the same pieces, without a backtracking stack for letters or digits.
SPLIT_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# \s+(?!\S) does backtrack: tiktoken's regex engine panics on a run of about a million white-space characters.
LONG_WHITESPACE = 65_536
_WHITESPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


class Tokenizer:
    """A byte-level BPE. Adds nothing at a text's beginning or end.

    vocab_size is one more than the largest id; the model's may be larger. max_token_bytes is the length of the longest
    token. Raises TokenizerError when its ids could differ from those of `transformers`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        ranks = _rank_tokens(vocabulary)
        self._id_of_rank = [vocabulary.tokens[token] for token in ranks]
        self._bpe = tiktoken.Encoding("gpt2", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._special = {token.text: token.token_id for token in vocabulary.added if token.special}
        self._always_cut = {token.text: token.token_id for token in vocabulary.added if not token.special}
        self._special_pattern = _any_of(self._special)
        self._always_cut_pattern = _any_of(self._always_cut)
        self._long_whitespace = re.compile(f"(?<!{_WHITESPACE}){_WHITESPACE}{{{LONG_WHITESPACE},}}")
        self._bytes = {token_id: token for token, token_id in vocabulary.tokens.items()}
        self._bytes |= {token.token_id: token.text.encode("utf-8", "surrogatepass") for token in vocabulary.added}
        self.vocab_size = max(self._bytes) + 1
        self.special_ids = frozenset(self._special.values())
        self.max_token_bytes = max(map(len, self._bytes.values()))
        reachable = self.special_ids.intersection(self._id_of_rank)
        if reachable:
            token = shown(self._bytes[min(reachable)].decode(errors="replace"))
            raise TokenizerError(
                f"{vocabulary.file_name}: special token {token} must not be one that plain text can give"
            )

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Open the tokenizer of a model folder; raise TokenizerError when its files are missing or broken."""
        return cls(load_vocabulary(folder))

    @classmethod
    def of_model(cls, folder: Path) -> Tokenizer:
        """Open the tokenizer of a model folder whose config.json says that the model knows all its ids."""
        tokenizer, limit = cls.open(folder), load_config(folder).vocab_size
        if tokenizer.vocab_size > limit:
            raise TokenizerError(
                f"{folder}: the tokenizer's ids must be below config.json's vocab_size {limit}, "
                f"got {tokenizer.vocab_size - 1}: they belong to different models"
            )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text: special tokens never arise, their text is text.

        Raises TokenizerError for a lone surrogate, which UTF-8 cannot write.
        """
        try:
            if not text.isascii():
                text.encode()
        except UnicodeEncodeError as fault:
            raise TokenizerError(
                f"text must be valid Unicode, got a lone surrogate {shown(text[fault.start])} at position {fault.start}"
            ) from fault
        return _encode_around(text, self._always_cut_pattern, self._always_cut, self._encode_ordinary)

    def encode_with_special(self, text: str) -> list[int]:
        """Return the ids of text in which the text of a special token means that token."""
        return _encode_around(text, self._special_pattern, self._special, self.encode)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token adds to the text; a model's vocabulary may have ids without any."""
        return self._bytes.get(token_id, b"")

    def _encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for run in self._long_whitespace.finditer(text):
            # A piece always ends before the last character of a run, unless the text ends with it: cut there.
            end = run.end() if run.end() == len(text) else run.end() - 1
            ids += self._encode_pieces(text[start:end])
            start = end
        ids += self._encode_pieces(text[start:])
        return ids

    def _encode_pieces(self, text: str) -> list[int]:
        try:
            ranks = self._bpe.encode_ordinary(text)
        except BaseException as fault:  # a Rust panic is no Exception, and must not end the thread that encodes
            if type(fault).__name__ != "PanicException":
                raise
            raise TokenizerError(f"text of {len(text)} characters cannot be split: {shown(str(fault))}") from fault
        id_of_rank = self._id_of_rank
        return [id_of_rank[rank] for rank in ranks]


def _encode_around(
    text: str, pattern: re.Pattern[str], ids: Mapping[str, int], encode: Callable[[str], list[int]]
) -> list[int]:
    """Return the ids of the matches, and of the text between them by `encode`."""
    parts = pattern.split(text)
    encoded = encode(parts[0])
    for match, between in zip(parts[1::2], parts[2::2], strict=True):
        encoded.append(ids[match])
        encoded += encode(between)
    return encoded


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the leftmost, then longest of the texts; for none, one that never matches."""
    alternatives = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return re.compile(f"({alternatives or '(?!)'})")


def _rank_tokens(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Return every token that text can give with its rank: the 256 bytes, then the merges in order.

    tiktoken joins two neighbours whenever their bytes are a token, `transformers` only when they are the two halves of
    that token's merge. For every text both give the same ids if each token, split into bytes and joined again by the
    earlier merges alone, comes to its two halves. Training makes such merges; others are refused here.
    """
    ranks = {bytes([byte]): byte for byte in range(256)}
    halves_of: dict[int, tuple[int, int]] = {}
    joined: dict[tuple[int, int], int] = {}
    for left, right in vocabulary.merges:
        token, rank = left + right, len(ranks)
        left_rank, right_rank = ranks.get(left), ranks.get(right)
        if (
            left_rank is None
            or right_rank is None
            or token in ranks
            or _meet_early(left_rank, right_rank, halves_of, joined)
        ):
            raise TokenizerError(
                f"{vocabulary.file_name}: the merge of {shown(left)} and {shown(right)} must make a new token of "
                "two that the merges before it leave side by side"
            )
        ranks[token], halves_of[rank], joined[left_rank, right_rank] = rank, (left_rank, right_rank), rank
    for token in ranks:
        if token not in vocabulary.tokens:
            raise TokenizerError(f"{vocabulary.file_name}: the vocabulary must have the token {shown(token)}")
    return ranks


def _meet_early(
    left: int, right: int, halves_of: Mapping[int, tuple[int, int]], joined: Mapping[tuple[int, int], int]
) -> bool:
    """Return whether a merge joins parts of `left` and `right` before both are whole.

    Undoes the merges of the two, latest first, and looks at the neighbours across the border each time. Only merges
    before `limit` could have come earlier; among equal ones the leftmost is first, so the border's before the right's.
    """
    limit = len(halves_of) + 256
    while joined.get((left, right), limit) >= limit:
        latest = max(left, right)
        if latest not in halves_of:
            return False
        if left > right:
            limit, left = left, halves_of[left][1]
        else:
            limit, right = right + 1, halves_of[right][0]
    return True

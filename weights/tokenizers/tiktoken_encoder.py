r"""Byte-level BPE by tiktoken, where its ids are provably those of `tokenizers`.

Proven from the file, for every text: the merges, the template, the cutting of added tokens. Known by test only (every
character, and random texts): that the regex engines of the two libraries split alike, for the patterns listed here.
Knows nothing of files. Called by tokenizer.py; what cannot be proven goes to library_encoder.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import tiktoken

from gptserve.weights.tokenizers.vocabulary import AddedToken, Vocabulary, byte_symbols

# How tokenizer.json files split, up to their common end SPACES: GPT-2 (built into "ByteLevel"), Llama 3 and other heirs
# of cl100k, Qwen 2 and 3 (digits one by one), gpt-oss (o200k); and BLOOM, which does not have that end.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
QWEN = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
)
BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001
SPACES = r"|\s+(?!\S)|\s+"

# tiktoken's engine gives up when a pattern backtracks a million times, as \s+(?!\S) does over a million spaces; hence
# strides. What stands in (?>...) never backtracks outside a finite automaton: the time is linear in the text.
STRIDES = r"|(?:\s{256})*\s+(?!\S)|\s+"
# StarCoder splits off each digit first, so that white space before one stands at the end of its piece. `tokenizers`
# knows 13 digits of Unicode 17 that tiktoken does not know yet.
_DIGIT = "[\\p{N}\U00011de0-\U00011de9\U00016ff4-\U00016ff6]"
STARCODER = rf"(?>'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+|{_DIGIT}| ?[^\s\p{{L}}{_DIGIT}]+)|\s++(?={_DIGIT})" + STRIDES
# What BLOOM's pattern does not match is a piece, too; its last space belongs to the match that follows.
_GAP = "[\\s(|.,!?…。，、।۔،)]"  # noqa: RUF001
BLOOM_GAPS = f"(?>{BLOOM})|(?>{_GAP}+)(?:$|(?<! ))|(?:{_GAP}{{256}})*{_GAP}+(?= )"

Step = tuple[Literal["ByteLevel", "Digits", "Split"], object]
PATTERNS: Mapping[tuple[Step, ...], str] = {
    (("ByteLevel", True),): f"(?>{GPT2}){STRIDES}",
    (("Digits", True), ("ByteLevel", True)): STARCODER,
    (("Split", BLOOM), ("ByteLevel", False)): BLOOM_GAPS,
    **{(("Split", head + SPACES), ("ByteLevel", False)): f"(?>{head}){STRIDES}" for head in (LLAMA3, QWEN, O200K)},
}
NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


class TiktokenEncoder:
    """Invariants: a rank is a token's place among the merges; added tokens are cut out before, never merged."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        ranks: Mapping[str, int],
        pattern: str,
        template: tuple[list[int], list[int]],
    ) -> None:
        ids, token_bytes = vocabulary.ids, vocabulary.token_bytes
        self._id_of_rank = [ids.get(token, -1) for token in ranks]
        merged = {token_bytes[ids[token]] if token in ids else bytes([rank]): rank for token, rank in ranks.items()}
        self._bpe = tiktoken.Encoding(vocabulary.file_name, pat_str=pattern, mergeable_ranks=merged, special_tokens={})
        self._template = template
        normalizes = vocabulary.description.get("normalizer") is not None
        self._normalize = _nfc() if normalizes else str
        self.most_bytes_per_byte = 3 if normalizes else 1  # a Hangul syllable may be written with nine bytes
        self._raw_tokens = _AddedTokens(token for token in vocabulary.added if not token.normalized)
        self._normalized_tokens = _AddedTokens(token for token in vocabulary.added if token.normalized)

    @classmethod
    def prove(cls, vocabulary: Vocabulary) -> TiktokenEncoder | None:
        """Return the encoder, or None when its ids might not be those of `tokenizers`."""
        raw = vocabulary.description
        pattern, template = PATTERNS.get(_split_steps(raw.get("pre_tokenizer"))), _template(raw.get("post_processor"))
        if pattern is None or template is None or not _is_plain(vocabulary):
            return None
        ranks = _rank_listed(vocabulary) if vocabulary.ignores_merges else _rank_merged(vocabulary)
        if ranks is None or any(token.special and token.text in ranks for token in vocabulary.added):
            return None
        return cls(vocabulary, ranks, pattern, template)

    def encode(self, text: str, *, special: bool = False, template: bool = False) -> list[int]:
        """Return the ids; with `special`, special tokens are found, with `template` a prompt's are added."""
        before, after = self._template if template else ([], [])
        ids = [*before]
        for part in self._raw_tokens.cut(text, special):
            ids += [part] if isinstance(part, int) else self._encode_normalized(self._normalize(part), special)
        return ids + after

    def _encode_normalized(self, text: str, special: bool) -> list[int]:
        ids: list[int] = []
        id_of_rank = self._id_of_rank
        for part in self._normalized_tokens.cut(text, special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += [id_of_rank[rank] for rank in self._bpe.encode_ordinary(part)]
        return ids


class _AddedTokens:
    """Cuts tokens out of a text: the leftmost, then the longest."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.text: token for token in tokens}
        self._all_special = all(token.special for token in self._tokens.values())
        alternatives = "|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True)))
        self._pattern = re.compile(alternatives or "(?!)")

    def cut(self, text: str, special: bool) -> Iterator[int | str]:
        """Yield the tokens' ids and the texts between; a special token not asked for still hides what overlaps it."""
        start = 0
        if special or not self._all_special:
            for match in self._pattern.finditer(text):
                token = self._tokens[match[0]]
                if special or not token.special:
                    yield text[start : match.start()]
                    yield token.token_id
                    start = match.end()
        yield text[start:]


def _is_plain(vocabulary: Vocabulary) -> bool:
    """Return whether nothing but splitting, merging, NFC and cutting out added tokens changes the ids."""
    match vocabulary.description:
        case {"model": dict(model), "decoder": {"type": "ByteLevel"}, **rest}:
            return (
                model.get("type", "BPE") == "BPE"
                and not model.get("continuing_subword_prefix")
                and not model.get("end_of_word_suffix")
                and not model.get("byte_fallback")
                and rest.get("normalizer") in (None, {"type": "NFC"})
                and not any(token.is_contextual for token in vocabulary.added)
                and all(token.text.isascii() for token in vocabulary.added if token.normalized)
            )
    return False


def _nfc() -> Callable[[str], str]:
    """Return the normalizer of `tokenizers`: Python's own may know another version of Unicode."""
    from tokenizers.normalizers import NFC  # only here, so that a server without need does not pay for it

    normalize: Callable[[str], str] = NFC().normalize_str
    return lambda text: text if text.isascii() else normalize(text)


def _split_steps(raw: object) -> tuple[Step, ...]:
    """Return what a pre-tokenizer does to the ids, or () for what no pattern here does."""
    steps: list[Step] = []
    match raw:
        case {"type": "Sequence", "pretokenizers": list(entries)}:
            pass
        case _:
            entries = [raw]
    for entry in entries:
        match entry:
            case {"type": "ByteLevel", "add_prefix_space": False}:
                steps.append(("ByteLevel", entry.get("use_regex", True) is True))
            case {"type": "Digits", "individual_digits": True}:
                steps.append(("Digits", True))
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                steps.append(("Split", pattern))
            case _:
                return ()
    return tuple(steps)


def _template(raw: object) -> tuple[list[int], list[int]] | None:
    """Return the ids that a post-processor puts before and after a text, or None when that is not clear."""
    match raw:
        case None | {"type": "ByteLevel"}:
            return [], []
        case {"type": "Sequence", "processors": [{"type": "ByteLevel"}, last]}:
            return _template(last)
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(tokens)}:
            parts: tuple[list[int], list[int]] = [], []
            is_after = False
            for piece in pieces:
                match piece:
                    case {"Sequence": {"id": "A"}} if not is_after:
                        is_after = True
                    case {"SpecialToken": {"id": str(name)}}:
                        match tokens.get(name):
                            case {"ids": list(ids)} if all(type(token_id) is int for token_id in ids):
                                parts[is_after].extend(ids)
                            case _:
                                return None
                    case _:
                        return None
            return parts if is_after else None
    return None


def _first_ranks(vocabulary: Vocabulary) -> dict[str, int] | None:
    """Return the ranks of the single bytes, or None if text could hold one without a token."""
    ranks = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    missing = {byte for symbol, byte in ranks.items() if symbol not in vocabulary.ids}
    return None if missing - NEVER_IN_UTF8 else ranks


def _rank_listed(vocabulary: Vocabulary) -> dict[str, int] | None:
    """Return the ranks for a file with ignore_merges that lists every split of a token into two, token after token.

    So are tiktoken's vocabularies converted: Llama 3, gpt-oss. Proof: tiktoken joins neighbours that make the token of
    the lowest rank, the leftmost first. When two neighbours make a token, then all that was joined before between its
    two ends is what happens to its bytes alone, a sequence of states with one fewer token each, only one of which has
    two. So however it comes up in a text, a token is made of the same two, and the other splits listed never occur. So
    a list that has every split, in the order of the ranks, picks as tiktoken does. A token without any split is never
    made, but both libraries take it where it is a whole piece.
    """
    ids, ranks = vocabulary.ids, _first_ranks(vocabulary)
    if ranks is None or len(set(vocabulary.merges)) < len(vocabulary.merges):
        return None
    alphabet = frozenset(ranks)
    num_splits: dict[str, int] = {}
    latest = ""
    for left, right in vocabulary.merges:
        token = left + right
        if token != latest and token in num_splits:
            return None
        num_splits[token] = num_splits.get(token, 0) + 1
        ranks.setdefault(token, len(ranks))
        latest = token
    for token in ids:
        if token not in ranks and alphabet.issuperset(token):
            ranks[token] = len(ranks)
    for token in ranks:
        splits = sum(token[:cut] in ids and token[cut:] in ids for cut in range(1, len(token)))
        if splits != num_splits.get(token, 0) or (token not in ids and len(token) > 1):
            return None
    return ranks


def _rank_merged(vocabulary: Vocabulary) -> dict[str, int] | None:
    """Return the ranks of all the tokens that merges make, in the order of the merges.

    tiktoken joins two neighbours whenever their bytes are a token, `tokenizers` only when that is a merge. For every
    text both give the same ids if each token, split into bytes and joined again by the earlier merges alone, comes to
    the two halves of a merge of its own: by the proof above no other two ever make it. Training makes such merges.
    """
    ranks = _first_ranks(vocabulary)
    if ranks is None:
        return None
    halves_of: dict[int, tuple[int, int]] = {}
    joined: dict[tuple[int, int], int] = {}
    unproven: set[str] = set()
    for left, right in vocabulary.merges:
        token = left + right
        if token in ranks:
            continue
        left_rank, right_rank, rank = ranks.get(left), ranks.get(right), len(ranks)
        if left_rank is None or right_rank is None or _meet_early(left_rank, right_rank, halves_of, joined):
            unproven.add(token)
            continue
        ranks[token], halves_of[rank], joined[left_rank, right_rank] = rank, (left_rank, right_rank), rank
    whole = not unproven - ranks.keys() and all(token in vocabulary.ids or len(token) == 1 for token in ranks)
    return ranks if whole else None


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

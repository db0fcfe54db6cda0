r"""Byte-level BPE by tiktoken, for vocabularies of its own kind: GPT-2's, and the heirs of cl100k and o200k.

`recognise` says which these are; library_encoder.py encodes all others. Tests compare the ids with those of
`tokenizers`. That the regex engines of the two libraries split alike is known from these tests only.
Knows nothing of files. Called by tokenizer.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

import tiktoken

from gptserve.weights.errors import TokenizerError, foreign_code
from gptserve.weights.tokenizers.vocabulary import AddedToken, Vocabulary, byte_symbols

# How tokenizer.json files split, up to their common end SPACES: GPT-2 (built into "ByteLevel"), Llama 3 and other heirs
# of cl100k, Qwen 2 and 3 (digits one by one), gpt-oss (o200k), Mistral's Tekken, cl100k as tiktoken has it, nanochat.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
QWEN = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
NANOCHAT = CL100K.replace("{1,3}", "{1,2}")
SPACES = r"|\s+(?!\S)|\s+"

# The same for tiktoken, in time linear in the text: (?>...) never backtracks. Its engine gives up when a pattern
# backtracks a million times, as \s+(?!\S) does over a million spaces; hence strides of 256. The head is for the faster
# engine within its own, which has no "?+" and "++": here the next character decides, so they match what "?" and "+" do.
STRIDES = r"|(?:\s{256})*\s+(?!\S)|\s+"
PATTERNS = {
    head + SPACES: f"(?>{head.replace('?+', '?').replace('++', '+')}){STRIDES}"
    for head in (GPT2, LLAMA3, QWEN, O200K, TEKKEN, CL100K, NANOCHAT)
}

# A vocabulary beyond these takes long to recognise, or its added tokens to find. Published ones reach a tenth.
MAX_ADDED = 10_000
MAX_ADDED_LENGTH = 100
MAX_SQUARES = 2**27

OTHER_BPE = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
"""Settings of a BPE that is not byte-level."""


class TiktokenEncoder:
    """Cuts added tokens out of a text, and encodes the rest by tiktoken, whose ranks are the ids.

    At most `most_bytes_per_byte` bytes of a text become one byte of a token.
    """

    def __init__(self, vocabulary: Vocabulary, ranks: Mapping[str, int], pattern: str, template: list[int]) -> None:
        ranks_of_bytes = {vocabulary.token_bytes[rank]: rank for rank in ranks.values()}
        with foreign_code(TokenizerError, f"{vocabulary.file_name}: the library tiktoken cannot use it"):
            self._bpe = tiktoken.Encoding(
                vocabulary.file_name, pat_str=pattern, mergeable_ranks=ranks_of_bytes, special_tokens={}
            )
        self._template = template
        normalizes = vocabulary.description.get("normalizer") is not None
        self._normalize = _nfc() if normalizes else str
        self.most_bytes_per_byte = 3 if normalizes else 1  # a Hangul syllable may be written with nine bytes
        self._raw_tokens = _AddedTokens(token for token in vocabulary.added if not token.normalized)
        self._normalized_tokens = _AddedTokens(token for token in vocabulary.added if token.normalized)

    @classmethod
    def recognise(cls, vocabulary: Vocabulary) -> TiktokenEncoder | None:
        """Return the encoder, or None for a vocabulary that is not of tiktoken's kind."""
        raw = vocabulary.description
        pattern, template = _pattern(raw.get("pre_tokenizer")), _template(raw.get("post_processor"))
        if pattern is None or template is None or not _is_byte_level(vocabulary):
            return None
        ranks = _ranks(vocabulary)
        if ranks is None or any(token.special and token.text in ranks for token in vocabulary.added):
            return None
        return cls(vocabulary, ranks, pattern, template)

    def encode(self, text: str, *, special: bool = False, template: bool = False) -> list[int]:
        """Return the ids; with `special`, special tokens are found, with `template` a prompt's are added."""
        ids = [*self._template] if template else []
        with foreign_code(TokenizerError, "text has no tokens"):
            for part in self._raw_tokens.cut(text, special):
                pieces = (
                    [part] if isinstance(part, int) else self._normalized_tokens.cut(self._normalize(part), special)
                )
                for piece in pieces:
                    ids += [piece] if isinstance(piece, int) else self._bpe.encode_ordinary(piece)
        return ids


class _AddedTokens:
    """Cuts tokens out of a text: the leftmost first; of those that begin at one place, the longest."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.text: token for token in tokens}
        self._all_special = all(token.special for token in self._tokens.values())
        self._pattern = re.compile(_any_of(list(self._tokens)) if self._tokens else "(?!)")

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


def _any_of(texts: list[str]) -> str:
    """Return a pattern for the longest of the texts, which reads each character once, however many texts there are."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    may_end = "?" if rests.pop("", None) else ""
    branches = [re.escape(first) + _any_of(those) for first, those in rests.items()]
    return f"(?:{'|'.join(branches)}){may_end}" if branches else ""


def _nfc() -> Callable[[str], str]:
    """Return the normalizer of `tokenizers`: Python's own may know another version of Unicode."""
    from tokenizers.normalizers import NFC  # only here, so that a server without need does not pay for it

    normalize: Callable[[str], str] = NFC().normalize_str
    return lambda text: text if text.isascii() else normalize(text)


def _pattern(pre_tokenizer: object) -> str | None:
    """Return tiktoken's pattern for the pre-tokenizers that are known here."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get("use_regex", True) is True:
            return PATTERNS[GPT2 + SPACES]
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return PATTERNS.get(regex)
    return None


def _template(post_processor: object) -> list[int] | None:
    """Return the ids that go before a prompt, or None for a template that does anything else."""
    match post_processor:
        case None | {"type": "ByteLevel"}:
            return []
        case {"type": "Sequence", "processors": [{"type": "ByteLevel"}, last]}:
            return _template(last)
        case {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": str(name)}}, {"Sequence": {"id": "A"}}],
            "special_tokens": dict(tokens),
        }:
            match tokens.get(name):
                case {"ids": list(ids)} if all(type(token_id) is int for token_id in ids):
                    return ids
    return None


def _is_byte_level(vocabulary: Vocabulary) -> bool:
    """Return whether nothing but splitting, merging, NFC and cutting out added tokens changes the ids."""
    added = [token.text for token in vocabulary.added]
    if len(added) > MAX_ADDED or max(map(len, added), default=0) > MAX_ADDED_LENGTH:
        return False
    match vocabulary.description:
        case {"model": dict(model), "decoder": {"type": "ByteLevel"}, **rest}:
            return (
                model.get("type", "BPE") == "BPE"
                and not any(model.get(name) for name in OTHER_BPE)
                and rest.get("normalizer") in (None, {"type": "NFC"})
                and not any(token.is_contextual for token in vocabulary.added)
                and all(token.text.isascii() for token in vocabulary.added if token.normalized)
            )
    return False


def _ranks(vocabulary: Vocabulary) -> dict[str, int] | None:
    """Return the ids of all tokens that merges can make, or None where tiktoken would merge otherwise.

    tiktoken joins the two neighbours that make the token with the lowest id, `tokenizers` those of the earliest merge.
    So the merges must be in the order of the ids, and every token must be made by a merge of the file when its bytes
    are joined in tiktoken's way. Then it is made so in every text: whatever is joined before between a token's two
    ends is what happens to its bytes alone.
    """
    ids, alphabet = vocabulary.ids, set(byte_symbols())
    if sum(len(token) ** 2 for token in ids) > MAX_SQUARES:  # which is what `_join` takes
        return None
    made = [left + right for left, right in vocabulary.merges]
    order = [ids.get(token, -1) for token in made]
    if not alphabet <= ids.keys() or not alphabet.issuperset("".join(made)):
        return None
    if min(order, default=0) < 0 or order != sorted(order):
        return None
    # A whole piece that is a token needs no merge where merges are ignored: Llama 3 has tokens that nothing makes.
    names = (token for token in ids if alphabet.issuperset(token)) if vocabulary.ignores_merges else made
    ranks = {token: ids[token] for token in {*alphabet, *names}}
    merges = set(vocabulary.merges)
    for token in ranks.keys() - alphabet:
        parts = _join(token, ranks)
        is_never_made = vocabulary.ignores_merges and len(parts) > 2
        if parts not in merges and not is_never_made:
            return None
    return ranks


def _join(token: str, ranks: Mapping[str, int]) -> tuple[str, ...]:
    """Return what the bytes of a token become when tiktoken joins them, up to the last step before the token."""
    parts = list(token)
    while len(parts) > 2:
        found = [ranks.get(left + right, sys.maxsize) for left, right in pairwise(parts)]
        lowest = min(found)
        if lowest == sys.maxsize:
            break
        at = found.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)

"""Encodes by the library `tokenizers`, as transformers does, what tiktoken_encoder.py does not recognise.

These are sentencepiece-style BPE and Unigram (Llama 1 and 2, Mistral, Gemma, XGLM), GPT-1, and byte-level BPE with
other rules than tiktoken's (BLOOM, StarCoder). Knows nothing of files. Called by tokenizer.py, and in workers, which
worker_encoder.py has. The library is imported with the first encoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gptserve.weights.errors import TokenizerError, foreign_code, shown
from gptserve.weights.tokenizers.vocabulary import Vocabulary, byte_symbols, steps_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

PREPEND = {"type": "Prepend", "prepend": "\u2581"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
NFC = {"type": "NFC"}
SPLITTERS = ("ByteLevel", "Digits", "Split")
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class LibraryEncoder:
    """Holds the library's tokenizer twice: one finds special tokens, the other never does.

    One instance would have to be switched between the two, and threads share it. `describe` makes the descriptions.
    Where the second is None, both have one model, which takes most of the time and of the memory.
    """

    def __init__(self, finding: str, plain: str | None) -> None:
        self._finding = _open(finding)
        self._plain = _without_added(self._finding) if plain is None else _open(plain)
        self._plain.encode_special_tokens = True

    def encode(self, text: str, *, special: bool = False, template: bool = False) -> list[int]:
        """Return the ids; with `special`, special tokens are found, with `template` a prompt's are added."""
        library = self._finding if special else self._plain
        with foreign_code(TokenizerError, "text has no tokens"):
            # Unlike `encode`, this lets other threads run. Without offsets it takes half the time.
            ids: list[int] = library.encode_batch_fast([text], add_special_tokens=template)[0].ids
        return ids


def describe(vocabulary: Vocabulary) -> tuple[str, str | None]:
    """Return the two descriptions of a LibraryEncoder. Raises TokenizerError."""
    plain = None if _never_makes_special(vocabulary) else json.dumps(_without_special(vocabulary))
    return json.dumps(vocabulary.description), plain


def most_bytes_per_byte(vocabulary: Vocabulary) -> int:
    """Return how many bytes of a text may become one byte of a token."""
    # Three: U+2581 in a text has three bytes and becomes a space; NFC makes one character of three. There is no
    # bound where spaces are dropped, or where an unknown token stands for any text.
    return 3 if _keeps_everything(vocabulary) else 2**31


def _open(description: str) -> Library:
    from tokenizers import Tokenizer as Library

    with foreign_code(TokenizerError, "the library tokenizers cannot read it"):
        library = Library.from_str(description)
    library.no_truncation()
    library.no_padding()
    return library


def _without_added(library: Library) -> Library:
    """Return a tokenizer with the same model and steps that finds no added token."""
    plain = type(library)(library.model)
    for step in STEPS:
        if (value := getattr(library, step)) is not None:
            setattr(plain, step, value)
    return plain


def _never_makes_special(vocabulary: Vocabulary) -> bool:
    """Return whether the model makes none of the added tokens of any text, and all of them are special tokens.

    BPE begins with single characters, or the bytes of one, and goes on with what merges give.
    """
    model: Any = vocabulary.description["model"]
    special = {token.text for token in vocabulary.added if token.special and token.text in vocabulary.ids}
    return (
        model.get("type", "BPE") == "BPE"
        and len(special) == len(vocabulary.added)
        and not vocabulary.ignores_merges
        and not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        and not any(len(text) == 1 or re.fullmatch("<0x..>", text) for text in special)
        and special.isdisjoint(map("".join, vocabulary.merges))
    )


def _keeps_everything(vocabulary: Vocabulary) -> bool:
    """Return whether every byte of a text is in some token: byte-level BPE, or BPE with byte fallback."""
    raw: Mapping[str, Any] = vocabulary.description
    model, ids, normalizers = raw["model"], vocabulary.ids, steps_of(raw.get("normalizer"), "normalizers")
    if any(token.is_contextual for token in vocabulary.added):
        return False
    if raw["decoder"].get("type") == "ByteLevel":
        splitters = [step for step in steps_of(raw.get("pre_tokenizer"), "pretokenizers") if isinstance(step, dict)]
        kinds = [step.get("type") for step in splitters]
        return (
            ids.keys() >= set(byte_symbols())
            and not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
            and normalizers in ([None], [NFC])
            and "ByteLevel" in kinds
            and all(kind in SPLITTERS for kind in kinds)
            and all(step.get("behavior") != "Removed" for step in splitters)
        )
    return (
        model.get("byte_fallback") is True
        and all(f"<0x{byte:02X}>" in ids for byte in range(256))
        and all(step in (None, PREPEND, REPLACE) for step in normalizers)
    )


def _without_special(vocabulary: Vocabulary) -> Mapping[str, object]:
    """Return the description of a tokenizer that never makes a special token, and else makes the same tokens.

    The library alone may put a special token together from its parts. So its text gets a space in front: no splitting
    of these families leaves a space before other characters, and no text reaches the token.
    """
    raw: dict[str, Any] = dict(vocabulary.description)
    special = {token.text for token in vocabulary.added if token.special and token.text in vocabulary.ids}
    hidden = {text: " " + text for text in special}
    raw["added_tokens"] = [entry for entry in raw.get("added_tokens", []) if entry["content"] not in special]
    model = raw["model"]
    if model.get("type") != "Unigram":
        vocab = {hidden.get(text, text): token_id for text, token_id in vocabulary.ids.items()}
        merges = [pair for pair in vocabulary.merges if special.isdisjoint((*pair, "".join(pair)))]
        unknown = model.get("unk_token")
        return raw | {
            "model": model | {"vocab": vocab, "merges": merges, "unk_token": hidden.get(str(unknown), unknown)}
        }
    if '"Metaspace"' not in json.dumps(raw.get("pre_tokenizer")):
        raise TokenizerError(
            f"pre_tokenizer of a Unigram model must be Metaspace, got {shown(raw.get('pre_tokenizer'))}"
        )
    return raw | {"model": model | {"vocab": [[hidden.get(text, text), score] for text, score in model["vocab"]]}}

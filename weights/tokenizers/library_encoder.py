"""Every other tokenizer by the library `tokenizers`, which transformers itself encodes with.

Sentencepiece-style BPE and Unigram (Llama 1 and 2, Mistral, Gemma, XGLM), GPT-1, and byte-level BPE that tiktoken would
not provably encode alike. Knows nothing of files. Called by tokenizer.py, and imports the library only then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gptserve.weights.errors import TokenizerError, shown
from gptserve.weights.tokenizers.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

PREPEND = {"type": "Prepend", "prepend": "\u2581"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


class LibraryEncoder:
    """Two instances: one finds special tokens, and one never does, so that no state changes between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # U+2581, which stands for a space, may itself be in a text, in three bytes. Where spaces are dropped or an
        # unknown token stands for any text, there is no bound.
        self.most_bytes_per_byte = 3 if _keeps_everything(vocabulary) else 2**31
        self._finding = _open(vocabulary.description, vocabulary.file_name)
        self._plain = _open(_without_special(vocabulary), vocabulary.file_name)
        self._plain.encode_special_tokens = True

    def encode(self, text: str, *, special: bool = False, template: bool = False) -> list[int]:
        """Return the ids; with `special`, special tokens are found, with `template` a prompt's are added."""
        library = self._finding if special else self._plain
        try:
            # Unlike `encode`, it lets other threads run meanwhile, and takes half the time without offsets.
            ids: list[int] = library.encode_batch_fast([text], add_special_tokens=template)[0].ids
        except Exception as fault:  # the library raises no narrower one
            raise TokenizerError(f"text has no tokens: {shown(str(fault))}") from fault
        return ids


def _open(description: Mapping[str, object], file_name: str) -> Library:
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(json.dumps(description))
    except BaseException as fault:  # a Rust panic is no Exception
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{file_name}: the library tokenizers cannot read it: {shown(str(fault))}") from fault
    library.no_truncation()
    library.no_padding()
    return library


def _keeps_everything(vocabulary: Vocabulary) -> bool:
    """Return whether every byte of a text ends in a token's bytes: sentencepiece-style BPE with byte fallback."""
    model, raw = vocabulary.description["model"], vocabulary.description.get("normalizer")
    assert isinstance(model, dict)
    steps = raw.get("normalizers") if isinstance(raw, dict) and raw.get("type") == "Sequence" else [raw]
    return (
        model.get("byte_fallback") is True
        and all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
        and not any(token.is_contextual for token in vocabulary.added)
        and isinstance(steps, list)
        and all(step in (None, PREPEND, REPLACE) for step in steps)
    )


def _without_special(vocabulary: Vocabulary) -> Mapping[str, object]:
    """Return the description of a tokenizer that makes no special token of any text, and else the same tokens.

    The library alone does not promise that: it may put the text of a special token together from its parts. Behind a
    space a token is out of reach: no splitting of these families leaves one in front of other characters.
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
        return raw | {"model": model | {"vocab": vocab, "merges": merges, "unk_token": hidden.get(unknown, unknown)}}
    if '"Metaspace"' not in json.dumps(raw.get("pre_tokenizer")):
        raise TokenizerError(
            f"{vocabulary.file_name}: pre_tokenizer of a Unigram model must be Metaspace, "
            f"got {shown(raw.get('pre_tokenizer'))}"
        )
    return raw | {"model": model | {"vocab": [[hidden.get(text, text), score] for text, score in model["vocab"]]}}

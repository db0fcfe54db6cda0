"""Reads and checks a folder's tokenizer files.

Reads tokenizer.json, or what `gpt2_files.py` makes of the older files, and computes the bytes that every token adds to
a text. Does not turn text into tokens: `tiktoken_encoder.py` and `library_encoder.py` do.
Called by tokenizer.py only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gptserve.weights.errors import TokenizerError, shown
from gptserve.weights.json_file import MAX_VOCABULARY_BYTES, read_json_object
from gptserve.weights.tokenizers.gpt2_files import HOW_TO_CONVERT, describe_gpt2_files

MAX_STEPS = 16  # of a decoder, normalizer or pre-tokenizer; published ones have four at most


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text whole: a special one only on request, any other always.

    normalized: it is looked for in normalized text. is_contextual: it also depends on the text around it.
    """

    token_id: int
    text: str
    special: bool
    normalized: bool = False
    is_contextual: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Invariants: no two tokens share an id; every added token has the id that `tokenizers` gives it.

    `description` is the whole tokenizer.json. `ids` are the model's tokens as the file writes them. `token_bytes` are
    the bytes that each token, added ones too, adds to a text. Decoders drop a space at an end of the text; these bytes
    keep it, because the text may continue.
    """

    file_name: str
    description: Mapping[str, object]
    ids: Mapping[str, int]
    merges: list[tuple[str, str]]
    ignores_merges: bool  # a piece that is a token as a whole becomes that token, whatever merging would give
    added: tuple[AddedToken, ...]
    token_bytes: dict[int, bytes]


def load_vocabulary(folder: Path) -> Vocabulary:
    """Read the folder's tokenizer; raise TokenizerError naming the file, the rule and what was found."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return _checked(read_json_object(path, TokenizerError, max_bytes=MAX_VOCABULARY_BYTES), path)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _checked(describe_gpt2_files(folder), folder / "vocab.json")
    raise TokenizerError(f"{folder} must hold tokenizer.json, or GPT-2's vocab.json and merges.txt; {HOW_TO_CONVERT}")


def byte_symbols() -> list[str]:
    """Return the characters by which byte-level files write the 256 bytes (GPT-2's `bytes_to_unicode`).

    A printable byte stands for itself; the others, in order, are the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def steps_of(raw: object, name: str) -> list[object]:
    """Return the parts of a "Sequence", which it lists under `name`, or the one step that stands in its place."""
    entries = raw.get(name) if isinstance(raw, dict) and raw.get("type") == "Sequence" else [raw]
    return entries if isinstance(entries, list) else [entries]


def _checked(raw: Mapping[str, object], path: Path) -> Vocabulary:
    model = _object(raw, "model", path)
    kind = model.get("type", "BPE")
    if kind not in ("BPE", "Unigram"):
        raise TokenizerError(f"{path}: model.type must be 'BPE' or 'Unigram', got {shown(kind)}")
    if model.get("dropout") not in (None, 0):
        raise TokenizerError(f"{path}: model.dropout must be None or 0, got {shown(model['dropout'])}")
    ids = _unigram_ids(model, path) if kind == "Unigram" else _bpe_ids(model, path)
    entries = raw.get("added_tokens", [])
    if not isinstance(entries, list):
        raise TokenizerError(f"{path}: added_tokens must be a list, got {shown(entries)}")
    added = tuple(_added_token(entry, path) for entry in entries)
    _check_added_ids(ids, added, path)
    to_bytes = _token_decoder(_object(raw, "decoder", path), path)
    token_bytes = {token_id: to_bytes(text) for text, token_id in ids.items()}
    token_bytes |= {token.token_id: to_bytes(token.text) for token in added}
    merges = _merges(model, path) if kind == "BPE" else []
    ignores_merges = model.get("ignore_merges", False)
    if not isinstance(ignores_merges, bool):
        raise TokenizerError(f"{path}: model.ignore_merges must be a bool, got {shown(ignores_merges)}")
    return Vocabulary(str(path), raw, ids, merges, ignores_merges, added, token_bytes)


def _object(values: Mapping[str, object], name: str, path: Path) -> dict[str, object]:
    value = values.get(name)
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: {name} must be an object, got {shown(value)}")
    return value


def _unigram_ids(model: Mapping[str, object], path: Path) -> dict[str, int]:
    vocab = model.get("vocab")
    ids: dict[str, int] = {}
    for entry in vocab if isinstance(vocab, list) else [vocab]:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and entry[0] not in ids):
            raise TokenizerError(f"{path}: model.vocab must list pairs of a new token and a score, got {shown(entry)}")
        ids[entry[0]] = len(ids)
    return ids


def _bpe_ids(model: Mapping[str, object], path: Path) -> dict[str, int]:
    ids: dict[str, int] = {}
    seen: set[int] = set()
    for text, value in _object(model, "vocab", path).items():
        if type(value) is not int or value < 0 or value in seen:
            its_id = _token_id(value, shown(text), path)
            raise TokenizerError(f"{path}: {shown(text)} must have an id of its own, got {its_id}")
        ids[text] = value
        seen.add(value)
    return ids


def _token_id(value: object, token: str, path: Path) -> int:
    if type(value) is not int or value < 0:
        raise TokenizerError(f"{path}: the id of {token} must be an integer of at least 0, got {shown(value)}")
    return value


def _merges(model: Mapping[str, object], path: Path) -> list[tuple[str, str]]:
    entries = model.get("merges")
    if not isinstance(entries, list):
        raise TokenizerError(f"{path}: model.merges must be a list, got {shown(entries)}")
    merges = []
    for entry in entries:
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if not (type(pair) is list and len(pair) == 2 and type(pair[0]) is str is type(pair[1]) and all(pair)):
            raise TokenizerError(f"{path}: a merge must be two tokens, got {shown(entry)}")
        merges.append((pair[0], pair[1]))
    return merges


def _added_token(entry: object, path: Path) -> AddedToken:
    if not isinstance(entry, dict):
        raise TokenizerError(f"{path}: an added token must be an object, got {shown(entry)}")
    token_id, text = _token_id(entry.get("id"), "an added token", path), entry.get("content")
    if not isinstance(text, str) or not text:
        raise TokenizerError(f"{path}: an added token must have content, got {shown(entry)}")
    flags = [entry.get(name, False) for name in ("special", "normalized", "single_word", "lstrip", "rstrip")]
    for flag in flags:
        if not isinstance(flag, bool):
            raise TokenizerError(f"{path}: the flags of added token {shown(text)} must be bools, got {shown(flag)}")
    return AddedToken(token_id, text, flags[0], flags[1], any(flags[2:]))


def _check_added_ids(ids: Mapping[str, int], added: tuple[AddedToken, ...], path: Path) -> None:
    """Raise unless the ids are those that `tokenizers` gives: the vocabulary's, or the next one that is free."""
    free = len(ids)
    seen: set[str] = set()
    for token in added:
        expected = ids.get(token.text, free)
        if token.token_id != expected or token.text in seen:
            raise TokenizerError(
                f"{path}: added token {shown(token.text)} must come once and have id {expected}, got {token.token_id}"
            )
        seen.add(token.text)
        free = max(free, expected + 1)


def _token_decoder(decoder: Mapping[str, object], path: Path) -> Callable[[str], bytes]:
    """Return the function from a token as the file writes it to the bytes it adds to a text."""
    if decoder.get("type") == "ByteLevel":
        table = {ord(symbol): byte for byte, symbol in enumerate(byte_symbols())}
        table = dict.fromkeys(range(0x100), 0xFFFF) | table  # a Latin-1 character that is no symbol has no byte
        return lambda text: _from_symbols(text, table)
    replaced: list[tuple[str, str]] = []
    has_bytes = False
    steps = steps_of(decoder, "decoders")
    if len(steps) > MAX_STEPS:
        raise TokenizerError(f"{path}: decoder must have at most {MAX_STEPS} steps, got {len(steps)}")
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                len(old) >= len(new) and old and not has_bytes
            ):
                replaced.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} | {"type": "BPEDecoder", "suffix": str(old)} if old:
                replaced.append((old, " "))
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Fuse"} | {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
                pass
            case _:
                raise TokenizerError(
                    f"{path}: decoder must be ByteLevel, Metaspace, BPEDecoder, or a Sequence of Replace by no longer "
                    f"text, ByteFallback, Fuse and Strip of one leading space, got {shown(step)}"
                )
    return lambda text: _from_pieces(text, replaced, has_bytes)


def _from_symbols(text: str, table: Mapping[int, int]) -> bytes:
    """Return the bytes that the characters stand for; a token with any other character stands for itself."""
    try:
        return text.translate(table).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="surrogatepass")


def _from_pieces(text: str, replaced: list[tuple[str, str]], has_bytes: bool) -> bytes:
    """Return the byte that a token such as <0x0A> stands for, else the text with its replacements."""
    if has_bytes and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        return bytes.fromhex(text[3:5])
    for old, new in replaced:
        text = text.replace(old, new)
    return text.encode("utf-8", errors="surrogatepass")

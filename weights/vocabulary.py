"""What a folder's tokenizer files say, checked before anything is built of it.

Reads tokenizer.json, or vocab.json with merges.txt, and gives both as one Vocabulary. Whatever a GPT-2 byte-level
BPE does not have (normalizers, other pre-tokenizers, other models) is refused by name: ignoring it would change ids.
Called by tokenizer.py only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weights.errors import TokenizerError, shown
from weights.json_file import read_json_object


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text whole: a special one only when asked for, any other always."""

    token_id: int
    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Invariants: no two tokens share an id or bytes; `merges` are in order of priority."""

    file_name: str
    tokens: dict[bytes, int]
    merges: tuple[tuple[bytes, bytes], ...]
    added: tuple[AddedToken, ...]


def load_vocabulary(folder: Path) -> Vocabulary:
    """Read the folder's tokenizer; raise TokenizerError naming the file, the rule and what was found."""
    if (folder / "tokenizer.json").is_file():
        return _read_tokenizer_json(folder / "tokenizer.json")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _read_vocab_and_merges(folder)
    raise TokenizerError(f"{folder} must hold tokenizer.json, or vocab.json and merges.txt")


def _read_tokenizer_json(path: Path) -> Vocabulary:
    raw = read_json_object(path, TokenizerError)
    model, splitter = _object(raw, "model", path), _object(raw, "pre_tokenizer", path)
    decoder = _object(raw, "decoder", path)
    finisher = _object(raw, "post_processor", path) if raw.get("post_processor") is not None else {}
    # Truncation and padding are left unread: transformers switches them off, too, unless a call asks for them.
    rules: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("model.type", model.get("type", "BPE"), ("BPE",)),
        ("model.dropout", model.get("dropout"), (None, 0)),
        ("model.continuing_subword_prefix", model.get("continuing_subword_prefix"), (None, "")),
        ("model.end_of_word_suffix", model.get("end_of_word_suffix"), (None, "")),
        ("model.byte_fallback", model.get("byte_fallback", False), (False,)),
        ("model.ignore_merges", model.get("ignore_merges", False), (False,)),
        ("normalizer", raw.get("normalizer"), (None,)),
        ("pre_tokenizer.type", splitter.get("type"), ("ByteLevel",)),
        ("pre_tokenizer.add_prefix_space", splitter.get("add_prefix_space", True), (False,)),
        ("pre_tokenizer.use_regex", splitter.get("use_regex", True), (True,)),
        ("post_processor.type", finisher.get("type"), (None, "ByteLevel")),
        ("decoder.type", decoder.get("type"), ("ByteLevel",)),
    )
    for field, found, allowed in rules:
        if found not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise TokenizerError(f"{path}: {field} must be {expected} in a GPT-2 tokenizer, got {shown(found)}")
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{path}: model.merges must be a list, got {shown(merges)}")
    pairs = (entry.split(" ") if isinstance(entry, str) else entry for entry in merges)
    added = raw.get("added_tokens", [])
    if not isinstance(added, list):
        raise TokenizerError(f"{path}: added_tokens must be a list, got {shown(added)}")
    return _vocabulary(path, _object(model, "vocab", path), pairs, [_added_token(entry, path) for entry in added])


def _read_vocab_and_merges(folder: Path) -> Vocabulary:
    """Read the older layout; what neither a merge nor the configuration accounts for can only be a special token."""
    path = folder / "merges.txt"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as fault:
        raise TokenizerError(f"{path} could not be read as UTF-8: {fault}") from fault
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    vocab = read_json_object(folder / "vocab.json", TokenizerError)
    added = _configured_tokens(folder / "tokenizer_config.json")
    known = {"".join(pair) for pair in pairs} | {token.text for token in added}
    added += [
        AddedToken(token_id, text, special=True)
        for text, token_id in vocab.items()
        if text not in known and len(text) > 1 and isinstance(token_id, int)
    ]
    extra_path = folder / "added_tokens.json"
    extra = read_json_object(extra_path, TokenizerError) if extra_path.exists() else {}
    for text in extra.keys() - vocab.keys() - known:
        raise TokenizerError(
            f"{extra_path}: {shown(text)} must also be in tokenizer_config.json, which says how it is cut out"
        )
    return _vocabulary(folder / "vocab.json", vocab, pairs, added)


def _configured_tokens(path: Path) -> list[AddedToken]:
    config = read_json_object(path, TokenizerError) if path.exists() else {}
    if config.get("add_prefix_space"):
        raise TokenizerError(f"{path}: add_prefix_space must be false, got {shown(config['add_prefix_space'])}")
    added = _object(config, "added_tokens_decoder", path) if "added_tokens_decoder" in config else {}
    # Here the id is the key, a string of digits; fewer than ten, so that int() takes it.
    return [
        _added_token(
            {**entry, "id": int(key)} if isinstance(entry, dict) and re.fullmatch("[0-9]{1,9}", key) else entry, path
        )
        for key, entry in added.items()
    ]


def _vocabulary(
    path: Path, vocab: Mapping[str, object], pairs: Iterable[object], added: list[AddedToken]
) -> Vocabulary:
    table = _byte_table()
    ids = {token.token_id: token.text for token in added}
    if len(ids) < len(added):
        raise TokenizerError(f"{path}: two added tokens share an id")
    added_ids = {token.text: token.token_id for token in added}
    tokens: dict[bytes, int] = {}
    for text, token_id in vocab.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise TokenizerError(
                f"{path}: the id of {shown(text)} must be an integer of at least 0, got {shown(token_id)}"
            )
        if ids.setdefault(token_id, text) != text or added_ids.get(text, token_id) != token_id:
            raise TokenizerError(f"{path}: {shown(text)} must have an id of its own, and one only, got {token_id}")
        if tokens.setdefault(_to_bytes(text, table), token_id) != token_id:
            raise TokenizerError(f"{path}: {shown(text)} must stand for bytes of its own")
    merges = []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) and part for part in pair)):
            raise TokenizerError(f"{path}: a merge must be two tokens, got {shown(pair)}")
        merges.append((_to_bytes(pair[0], table), _to_bytes(pair[1], table)))
    return Vocabulary(str(path), tokens, tuple(merges), tuple(added))


def _added_token(entry: object, path: Path) -> AddedToken:
    if not isinstance(entry, dict):
        raise TokenizerError(f"{path}: an added token must be an object, got {shown(entry)}")
    token_id, text, special = entry.get("id"), entry.get("content"), entry.get("special", False)
    if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
        raise TokenizerError(
            f"{path}: the id of an added token must be an integer of at least 0, got {shown(token_id)}"
        )
    if not isinstance(text, str) or not text or not isinstance(special, bool):
        raise TokenizerError(f"{path}: an added token must have content and special, got {shown(entry)}")
    for flag in ("single_word", "lstrip", "rstrip"):
        if entry.get(flag):
            raise TokenizerError(f"{path}: {flag} of added token {shown(text)} must be false, got {shown(entry[flag])}")
    return AddedToken(token_id, text, special)


def _object(values: Mapping[str, object], name: str, path: Path) -> dict[str, object]:
    value = values.get(name)
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: {name} must be an object, got {shown(value)}")
    return value


def _to_bytes(text: str, table: Mapping[int, int]) -> bytes:
    """Return the bytes a token of the file stands for; one outside the alphabet stands for itself."""
    try:
        return text.translate(table).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="surrogatepass")


def _byte_table() -> dict[int, int]:
    """Map each character of GPT-2's alphabet to its byte, and the Latin-1 ones it does without to no byte.

    The alphabet writes a printable byte as itself and the others, in order, as the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 0xFFFF) | {0x100 + i: byte for i, byte in enumerate(others)}

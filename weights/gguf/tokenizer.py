"""The tokenizer of a GGUF file as the files of a folder: tokenizer.json and tokenizer_config.json.

llama.cpp has three kinds that the GPT lineage uses: "gpt2", byte-level BPE with its merges, "llama", sentencepiece's
BPE, whose merges follow from the scores of its tokens, and "gemma4", the same with its merges. Source of how they
follow: `generate_merges` of transformers' convert_slow_tokenizer.py. Torch-free. folder.py calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gptserve.weights.errors import TokenizerError, shown
from gptserve.weights.gguf.pre_tokenizers import SPLITTINGS
from gptserve.weights.gguf.reader import Header, Value

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_NAMED = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""The keys of tokens of which any ends an answer."""
_NO_ID = 2**32 - 1
"""-1 without a sign, which conversions write for a token that a model lacks."""
_SPACE = "\u2581"


class GgufTokenizer:
    """The keys of a file below tokenizer.ggml. Raises TokenizerError, which names a key."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self.tokens: list[str] = self._list("tokens", str)
        if len(set(self.tokens)) < len(self.tokens):
            raise self._fault("tokens", "texts that differ from each other")
        self._kinds: list[int] = self._list("token_type", int) if self._get("token_type") is not None else []
        if self._kinds and len(self._kinds) != len(self.tokens):
            raise self._fault("token_type", f"a list of {len(self.tokens)}, as many as there are tokens")

    def id_of(self, key: str) -> int | None:
        """Return the token id that a key has, None if it has none."""
        value = self._get(key)
        if value in (None, _NO_ID):
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self._fault(key, f"a token id in [0, {len(self.tokens)})")
        return value

    def files(self) -> dict[str, Json]:
        """Return the JSON of each file by its name."""
        model = self._get("model")
        makers = {"gpt2": self._byte_level, "llama": self._of_scores, "gemma4": self._of_merges}
        if not isinstance(model, str) or model not in makers:
            rule = f"one of {', '.join(makers)}: other tokenizers are not read from GGUF"
            raise self._fault("model", rule)
        named = {name: self.tokens[at] for name, key in _NAMED.items() if (at := self.id_of(key)) is not None}
        tokenizer = {"version": "1.0", "added_tokens": self._added(), **makers[model]()}
        return {"tokenizer.json": tokenizer, "tokenizer_config.json": {"tokenizer_class": "TokenizersBackend", **named}}

    def _byte_level(self) -> Json:
        name = self._get("pre")
        if name is None:
            name = "default"
            logger.warning(
                "%s has no tokenizer.ggml.pre; it goes on with 'default', as llama.cpp does, and may split texts in "
                "another way than its model: a file that was made later is better",
                self._header.path,
            )
        if not isinstance(name, str) or name not in SPLITTINGS:
            rule = f"one of {', '.join(sorted(SPLITTINGS))}: any other name splits texts in another way"
            raise self._fault("pre", rule)
        splitting = SPLITTINGS[name]
        vocabulary = {token: token_id for token_id, token in enumerate(self.tokens)}
        return {
            "normalizer": splitting.normalizer,
            "pre_tokenizer": splitting.pre_tokenizer(),
            "post_processor": self._template(begins=splitting.begins),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "ignore_merges": splitting.ignores_merges,
                "vocab": vocabulary,
                "merges": self._merges(vocabulary),
            },
        }

    def _merges(self, vocabulary: Mapping[str, int]) -> list[list[str]]:
        """Return the merges but those that no text leads to, since a part of theirs neither is a byte nor is merged."""
        merges = [merge.split(" ", 1) for merge in self._list("merges", str)]
        joined, found = {"".join(merge) for merge in merges}, list[list[str]]()
        for merge in merges:
            if len(merge) == 2 and vocabulary.keys() >= {*merge, "".join(merge)}:
                found.append(merge)
            elif len(merge) != 2 or all(len(part) == 1 or part in joined for part in merge):
                rule = "two tokens each that join to a token"
                raise TokenizerError(
                    f"{self._header.path}: tokenizer.ggml.merges must be {rule}, got {shown(' '.join(merge))}"
                )
        return found

    def _of_scores(self) -> Json:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self._fault("scores", f"a list of {len(self.tokens)}, as many as there are tokens")
        return self._sentencepiece(merges_of_scores(self.tokens, scores))

    def _of_merges(self) -> Json:
        return self._sentencepiece(self._merges({token: token_id for token_id, token in enumerate(self.tokens)}))

    def _sentencepiece(self, merges: list[list[str]]) -> Json:
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        has_prefix = self._flag("add_space_prefix", default=True)
        before = [{"type": "Prepend", "prepend": _SPACE}, replace] if has_prefix else [replace]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
        unknown = self.id_of("unknown_token_id")
        return {
            "normalizer": {"type": "Sequence", "normalizers": before},
            "pre_tokenizer": None,
            "post_processor": self._template(begins=True),
            "decoder": {
                "type": "Sequence",
                "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self.tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": {token: token_id for token_id, token in enumerate(self.tokens)},
                "merges": merges,
            },
        }

    def _added(self) -> list[Json]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": token_id, "content": self.tokens[token_id], **flags, "special": kind != _USER_DEFINED}
            for token_id, kind in enumerate(self._kinds)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and self.tokens[token_id]
        ]

    def _template(self, *, begins: bool) -> Json | None:
        """Return the step that adds the tokens with which each prompt begins and ends."""
        bos, eos = self.id_of("bos_token_id"), self.id_of("eos_token_id")
        adds_bos, adds_eos = self._flag("add_bos_token", default=begins), self._flag("add_eos_token", default=False)
        before = [bos] if bos is not None and adds_bos else []
        after = [eos] if eos is not None and adds_eos else []
        if not (before or after):
            return None
        texts = {at: self.tokens[at] for at in before + after}
        special = {text: {"id": text, "ids": [at], "tokens": [text]} for at, text in texts.items()}
        items = [[{"SpecialToken": {"id": self.tokens[at], "type_id": 0}} for at in ids] for ids in (before, after)]
        pair = [*items[0], {"Sequence": {"id": "B", "type_id": 1}}, *items[1]]
        single = [*items[0], {"Sequence": {"id": "A", "type_id": 0}}, *items[1]]
        return {"type": "TemplateProcessing", "single": single, "pair": [*single, *pair], "special_tokens": special}

    def _get(self, key: str) -> Value | None:
        return self._header.keys.get(f"tokenizer.ggml.{key}")

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._fault(key, "true or false")
        return value

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._get(key)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self._fault(key, f"a list of {'texts' if kind is str else 'numbers'}")
        return values

    def _fault(self, key: str, rule: str) -> TokenizerError:
        value = self._get(key)
        found = "but is missing" if value is None else f"got {shown(value)}"
        return TokenizerError(f"{self._header.path}: tokenizer.ggml.{key} must be {rule}, {found}")


def merges_of_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    """Return the merges that give sentencepiece's tokens: all pairs of tokens that join to one, likeliest first."""
    ids: Mapping[str, int] = {token: token_id for token_id, token in enumerate(tokens)}
    merges: list[tuple[str, str, float]] = []
    for token, score in zip(tokens, scores, strict=True):
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        local = [(left, right, score) for left, right in splits if left in ids and right in ids]
        merges += sorted(local, key=lambda merge: (ids[merge[0]], ids[merge[1]]))
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [[left, right] for left, right, _ in merges]

"""GGUF files that are damaged, one fault each; damaged_files.json has the words in which they are refused.

MODEL in the words stands for the path that is opened, FOLDER for the folder that it is in, SERVED for the names of all
architectures.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from gptserve.weights.gguf.architectures import ARCHITECTURES
from gptserve.weights.gguf.block_sizes import BLOCKS
from gptserve.weights.source import resolve_model
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.weights.gguf.raw import ARRAY, BOOL, F32, I32, TEXT, U32, File, number, numbers, real, text, texts, word

Damage = Callable[[Path], Path]
"""Writes into an empty folder, and returns what is to be opened."""


def open_weights(path: Path) -> None:
    """Do all that a start does with weights and tokenizer."""
    folder = resolve_model(str(path))
    config = load_config(folder)
    Tokenizer.open(folder)
    for _ in Checkpoint(folder, config).stream(dtype=torch.float32, device="cpu"):
        pass


def words(message: str, path: Path) -> str:
    """Return a message without what depends on the place and on the architectures."""
    message = re.sub(r"\S*/gptserve/gguf/model-[0-9a-f]+", "FOLDER", message)
    names = ", ".join(sorted(name for name in ARCHITECTURES if " " not in name))
    return message.replace(str(path), "MODEL").replace(str(path.parent), "FOLDER").replace(names, "SERVED")


def _gguf(folder: Path, change: Callable[[File], object]) -> Path:
    file = File()
    change(file)
    return _written(folder, file.data())


def _written(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def _cut(folder: Path, mark: bytes, behind: int) -> Path:
    """Write a file that ends so many bytes behind a mark."""
    data = File().data()
    return _written(folder, data[: data.index(mark) + behind])


def _key(name: str, value: tuple[int, bytes] | None) -> Callable[[File], object]:
    return lambda file: file.keys.pop(name) if value is None else file.keys.update({name: value})


def _tensor(name: str, type_name: str, *shape: int) -> Callable[[File], object]:
    return lambda file: file.tensors.update({name: (type_name, shape)})


CUTS: dict[str, tuple[bytes, int]] = {
    "the magic": (b"GGUF", 3),
    "the version": (b"GGUF", 6),
    "the number of tensors": (b"GGUF", 12),
    "the number of keys": (b"GGUF", 20),
    "the length of a key": (b"llama.block_count", -3),
    "a key": (b"llama.block_count", 6),
    "the type of a value": (b"llama.block_count", 19),
    "a number": (b"llama.block_count", 22),
    "the length of a text": (b"tokenizer.ggml.pre", 26),
    "a text": (b"tokenizer.ggml.pre", 32),
    "the type of a list": (b"tokenizer.ggml.tokens", 26),
    "the length of a list": (b"tokenizer.ggml.tokens", 32),
    "the texts of a list": (b"tokenizer.ggml.tokens", 46),
    "the numbers of a list": (b"tokenizer.ggml.token_type", 42),
    "the name of a tensor": (b"token_embd.weight", 5),
    "the number of dimensions": (b"token_embd.weight", 19),
    "a dimension": (b"token_embd.weight", 25),
    "the type of a tensor": (b"token_embd.weight", 38),
    "an offset": (b"token_embd.weight", 45),
}


def _keys() -> Iterator[tuple[str, Callable[[File], object]]]:
    """Yield what is wrong with keys."""
    yield ("no architecture", _key("general.architecture", None))
    yield ("an architecture that is a number", _key("general.architecture", number(1)))
    yield ("an architecture that is unknown", _key("general.architecture", word("mamba")))
    yield ("no layers", _key("llama.block_count", number(0)))
    yield ("2^31 layers", _key("llama.block_count", number(2**31)))
    yield ("layers below 0", _key("llama.block_count", (I32, struct.pack("<i", -1))))
    yield ("layers that are a text", _key("llama.block_count", word("1")))
    yield ("layers that are true", _key("llama.block_count", (BOOL, b"\1")))
    yield ("heads for each layer", _key("llama.attention.head_count", numbers(U32, 2, 4)))
    yield ("more heads of keys than of queries", _key("llama.attention.head_count_kv", number(4)))
    yield ("heads that do not divide the width", _key("llama.attention.head_count", number(5)))
    yield ("a width of 2^31", _key("llama.embedding_length", number(2**31)))
    yield ("a head of 2^31", _key("llama.attention.key_length", number(2**31)))
    yield ("more rotated than a head has", _key("llama.rope.dimension_count", number(99)))
    yield ("a base that is not a number", _key("llama.rope.freq_base", real(float("nan"))))
    yield ("a base of 0", _key("llama.rope.freq_base", real(0.0)))
    yield ("an epsilon that is infinite", _key("llama.attention.layer_norm_rms_epsilon", real(float("inf"))))
    yield ("an epsilon that is a list", _key("llama.attention.layer_norm_rms_epsilon", numbers(F32, 1e-5)))
    yield ("a context of 0", _key("llama.context_length", number(0)))
    yield (
        "a scaling of infinity",
        lambda file: file.keys.update(
            {"llama.rope.scaling.type": word("linear"), "llama.rope.scaling.factor": real(float("inf"))}
        ),
    )
    yield ("lists in a list", _key("a", (ARRAY, struct.pack("<IQIQI", ARRAY, 1, U32, 1, 1))))
    yield ("a list of 2^60 texts", _key("a", (ARRAY, struct.pack("<IQ", TEXT, 2**60))))
    yield ("a list of an unknown type", _key("a", (ARRAY, struct.pack("<IQ", 99, 1))))
    yield ("a text of 2^63 bytes", _key("a", (TEXT, struct.pack("<Q", 2**63))))
    yield ("a text that is not UTF-8", _key("a", (TEXT, text(b"\xc3\x28"))))
    yield (
        "a token that is not UTF-8",
        _key("tokenizer.ggml.tokens", (ARRAY, struct.pack("<IQ", TEXT, 1) + text(b"\xff"))),
    )
    yield (
        "more tokens than rows",
        lambda file: (
            file.keys.pop("tokenizer.ggml.token_type"),
            file.keys.update({"tokenizer.ggml.tokens": texts(["a", "b", "ab", "</s>", "c"])}),
        ),
    )
    yield ("tokens that are numbers", _key("tokenizer.ggml.tokens", numbers(U32, 1, 2, 3, 4)))
    yield ("types of fewer tokens", _key("tokenizer.ggml.token_type", numbers(I32, 1)))
    yield ("a merge of one", _key("tokenizer.ggml.merges", texts(["ab"])))
    yield ("a merge of unknown tokens", _key("tokenizer.ggml.merges", texts(["a c"])))
    yield ("a merge to an unknown token", _key("tokenizer.ggml.merges", texts(["b a"])))
    yield ("an end that is no token", _key("tokenizer.ggml.eos_token_id", number(4)))
    yield ("an end that is a text", _key("tokenizer.ggml.eos_token_id", word("</s>")))
    yield ("a template that is a number", _key("tokenizer.chat_template", number(1)))
    yield (
        "scores of fewer tokens",
        lambda file: file.keys.update(
            {"tokenizer.ggml.model": word("llama"), "tokenizer.ggml.scores": numbers(F32, 0.0)}
        ),
    )
    yield ("a beginning that is neither true nor false", _key("tokenizer.ggml.add_bos_token", number(1)))
    yield ("an alignment of 2^31", _key("general.alignment", number(2**31)))


def _tensors() -> Iterator[tuple[str, Callable[[File], object]]]:
    """Yield what is wrong with tensors."""

    def at(name: str, offset: int) -> Callable[[File], object]:
        return lambda file: file.offsets.update({name: offset})

    yield ("two tensors in one place", at("blk.0.attn_k.weight", 0))
    yield ("a tensor half behind the end", at("blk.0.ffn_down.weight", 2**13))
    yield ("an offset of 2^64 - 32", at("blk.0.ffn_down.weight", 2**64 - 32))
    yield ("an odd offset", at("blk.0.ffn_down.weight", 33))
    yield ("queries with other rows", _tensor("blk.0.attn_q.weight", "Q4_0", 64, 32))
    yield ("queries with other columns", _tensor("blk.0.attn_q.weight", "Q4_0", 32, 64))
    yield ("queries with half a block", _tensor("blk.0.attn_q.weight", "Q4_0", 32, 48))
    yield ("queries of three dimensions", _tensor("blk.0.attn_q.weight", "Q4_0", 1, 32, 32))
    yield ("a norm of another width", _tensor("blk.0.attn_norm.weight", "F32", 64))
    yield ("an embedding of one dimension", _tensor("token_embd.weight", "F32", 128))
    yield ("an embedding of another width", _tensor("token_embd.weight", "F32", 4, 64))
    yield ("no embedding", lambda file: file.tensors.pop("token_embd.weight"))
    yield "no norm", lambda file: file.tensors.pop("output_norm.weight")
    yield ("no layer", lambda file: [file.tensors.pop(name) for name in list(file.tensors) if "blk" in name])
    yield ("a tensor too many", _tensor("blk.1.attn_q.weight", "F32", 32))
    yield "a tensor of an unknown name", _tensor("adapter.weight", "F32", 32)
    yield ("factors of another model", _tensor("rope_freqs.weight", "F32", 8))
    yield ("factors in blocks", _tensor("rope_freqs.weight", "Q8_0", 32))
    yield (
        "experts without a router",
        lambda file: file.keys.update({"llama.expert_count": number(2), "llama.expert_used_count": number(1)}),
    )
    yield (
        "experts beyond all that may be",
        lambda file: (
            file.keys.update({"llama.expert_count": number(2), "llama.expert_used_count": number(1)}),
            file.tensors.update({"blk.0.ffn_gate_exps.weight": ("F16", (2**18, 1, 1))}),
        ),
    )
    yield (
        "fewer experts than a token chooses",
        lambda file: file.keys.update({"llama.expert_count": number(1), "llama.expert_used_count": number(2)}),
    )


NOT_FINITE = ("Q4_0", "Q4_1", "Q8_0", "IQ4_NL")
FIRST, SECOND = "model-00001-of-00002.gguf", "model-00002-of-00002.gguf"


def _split(folder: Path, change: Callable[[Path, Path], object]) -> Path:
    """Write a file in two parts, whose second may be changed."""
    first, second, tensors = File(), File(), File().tensors
    first.tensors = {name: tensors.pop(name) for name in list(tensors)[:4]}
    second.keys, second.tensors = {}, tensors
    (folder / FIRST).write_bytes(first.data())
    (folder / SECOND).write_bytes(second.data())
    change(folder / FIRST, folder / SECOND)
    return folder / FIRST


def _instead(make: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    return lambda first, second: (second.unlink(), make(second))


def _renamed(folder: Path, name: str) -> Path:
    return _written(folder, File().data()).rename(folder / name)


def _place(folder: Path, make: Callable[[Path], object]) -> Path:
    make(folder / "model.gguf")
    return folder / "model.gguf"


def _splits() -> Iterator[tuple[str, Damage]]:
    """Yield what is wrong with parts and places of files."""

    def split(change: Callable[[Path, Path], object]) -> Damage:
        return partial(_split, change=change)

    yield ("no second part", split(lambda first, second: second.unlink()))
    yield ("a part that is the first", split(lambda first, second: shutil.copy(first, second)))
    yield ("a part that links to the first", split(_instead(lambda path: path.symlink_to(FIRST))))
    yield ("a part that links to itself", split(_instead(lambda path: path.symlink_to(path.name))))
    yield ("a part that is a folder", split(_instead(Path.mkdir)))
    yield ("a part that is a pipe", split(_instead(os.mkfifo)))
    yield ("a part of a terabyte of zeros", split(_instead(lambda path: path.touch() or os.truncate(path, 2**40))))
    yield ("a part that is empty", split(_instead(Path.touch)))
    yield ("a part that is cut", split(lambda first, second: os.truncate(second, second.stat().st_size - 99)))
    yield ("parts 1 of 0", partial(_renamed, name="model-00001-of-00000.gguf"))
    yield ("parts 1 of 99999", partial(_renamed, name="model-00001-of-99999.gguf"))
    yield ("parts 3 of 2", partial(_renamed, name="model-00003-of-00002.gguf"))
    yield "a pipe", partial(_place, make=os.mkfifo)
    yield "a folder of this name", partial(_place, make=Path.mkdir)
    yield ("a terabyte of zeros", partial(_place, make=lambda path: path.touch() or os.truncate(path, 2**40)))


def _latin_key(folder: Path) -> Path:
    return _written(folder, File().data().replace(b"llama.context_length", b"llama.context_len\xc3\x28h"))


def _infinite_scales(folder: Path, type_name: str) -> Path:
    """Write a file in whose last tensor no scale is a number."""
    file, num_blocks = File(), 32 * 64 // 32
    file.tensors["blk.0.ffn_down.weight"] = type_name, (32, 64)
    last = num_blocks * BLOCKS[type_name].num_bytes
    return _written(folder, file.data()[:-last] + b"\xff\x7c" * (last // 2))


DAMAGED: dict[str, Damage] = {
    **{f"cut in {name}": partial(_cut, mark=mark, behind=behind) for name, (mark, behind) in CUTS.items()},
    **{name: partial(_gguf, change=change) for name, change in (*_keys(), *_tensors())},
    **dict(_splits()),
    "a key that is not UTF-8": _latin_key,
    **{f"scales of {name} that are no numbers": partial(_infinite_scales, type_name=name) for name in NOT_FINITE},
}

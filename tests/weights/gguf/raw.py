"""GGUF files byte by byte, for those that no library writes: damaged ones, and a small whole one to damage."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from gptserve.weights.gguf.block_sizes import BLOCKS, FILE_TYPES

U32, I32, F32, BOOL, TEXT, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
NUMBERS = {name: number for number, name in FILE_TYPES.items()}


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def file_of(*parts: bytes, version: int = 3, num_tensors: int = 0, num_keys: int = 0, data: bytes = b"") -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(parts)
    return header + bytes(-len(header) % 32) + data


def texts(values: Sequence[str]) -> tuple[int, bytes]:
    """Return a list of texts, as a value of File.keys."""
    return ARRAY, struct.pack("<IQ", TEXT, len(values)) + b"".join(map(text, values))


def numbers(kind: int, *values: float) -> tuple[int, bytes]:
    """Return a list of numbers."""
    layout = {U32: "I", I32: "i", F32: "f", BOOL: "?"}[kind]
    return ARRAY, struct.pack(f"<IQ{len(values)}{layout}", kind, len(values), *values)


def number(value: int) -> tuple[int, bytes]:
    return U32, struct.pack("<I", value)


def real(value: float) -> tuple[int, bytes]:
    return F32, struct.pack("<f", value)


def word(value: str) -> tuple[int, bytes]:
    return TEXT, text(value)


def _keys() -> dict[str, tuple[int, bytes]]:
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1}
    return {
        "general.architecture": word("llama"),
        **{f"llama.{name}": number(size) for name, size in sizes.items()},
        "llama.attention.layer_norm_rms_epsilon": real(1e-5),
        "tokenizer.ggml.model": word("gpt2"),
        "tokenizer.ggml.pre": word("gpt-2"),
        "tokenizer.ggml.tokens": texts(["a", "b", "ab", "</s>"]),
        "tokenizer.ggml.token_type": numbers(I32, 1, 1, 1, 3),
        "tokenizer.ggml.merges": texts(["a b"]),
        "tokenizer.ggml.eos_token_id": number(3),
        "tokenizer.chat_template": word("{{ messages[0].content }}"),
    }


def _tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    return {
        "token_embd.weight": ("F16", (4, 32)),
        "output_norm.weight": ("F32", (32,)),
        "blk.0.attn_norm.weight": ("F32", (32,)),
        "blk.0.ffn_norm.weight": ("F32", (32,)),
        **{f"blk.0.{name}.weight": ("Q4_0", shape) for name, shape in shapes.items()},
    }


@dataclass
class File:
    """A tiny Llama of zeros. Whoever damages it changes what stands here."""

    keys: dict[str, tuple[int, bytes]] = field(default_factory=_keys)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=_tensors)
    """Type and shape."""
    offsets: dict[str, int] = field(default_factory=dict)
    """Where tensors are said to be, if not where they are."""

    def data(self) -> bytes:
        """Return the file."""
        entries, at = [], 0
        for name, (type_name, shape) in self.tensors.items():
            entries.append(tensor(name, *shape, kind=NUMBERS[type_name], offset=self.offsets.get(name, at)))
            block = BLOCKS[type_name]
            at += -(-math.prod(shape) // block.num_elements * block.num_bytes // 32) * 32
        keys = [key(name, *value) for name, value in self.keys.items()]
        return file_of(*keys, *entries, num_tensors=len(entries), num_keys=len(keys), data=bytes(at))

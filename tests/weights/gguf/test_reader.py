"""Headers of GGUF files that are damaged or mean harm: one sentence each, before anything large is built."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.errors import InvalidCheckpointError, UnsupportedModelError, WeightsError
from gptserve.weights.families import load_config
from gptserve.weights.gguf.reader import MAX_KEYS, MAX_TENSORS, read_header
from gptserve.weights.source import resolve_model
from tests.weights.gguf.raw import ARRAY, BOOL, F32, TEXT, U32, U64, File, file_of, key, numbers, tensor, text

ONE = tensor("a", 1, 4)
FAULTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "could not be read: it is empty"),
    "another format": (b"PK\3\4" * 9, "does not begin as a GGUF file does"),
    "a cut magic": (b"GG", "ends at byte 2, in the middle of its header"),
    "version 1": (file_of(version=1), "must be of version 2 or 3, little end first, got 1"),
    "big end first": (
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "must be of version 2 or 3, little end first, got 50331648",
    ),
    "2^60 tensors": (file_of(num_tensors=2**60), f"must have at most {MAX_TENSORS} tensors, got {2**60}"),
    "2^60 keys": (file_of(num_keys=2**60), f"must have at most {MAX_KEYS} keys, got {2**60}"),
    "a key that is cut": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "ends at byte 24, in the middle of its header"),
    "a long name": (
        file_of(struct.pack("<Q", 2**60), num_keys=1),
        f"must have texts of at most 256 bytes here, got {2**60}",
    ),
    "no UTF-8": (file_of(text(b"\xff\xfe"), bytes(20), num_keys=1), "has a text that is not UTF-8: "),
    "a key twice": (file_of(key("a", BOOL, b"\1") * 2, num_keys=2), "has the key 'a' twice"),
    "an unknown value": (file_of(key("a", 99, bytes(8)), num_keys=1), "has a value of the unknown type 99"),
    "2^60 values": (
        file_of(key("a", ARRAY, struct.pack("<IQ", U32, 2**60)), num_keys=1),
        "must have at most 4194304 values in its arrays, got more",
    ),
    "arrays of arrays": (
        file_of(key("a", ARRAY, struct.pack("<IQ", ARRAY, 1)), num_keys=1),
        "has an array of the type 9, which is neither of numbers nor of texts",
    ),
    "many values in few bytes": (
        file_of(key("a", ARRAY, struct.pack("<IQ", U64, 2**22)), num_keys=1),
        "in the middle of its header",
    ),
    "an odd alignment": (
        file_of(key("general.alignment", U32, struct.pack("<I", 33)), num_keys=1),
        "general.alignment must be a power of two in [8, 65536], got 33",
    ),
    "an alignment of 0": (
        file_of(key("general.alignment", U32, bytes(4)), num_keys=1),
        "general.alignment must be a power of two in [8, 65536], got 0",
    ),
    "no dimension": (file_of(tensor("a"), num_tensors=1), "tensor 'a' must have 1 to 4 dimensions, got 0"),
    "2^31 dimensions": (
        file_of(text("a"), struct.pack("<I", 2**31), num_tensors=1),
        f"tensor 'a' must have 1 to 4 dimensions, got {2**31}",
    ),
    "a dimension of 0": (
        file_of(tensor("a", 0, 4), num_tensors=1),
        "tensor 'a' in F32 must have rows of a multiple of 1, within the file, got [0, 4]",
    ),
    "2^120 elements": (
        file_of(tensor("a", 2**60, 2**60), num_tensors=1),
        f"tensor 'a' in F32 must have rows of a multiple of 1, within the file, got [{2**60}, {2**60}]",
    ),
    "half a block": (
        file_of(tensor("a", 2, 48, kind=2), num_tensors=1, data=bytes(256)),
        "tensor 'a' in Q4_0 must have rows of a multiple of 32, within the file, got [2, 48]",
    ),
    "behind the end": (
        file_of(ONE, num_tensors=1, data=bytes(12)),
        "tensor 'a' must lie at a multiple of 32 within the file, got bytes 96 to 112 of 108",
    ),
    "an offset of 2^63": (
        file_of(tensor("a", 4, offset=2**63), num_tensors=1, data=bytes(32)),
        f"tensor 'a' must lie at a multiple of 32 within the file, got bytes {64 + 2**63} to {80 + 2**63} of 96",
    ),
    "an odd offset": (
        file_of(tensor("a", 4, offset=1), num_tensors=1, data=bytes(32)),
        "tensor 'a' must lie at a multiple of 32 within the file, got bytes 65 to 81 of 96",
    ),
    "a tensor twice": (file_of(ONE, ONE, num_tensors=2, data=bytes(32)), "has the tensor 'a' twice"),
}
TYPES = {
    9: "Q8_1",
    16: "IQ2_XXS",
    19: "IQ1_S",
    24: "I8",
    34: "TQ1_0",
    40: "NVFP4",
    31: "of type 31",
    2**31: f"of type {2**31}",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_header_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(FAULTS[name][0])
    with pytest.raises(InvalidCheckpointError) as raised:
        read_header(path)
    assert str(raised.value).startswith(f"{path}")
    assert FAULTS[name][1] in str(raised.value)


@pytest.mark.parametrize("number", TYPES)
def test_a_type_that_is_not_read_is_named(number: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(tensor("a", 256, kind=number), num_tensors=1, data=bytes(256)))
    with pytest.raises(
        UnsupportedModelError, match=f"tensor 'a' is {TYPES[number]}, which gptserve cannot read; use a file"
    ):
        read_header(path)


def test_keys_and_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    keys = {
        "a": (U32, struct.pack("<I", 7), 7),
        "b": (F32, struct.pack("<f", 1e-5), 1e-5),
        "c": (BOOL, b"\1", True),
        "d": (TEXT, text("é"), "é"),
        "e": (ARRAY, struct.pack("<IQ", TEXT, 2) + text("x") + text(""), ["x", ""]),
        "f": (ARRAY, struct.pack("<IQ3i", 5, 3, -1, 0, 2), [-1, 0, 2]),
    }
    written = [key(name, kind, value) for name, (kind, value, _) in keys.items()]
    tensors = [tensor("x", 2, 3, 4), tensor("y", 32, kind=8, offset=96)]
    path.write_bytes(file_of(*written, *tensors, num_tensors=2, num_keys=6, data=bytes(130)))
    header = read_header(path)
    assert header.keys == {name: value for name, (_, _, value) in keys.items()}
    assert [(its.dtype, its.shape, its.end - its.start) for its in header.tensors.values()] == [
        ("F32", (2, 3, 4), 96),
        ("Q8_0", (32,), 34),
    ]
    assert header.tensors["y"].start - header.tensors["x"].start == 96


def minimal() -> bytes:
    """Return a file of a tiny Llama, whole but for its weights."""
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 2}
    tokens = ["a", "b", "ab", "</s>"]
    keys = [
        key("general.architecture", TEXT, text("llama")),
        *(key(f"llama.{name}", U32, struct.pack("<I", size)) for name, size in sizes.items()),
        key("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
        key("tokenizer.ggml.model", TEXT, text("gpt2")),
        key("tokenizer.ggml.pre", TEXT, text("gpt-2")),
        key("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", TEXT, 4) + b"".join(map(text, tokens))),
        key("tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ4i", 5, 4, 1, 1, 1, 3)),
        key("tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", TEXT, 1) + text("a b")),
        key("tokenizer.ggml.eos_token_id", U32, struct.pack("<I", 3)),
    ]
    embedding = tensor("token_embd.weight", 4, 32)
    return file_of(*keys, embedding, num_tensors=1, num_keys=len(keys), data=bytes(512))


MEANINGS: dict[str, tuple[tuple[str, str], str]] = {
    "another architecture": (
        ("llama", "other"),
        "general.architecture 'other' is not supported; GGUF files of afmoe, apertus, ",
    ),
    "states": (
        ("llama", "jamba"),
        "general.architecture 'jamba' is not supported: it has layers that keep a state in place of keys and ",
    ),
    "latents": (("llama", "deepseek2"), "'deepseek2' is not supported: it has latent attention (MLA), whose keys "),
    "a part that sees": (("llama", "clip"), "it is how a model sees, whose text is in another file; GGUF files of "),
    "another tokenizer": (
        ("gpt2", "bert"),
        "tokenizer.ggml.model must be one of gpt2, llama, gemma4: other tokenizers are not",
    ),
    "another splitting": (("gpt-2", "gpt-9"), "tokenizer.ggml.pre must be one of a.x-4.0, afmoe, bloom, "),
    "tokens alike": (("\1" + "\0" * 7 + "b", "\1" + "\0" * 7 + "a"), "tokenizer.ggml.tokens must be texts that differ"),
    "no size": (
        ("llama.block_count", "llama.block_counf"),
        "llama.block_count must be an integer of at least 1, but is missing",
    ),
    "no embedding": (("token_embd.weight", "token_embf.weight"), "must have the tensor token_embd.weight"),
    "a merge to no token": (("a b", "b a"), "tokenizer.ggml.merges must be two tokens each that join to a token, got"),
    "no merges": (("ggml.merges", "ggml.mergef"), "tokenizer.ggml.merges must be a list of texts, but is missing"),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_what_is_not_served_is_refused_in_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (old, new), message = MEANINGS[name]
    data = minimal()
    if len(old) != len(new):  # an architecture, whose length stands before it
        old, new = (struct.pack("<Q", len(word)).decode() + word for word in (old, new))
    assert old.encode() in data
    path = tmp_path / "model.gguf"
    path.write_bytes(data.replace(old.encode(), new.encode(), 1) + bytes(32))
    with pytest.raises(WeightsError, match=re.escape(message)):
        resolve_model(str(path))


def test_a_merge_that_no_text_leads_to_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for merge, expected in (("a b", [["a", "b"]]), ("zz b", [])):
        path = tmp_path / f"{merge}.gguf"
        path.write_bytes(minimal().replace(text("a b"), text(merge)) + bytes(32))
        tokenizer = json.loads((resolve_model(str(path)) / "tokenizer.json").read_text(encoding="utf-8"))
        assert tokenizer["model"]["merges"] == expected


def test_a_folder_is_made_once_and_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.Q4_0.gguf"
    path.write_bytes(minimal())
    folder = resolve_model(str(path))
    assert folder == resolve_model(str(path)) == resolve_model(str(tmp_path))  # of the one file in it
    assert folder.name.startswith("tiny.Q4_0-")
    assert {child.name for child in folder.parent.iterdir()} == {folder.name}
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["rms_norm_eps"], config["vocab_size"]) == ("llama", 1e-5, 4)


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(minimal())
    folder, changed_ns = resolve_model(str(path)), path.stat().st_mtime_ns
    path.write_bytes(bytes(len(minimal())))
    os.utime(path, ns=(changed_ns, changed_ns))
    assert resolve_model(str(path)) == folder
    os.utime(path, ns=(changed_ns + 1, changed_ns + 1))
    with pytest.raises(InvalidCheckpointError, match="does not begin as a GGUF file does"):
        resolve_model(str(path))


def test_random_damage_is_refused_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data, draw, path, num_read = minimal(), random.Random(0), tmp_path / "model.gguf", 0
    messages: list[str] = []
    for number in range(600):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(data) - 512)] = draw.choice((0, 1, 0x7F, 0xFF, draw.randrange(256)))
        path.write_bytes(bytes(damaged[: draw.choice((len(data), draw.randrange(len(data))))]))
        os.utime(path, ns=(number, number))  # as a file of the same state is not read again
        try:
            resolve_model(str(path))
            num_read += 1
        except WeightsError as fault:
            messages.append(str(fault))
    assert [message for message in messages if "\n" in message or len(message) > 2000] == []
    assert 0 < num_read < 500


def test_a_list_of_equal_numbers_is_one_and_an_id_below_0_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain, odd = File(), File()
    odd.keys |= {"llama.attention.head_count_kv": numbers(U32, 1, 1), "llama.feed_forward_length": numbers(U32, 64)}
    odd.keys |= {
        f"tokenizer.ggml.{name}_token_id": (U32, struct.pack("<I", 2**32 - 1)) for name in ("bos", "unknown", "eot")
    }
    folders = []
    for name, its in (("plain", plain), ("odd", odd)):
        (tmp_path / f"{name}.gguf").write_bytes(its.data())
        folders.append(resolve_model(str(tmp_path / f"{name}.gguf")))
    assert load_config(folders[0]) == load_config(folders[1])
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        first, second = ((folder / name).read_text(encoding="utf-8") for folder in folders)
        assert first == second

    odd.keys["llama.attention.head_count_kv"] = numbers(U32, 1, 2)
    (tmp_path / "two.gguf").write_bytes(odd.data())
    rule = r"two.gguf: llama.attention.head_count_kv must be an integer of at least 1, got \[1, 2\]$"
    with pytest.raises(WeightsError, match=rule):
        resolve_model(str(tmp_path / "two.gguf"))

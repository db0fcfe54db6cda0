"""A folder for a GGUF file, as every other model has one: what the file says, in the files of a checkpoint.

config.json, generation_config.json, tokenizer.json, tokenizer_config.json and chat_template.jinja are small files of a
cache; gguf.json says where in the GGUF file each tensor is, so the weights are read where they lie. A folder's name has
a digest of what the file was when it was read. Torch-free. source.py calls it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gptserve.weights.errors import ChatTemplateError, InvalidCheckpointError, TokenizerError, WeightsError, shown
from gptserve.weights.gguf.architectures import describe_config, named_tensors
from gptserve.weights.gguf.block_sizes import BLOCKS
from gptserve.weights.gguf.reader import Header, read_header
from gptserve.weights.gguf.tokenizer import END_KEYS, GgufTokenizer
from gptserve.weights.json_file import read_json_object
from gptserve.weights.stored_tensor import StoredTensor

TENSORS_FILE = "gguf.json"
SUFFIX = ".gguf"
MAX_TENSORS_BYTES = 2**25
MAX_FILES = 2**10
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def folder_of(path: Path) -> Path:
    """Return the folder for a GGUF file, made as far as it is not there. Raises a WeightsError."""
    parts = _parts(path)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gptserve" / "gguf"
    folder = cache / f"{path.stem}-{_digest(parts)[:16]}"
    if folder.is_dir():
        return folder
    headers = [read_header(part) for part in parts]
    files = _files(_joined(headers), headers)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as new:
            made = Path(new) / "folder"
            made.mkdir()
            for name, text in files.items():
                (made / name).write_text(text, encoding="utf-8")
            if not folder.is_dir():
                made.rename(folder)
    except OSError as fault:
        if not folder.is_dir():  # another process may have made it meanwhile
            raise WeightsError(
                f"{cache}, which has what is read of GGUF files, could not be written: {fault.strerror}; name another "
                "place by XDG_CACHE_HOME"
            ) from fault
    return folder


def _digest(parts: Sequence[Path]) -> str:
    """Return that of the states of all parts and of the code that reads them: vocabularies take seconds to read."""
    states = [(str(part.resolve()), *_state(part)) for part in parts]
    digest = hashlib.sha256(json.dumps(states).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def gguf_files(names: Iterable[str]) -> list[str]:
    """Return the GGUF files among these names, of one that is split only the first; those of images are left out."""
    found = sorted(name for name in names if name.lower().endswith(SUFFIX) and "mmproj" not in name.lower())
    parts = {name: _SPLIT.fullmatch(name) for name in found}
    return [name for name, part in parts.items() if part is None or int(part[2]) == 1]


def parts_of(name: str) -> list[str]:
    """Return the names of all parts of a split file, in order; of another its own. Raises InvalidCheckpointError."""
    found = _SPLIT.fullmatch(name)
    if found is None:
        return [name]
    num = int(found[3])
    if not 1 <= num <= MAX_FILES:
        raise InvalidCheckpointError(f"{name} must be one of 1 to {MAX_FILES} parts, got {num}")
    return [f"{found[1]}-{i:05}-of-{found[3]}{SUFFIX}" for i in range(1, num + 1)]


def tensors_of(folder: Path) -> list[StoredTensor] | None:
    """Return the tensors that gguf.json lists; None if the folder has no such file. Raises InvalidCheckpointError."""
    path = folder / TENSORS_FILE
    if not path.is_file():
        return None
    listed = read_json_object(path, InvalidCheckpointError, max_bytes=MAX_TENSORS_BYTES)
    try:
        paths = [Path(str(entry["path"])) for entry in _entries(listed, "files")]
        states = [(int(entry["bytes"]), int(entry["changed_ns"])) for entry in _entries(listed, "files")]
        tensors = [
            StoredTensor(
                paths[int(entry["file"])],
                str(entry["name"]),
                str(entry["type"]),
                tuple(map(int, entry["shape"])),
                int(entry["start"]),
                int(entry["end"]),
            )
            for entry in _entries(listed, "tensors")
        ]
    except (KeyError, IndexError, TypeError, ValueError) as fault:
        raise InvalidCheckpointError(f"{path} is not what gptserve wrote: {shown(str(fault))}") from fault
    for its_path, state in zip(paths, states, strict=True):
        if _state(its_path) != state:
            raise InvalidCheckpointError(f"{its_path} has changed since {path} was written; name the file again")
    if not all(tensor.dtype in BLOCKS and 0 <= tensor.start <= tensor.end for tensor in tensors):
        raise InvalidCheckpointError(f"{path} is not what gptserve wrote: a tensor has no bytes")
    return tensors


def _entries(listed: dict[str, Any], name: str) -> list[dict[str, Any]]:
    entries = listed[name]
    if not isinstance(entries, list):
        raise TypeError(f"{name} is no list")
    return entries


def _state(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as fault:
        raise InvalidCheckpointError(f"{path} could not be read: {fault.strerror}") from fault
    return stat.st_size, stat.st_mtime_ns


def _parts(path: Path) -> list[Path]:
    """Return all files of one that is split, in order."""
    parts = [path.with_name(name) for name in parts_of(path.name)]
    for part in parts:
        if not part.is_file():
            if part == path:
                raise InvalidCheckpointError(f"{path} must be a file")
            raise InvalidCheckpointError(f"{path} is one of {len(parts)} parts, of which {part.name} is missing")
    return parts


def _joined(headers: list[Header]) -> Header:
    """Return one header: the keys of the first part, the tensors of all."""
    joined = Header(headers[0].path, headers[0].keys, vectors=headers[0].vectors)
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in joined.tensors:
                raise InvalidCheckpointError(f"{header.path}: tensor {shown(name)} is in another part, too")
            joined.tensors[name] = tensor
    return joined


def _files(header: Header, headers: list[Header]) -> dict[str, str]:
    """Return the texts of the folder's files by their names."""
    tokenizer = GgufTokenizer(header)
    ends = [tokenizer.id_of(key) for key in END_KEYS]
    generation = {"eos_token_id": list(dict.fromkeys(at for at in ends if at is not None))}
    bos = tokenizer.id_of("bos_token_id")
    config = describe_config(header)
    if len(tokenizer.tokens) > config["vocab_size"]:
        rule = f"at most {config['vocab_size']} texts, the rows of token_embd.weight, got {len(tokenizer.tokens)}"
        raise TokenizerError(f"{header.path}: tokenizer.ggml.tokens must have {rule}")
    config = config | ({} if bos is None else {"bos_token_id": bos})
    paths = [its.path.resolve() for its in headers]
    states = [(path, *_state(path)) for path in paths]
    tensors = [
        {
            "file": paths.index(tensor.path.resolve()),
            "name": name,
            "type": tensor.dtype,
            "shape": tensor.shape,
            "start": tensor.start,
            "end": tensor.end,
        }
        for name, tensor in named_tensors(header).items()
    ]
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": generation,
        **tokenizer.files(),
        TENSORS_FILE: {
            "files": [{"path": str(path), "bytes": size, "changed_ns": changed} for path, size, changed in states],
            "tensors": tensors,
        },
    }
    texts = {name: json.dumps(values, ensure_ascii=False) for name, values in files.items()}
    template = header.keys.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ChatTemplateError(f"{header.path}: tokenizer.chat_template must be a text, got {shown(template)}")
    if template is not None:
        texts["chat_template.jinja"] = template
    return texts

"""Converts pickled torch files to a folder of safetensors. No other code unpickles.

A process of its own reads each file with torch's weights-only unpickler, which builds only tensors and plain
containers. `gptserve convert` calls `convert`; the server never does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gptserve.weights.chat.files import MORE_TEMPLATES
from gptserve.weights.errors import InvalidCheckpointError, ModelNotFoundError, shown
from gptserve.weights.families import load_config

NANOGPT_FIELDS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
COMPANIONS = ("*.json", "*.jinja", "merges.txt", f"{MORE_TEMPLATES}/*.jinja")


def convert(source: Path, target: Path, tokenizer: Path | None = None) -> None:
    """Write the model `source`, a torch file or a folder of them, as a new folder `target`.

    A training checkpoint of nanoGPT holds its configuration; any other file needs config.json beside it. Copies the
    JSON files beside the source, and those of the folder `tokenizer` if given. Checks the configuration and the names,
    shapes and dtypes of all tensors. Raises WeightsError, and then leaves no folder.
    """
    from gptserve.weights.checkpoint import Checkpoint  # it imports torch

    files = _find_files(source)
    if target.exists():
        raise InvalidCheckpointError(f"{target} must not exist yet")
    target.mkdir(parents=True)
    try:
        weight_map: dict[str, str] = {}
        for number, path in enumerate(files, start=1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
            described = _convert_file(path, target / name)
            weight_map |= dict.fromkeys(described["names"], name)
            if described["config"]:
                (target / "config.json").write_text(json.dumps(described["config"], indent=2) + "\n")
        if len(files) > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for folder in (files[0].parent, *([tokenizer] if tokenizer else [])):
            _copy_companions(folder, target)
        Checkpoint(target, load_config(target))
    except BaseException:
        shutil.rmtree(target)
        raise


def _find_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    for pattern in PATTERNS:
        if files := sorted(source.glob(pattern)):
            return files
    raise ModelNotFoundError(f"{source} must be a torch file or a folder with one, such as {PATTERNS[0]}")


def _copy_companions(folder: Path, target: Path) -> None:
    for path in (path for pattern in COMPANIONS for path in sorted(folder.glob(pattern))):
        copied = target / path.relative_to(folder)
        if not path.name.endswith(".index.json") and not copied.exists():
            copied.parent.mkdir(exist_ok=True)
            shutil.copy(path, copied)


def _convert_file(source: Path, target: Path) -> dict[str, Any]:
    """Convert in another process, which gives its memory back; a hostile file can only end that process."""
    command = [sys.executable, "-P", "-m", "gptserve.weights.convert", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise InvalidCheckpointError(f"{source} could not be converted: {shown(reason)}")
    described: dict[str, Any] = json.loads(done.stdout)
    return described


def main(source: str, target: str) -> None:
    """Convert one file; write the names of its tensors, and its configuration if it has one, to stdout as JSON."""
    import torch
    from safetensors.torch import save_file

    loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    arguments = loaded.get("model_args")
    state = loaded.get("model", loaded.get("state_dict", loaded))
    tensors = {name: value.contiguous() for name, value in state.items() if isinstance(value, torch.Tensor)}
    addresses: set[int] = set()
    for name, tensor in tensors.items():  # a tied head is the embedding's own memory, which safetensors refuses
        if tensor.data_ptr() in addresses:
            tensors[name] = tensor.clone()
        addresses.add(tensor.data_ptr())
    save_file(tensors, target, metadata={"format": "pt"})
    config = {"model_type": "nanogpt"} | {name: arguments[name] for name in NANOGPT_FIELDS} if arguments else None
    sys.stdout.write(json.dumps({"names": list(tensors), "config": config}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A model in the hub's cache while the hub does not answer: where it lies, and which files that are read it lacks.

huggingface_hub refuses a cached model that lacks any file of the asked patterns, which other programs may never have
fetched. Called by source.py.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gptserve.weights.chat.files import MORE_TEMPLATES
from gptserve.weights.errors import InvalidCheckpointError, WeightsError, shown
from gptserve.weights.json_file import read_json_object
from gptserve.weights.quantized import FILES as QUANTIZATION_FILES

NAMES_SHOWN = 3
CONFIG_FILES = ("config.json", "generation_config.json")
WEIGHTS, INDEX, SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"
ALWAYS_READ = (
    *(*CONFIG_FILES, *QUANTIZATION_FILES, "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json"),
)
TOKENIZER, OLDER_TOKENIZER = "tokenizer.json", ("vocab.json", "merges.txt", "added_tokens.json")


def find_cached(hub: Any, repo_id: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the cache; None if it has none of this revision. `hub` is huggingface_hub."""
    folder = Path(hub.constants.HF_HUB_CACHE).expanduser() / f"models--{repo_id.replace('/', '--')}"
    name = revision or hub.constants.DEFAULT_REVISION
    try:
        reference = folder / "refs" / name
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else name
        found = folder / "snapshots" / commit
        return found if commit and found.is_dir() else None
    except (OSError, ValueError):
        return None


def missing_files(hub: Any, repo_id: str, folder: Path, *, only_config: bool) -> list[str]:
    """Return the files of the hub's model that are read, as far as the cache tells, and that its folder lacks."""
    try:
        present = {path.name for path in folder.iterdir() if path.is_file()}
    except OSError:
        present = set()
    templates = {path.relative_to(folder).as_posix() for path in folder.glob(f"{MORE_TEMPLATES}/*.jinja")}
    present |= templates
    listed = present | _listed(hub, repo_id, folder.name)
    wanted: tuple[str, ...] = CONFIG_FILES
    if not only_config:
        wanted = (*ALWAYS_READ, *_of_tokenizer(listed), *_of_weights(folder, listed), *_of_templates(listed))
    needed = {name for name in wanted if name in listed} | {"config.json"}
    if not only_config:
        needed |= _shards(folder) if WEIGHTS not in listed else set()
    return sorted(needed - present)


def lack_of(hub: Any, repo_id: str, revision: str | None, *, only_config: bool) -> str:
    """Return what the cache lacks of a model, as the middle of a sentence about it."""
    folder = find_cached(hub, repo_id, revision)
    if folder is None:
        return "is not in the cache"
    names = missing_files(hub, repo_id, folder, only_config=only_config)
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return (
        f"lacks {', '.join(map(shown, names[:NAMES_SHOWN]))}{more} in the cache"
        if names
        else "is not complete in the cache"
    )


def _listed(hub: Any, repo_id: str, commit: str) -> set[str]:
    """Return the names of all files that the hub had when it was last asked; none if the cache does not tell."""
    if not hasattr(hub, "get_cached_repo_tree"):  # an older version, which notes no names
        return set()
    try:
        return {entry.path for entry in hub.get_cached_repo_tree(repo_id, revision=commit)}
    except Exception:  # the library's own: nothing is noted of this commit
        return set()


def _of_tokenizer(listed: Collection[str]) -> tuple[str, ...]:
    return (TOKENIZER,) if TOKENIZER in listed else OLDER_TOKENIZER


def _of_templates(listed: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in listed if fnmatch(name, f"{MORE_TEMPLATES}/*.jinja"))


def _of_weights(folder: Path, listed: Collection[str]) -> tuple[str, ...]:
    """Return the file of all weights, the index of the shards, or any files of weights."""
    for name in (WEIGHTS, INDEX):
        if name in listed:
            return (name,)
    return tuple(name for name in listed if name.endswith(SUFFIX) and "/" not in name)


def _shards(folder: Path) -> set[str]:
    """Return the names of the shards in the index, which may be missing or broken: Checkpoint says so."""
    try:
        shards = read_json_object(folder / INDEX, InvalidCheckpointError, required=False).get("weight_map")
    except WeightsError:
        return set()
    names = shards.values() if isinstance(shards, dict) else ()
    return {name for name in names if isinstance(name, str) and "/" not in name}

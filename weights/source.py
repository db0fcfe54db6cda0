"""Where a model comes from: the embedded one, a folder, a GGUF file, or a hub id fetched into the hub cache.

Checks only that a model of this kind is supported, not the rest of its files. huggingface_hub reads its own settings
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) and is imported only for a hub id. Called by the command line, the
server and gptserve.LLM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gptserve.weights.chat.files import MORE_TEMPLATES
from gptserve.weights.errors import ModelNotFoundError, UnsafeCheckpointError, shown
from gptserve.weights.families import open_config
from gptserve.weights.gguf.folder import SUFFIX as GGUF_SUFFIX
from gptserve.weights.gguf.folder import TENSORS_FILE, folder_of, gguf_files
from gptserve.weights.gguf.hub import choose_file, split_tag
from gptserve.weights.hub_cache import CONFIG_FILES, find_cached, lack_of, missing_files

EMBEDDED_MODEL = "storyteller"

# Files in sub-folders are other formats of the same weights, and consolidated.* other names for the same tensors.
HUB_ALLOWED = ("*.safetensors", "*.json", "merges.txt", "chat_template.jinja", f"{MORE_TEMPLATES}/*.jinja")
HUB_IGNORED = ("*/*.safetensors", "*/*.json", "consolidated*.safetensors")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

T = TypeVar("T")

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?(:[\w.-]+)?", re.ASCII)


@dataclass(slots=True)
class Download:
    """How far the download of a model has come; num_bytes are those of its files so far, however they came here."""

    num_files: int = 0
    num_files_total: int = 0
    num_bytes: int = 0


def resolve_model(model: str | None, revision: str | None = None) -> Path:
    """Return the folder of the model, downloading a hub id first; None and EMBEDDED_MODEL are the embedded model.

    An existing folder takes precedence over the embedded model and a hub id of the same name. Raises a WeightsError for
    a model that cannot be served, before its tokenizer and weights are read.
    """
    return local_model(model, revision) or fetch_model(str(model), revision)


def local_model(model: str | None, revision: str | None = None) -> Path | None:
    """Return the folder of the model as resolve_model does, but None for a hub id. Raises a WeightsError."""
    folder = _local_folder(model, revision)
    if folder is None:
        return None
    names = _file_names(folder)
    if "config.json" in names:
        open_config(folder)
    if names and TENSORS_FILE not in names:
        require_safetensors(names, str(folder))
    return folder


def resolve_config(model: str | None, revision: str | None = None) -> Path:
    """Return a folder with the model's config.json; for a hub id, download little else.

    Raises ModelNotFoundError or UnsupportedModelError.
    """
    folder = _local_folder(model, revision)
    if folder is not None:
        return folder
    repo_id, tag = split_tag(str(model))
    if tag is not None:
        return _fetch_gguf(repo_id, tag, revision)
    folder = _fetch(repo_id, revision, CONFIG_FILES)
    return folder if (folder / "config.json").is_file() else fetch_model(repo_id, revision)


def model_name(model: str | None) -> str:
    """Return the name clients know the model by: the hub id, or the folder's own name."""
    folder = _as_folder(model)
    if model is not None and folder.is_file():
        return folder.stem
    return folder.resolve().name if model is None or folder.is_dir() else model


def _local_folder(model: str | None, revision: str | None) -> Path | None:
    """Return the folder `model` names; None if it is a hub id. Raises ModelNotFoundError when it is neither."""
    if model == "":  # as a path it would be the current folder
        raise ModelNotFoundError("model must be an existing folder or a hub id, got an empty string")
    folder = _as_folder(model)
    if folder.exists():
        if revision is not None:
            raise ModelNotFoundError(f"revision must not be given with a folder, got {shown(revision)} for {folder}")
        if folder.is_dir():
            return _folder_in(folder)
        if folder.suffix.lower() != GGUF_SUFFIX:
            raise ModelNotFoundError(f"model must be a folder, a GGUF file or a hub id, got the file {folder}")
        return folder_of(folder)
    if model is None or not _HUB_ID.fullmatch(model):
        raise ModelNotFoundError(f"model must be an existing folder or a hub id, got {shown(str(folder))}")
    return None


def _folder_in(folder: Path) -> Path:
    """Return the folder, or that of the one GGUF file in it if it has no other weights."""
    names = _file_names(folder)
    found = gguf_files(names)
    if not found or any(name.endswith(".safetensors") for name in names):
        return folder
    if len(found) > 1:
        raise ModelNotFoundError(
            f"{folder} holds {len(found)} GGUF files; name one of them, such as {folder / found[0]}"
        )
    return folder_of(folder / found[0])


def _as_folder(model: str | None) -> Path:
    """Return the path `model` means; raise ModelNotFoundError for a text that cannot be one."""
    embedded = Path(__file__).with_name(EMBEDDED_MODEL)
    if model is None:
        return embedded
    try:
        folder = Path(model).expanduser()
        if not folder.exists() and model == EMBEDDED_MODEL:
            return embedded
    except (OSError, RuntimeError, ValueError) as fault:  # too long, a null byte, ~ of nobody
        raise ModelNotFoundError(
            f"model must be a folder or a hub id, got {shown(model)}: {shown(str(fault))}"
        ) from fault
    return folder


def require_safetensors(file_names: Iterable[str], where: str) -> None:
    """Raise a WeightsError unless a name ends in .safetensors; it names the other format, if there is one."""
    names = sorted(file_names)
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if not pickles:
        raise ModelNotFoundError(f"{where} holds no *.safetensors file")
    raise UnsafeCheckpointError(
        f"{where} holds its weights as pickle only ({shown(pickles[0])}), which can run any code when opened and is "
        "never read; if you trust it, download it and run: gptserve convert FOLDER TARGET"
    )


def _file_names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.is_file()]
    except OSError as fault:
        raise ModelNotFoundError(f"{folder} could not be read: {fault.strerror}") from fault


def fetch_model(repo_id: str, revision: str | None = None, download: Download | None = None) -> Path:
    """Return the folder of a hub model, downloaded as far as it is not in the cache; notes the progress in `download`.

    Raises a WeightsError.
    """
    repo_id, tag = split_tag(repo_id)
    if tag is not None:
        return _fetch_gguf(repo_id, tag, revision, download)
    folder = _fetch(repo_id, revision, HUB_ALLOWED, download)
    if (folder / "config.json").is_file():
        open_config(folder)
    names = [path.name for path in folder.glob("*.safetensors")]
    if not names:
        names = _list_files(repo_id, revision)
        if gguf_files(names):
            return _fetch_gguf(repo_id, None, revision, download)
    require_safetensors(names, f"hub model {repo_id}")
    return folder


def _fetch_gguf(repo_id: str, tag: str | None, revision: str | None, download: Download | None = None) -> Path:
    """Return the folder of a hub's GGUF file: of the one with this tag, or of the only one there is."""

    files = choose_file(_list_files(repo_id, revision), tag, f"hub model {repo_id}")
    return folder_of(_fetch(repo_id, revision, tuple(files), download) / files[0])


def _fetch(repo_id: str, revision: str | None, files: tuple[str, ...], download: Download | None = None) -> Path:
    """Download the files of a hub model that match `files` into the cache; return its folder there.

    If the hub does not answer, the folder need only have the files that are read.
    """
    options = {"revision": revision, "allow_patterns": list(files), "ignore_patterns": list(HUB_IGNORED)}

    def fetch(hub: Any) -> str:
        bars = {} if download is None else {"tqdm_class": _watched_bar(hub.utils.tqdm, download)}
        try:
            return str(hub.snapshot_download(repo_id, **options, **bars))
        except hub.errors.LocalEntryNotFoundError:
            folder = find_cached(hub, repo_id, revision)
            if folder is None or _lacks(hub, repo_id, folder, files):
                raise
            return str(folder)

    return Path(_ask_hub(repo_id, revision, fetch, only_config=files == CONFIG_FILES))


def _lacks(hub: Any, repo_id: str, folder: Path, files: tuple[str, ...]) -> bool:
    """Return whether a folder of the cache lacks files that are read. Beside a GGUF file it needs no others."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF_SUFFIX}")]
    if files[0].lower().endswith(GGUF_SUFFIX):
        return not set(names).issuperset(files)
    only_config = files == CONFIG_FILES
    is_of_gguf = bool(names) and not (folder / "config.json").is_file()
    return not is_of_gguf and bool(missing_files(hub, repo_id, folder, only_config=only_config))


def _list_files(repo_id: str, revision: str | None) -> list[str]:
    """Return the names of all files of a hub model; without the hub, of those of an earlier start."""

    def list_files(hub: Any) -> list[str]:
        try:
            return list(hub.list_repo_files(repo_id, revision=revision))
        except Exception:
            folder = find_cached(hub, repo_id, revision)
            if folder is None:
                raise
            return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    return _ask_hub(repo_id, revision, list_files)


def _watched_bar(bar: type[Any], download: Download) -> type[Any]:
    """Return a kind of the hub's progress bars that also notes the progress in `download`."""

    class WatchedBar(bar):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._counts = {"huggingface_hub.snapshot_download": "num_bytes", None: "num_files"}.get(
                options.get("name")
            )
            if self._counts == "num_files":
                download.num_files_total = options["total"]
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> Any:
            if self._counts is not None:
                setattr(download, self._counts, getattr(download, self._counts) + int(n or 0))
            return super().update(n)

    return WatchedBar


def _ask_hub(repo_id: str, revision: str | None, call: Callable[[Any], T], *, only_config: bool = False) -> T:
    """Return the result of `call` on huggingface_hub, imported only here. Raises ModelNotFoundError."""
    import huggingface_hub.errors
    import huggingface_hub.utils

    try:
        return call(huggingface_hub)
    except Exception as fault:  # from the library, its HTTP client or the disk: one kind to a user
        raise ModelNotFoundError(_why_not_fetched(huggingface_hub, repo_id, revision, fault, only_config)) from fault


def _why_not_fetched(hub: Any, repo_id: str, revision: str | None, fault: Exception, only_config: bool) -> str:
    errors = hub.errors
    if isinstance(fault, errors.GatedRepoError):
        return f"hub model {repo_id} is gated: ask for access on its page, then set HF_TOKEN"
    if isinstance(fault, errors.RepositoryNotFoundError):
        return f"{repo_id} is not a folder here, and the hub has no such model, or HF_TOKEN does not give access to it"
    if isinstance(fault, errors.RevisionNotFoundError):
        return f"hub model {repo_id} has no revision {shown(revision)}"
    at_revision = "" if revision is None else f" at revision {shown(revision)}"
    if not isinstance(fault, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return f"hub model {repo_id}{at_revision} could not be fetched: {shown(str(fault))}"
    cause = f"the hub did not answer: {shown(str(fault.__cause__))}"
    if hub.constants.HF_HUB_OFFLINE:
        cause = "HF_HUB_OFFLINE is set"
    lack = lack_of(hub, repo_id, revision, only_config=only_config)
    return f"hub model {repo_id}{at_revision} {lack}, and {cause}"

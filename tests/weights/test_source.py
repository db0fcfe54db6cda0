"""A model is the embedded one, a folder or a hub id; a stand-in hub shows what is fetched and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gptserve.weights.errors import (
    InvalidCheckpointError,
    ModelNotFoundError,
    UnsafeCheckpointError,
    UnsupportedModelError,
)
from gptserve.weights.source import model_name, require_safetensors, resolve_config, resolve_model
from tests.weights.gguf.test_reader import minimal
from tests.weights.hub import Hub, commit_of, serve_hub

WANTED = {
    "config.json": b'{"model_type": "gpt2"}',
    "generation_config.json": b"{}",
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "model.safetensors.index.json": b"{}",
    "merges.txt": b"#version: 0.2\n",
    "chat_template.jinja": b"{{ messages }}",
    "chat_template.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "vocab.json": b"{}",
}
UNWANTED = {
    "tokenizer.model": b"model",
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling_custom.py": b"raise SystemExit",
    "consolidated.safetensors": b"again",
    "onnx/model.safetensors": b"another format",
    "original/params.json": b"{}",
    "original/chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/README.md": b"#",
    "tf_model.h5": b"tensorflow",
}
PINNED = {"config.json": b'{"model_type": "gpt2", "name": "pinned"}', "model.safetensors": b"pinned"}

# The hub's settings are read when huggingface_hub is imported, so each case is a process of its own.
RESOLVE = """
import json, sys
import gptserve.weights.config, gptserve.weights.families, gptserve.weights.tokenizers.tokenizer
from gptserve.weights.errors import WeightsError
from gptserve.weights.source import resolve_model
assert not {"huggingface_hub", "tqdm", "torch", "transformers"} & set(sys.modules)
model, revision = json.loads(sys.argv[1])
try:
    folder = resolve_model(model, revision)
    print(json.dumps({"files": {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}}))
except WeightsError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
assert "torch" not in sys.modules
"""

Resolve = Callable[..., dict[str, object]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    repositories = {
        "someone/good": {"main": WANTED | UNWANTED, "v1": PINNED},
        "plain": {"main": PINNED},
        "someone/pickle": {"main": {"config.json": b'{"model_type": "gpt2"}', "pytorch_model.bin": b"pickle"}},
        "someone/empty": {"main": {"README.md": b"nothing else"}},
        "someone/gguf": {
            "main": {"m-Q4_K_M.gguf": minimal(), "m-Q8_0.gguf": b"GGUF", "mmproj-F16.gguf": b"", "README.md": b"two"}
        },
        "someone/one": {"main": {"only.gguf": minimal()}},
        "someone/bert": {"main": {"config.json": b'{"model_type": "bert"}', "pytorch_model.bin": b"pickle"}},
        "someone/gated": {"main": PINNED},
    }
    with serve_hub(Hub(repositories, locked={"someone/gated"})) as running:
        yield running


@pytest.fixture
def resolve(hub: Hub, tmp_path: Path) -> Resolve:
    def run(model: str, revision: str | None = None, **settings: str) -> dict[str, object]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, json.dumps([model, revision])],
            env=environment | settings,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        assert "\n" not in str(answer.get("message", ""))
        return answer | {"stderr": done.stderr}

    return run


def text(files: dict[str, bytes]) -> dict[str, str]:
    return {name: content.decode() for name, content in files.items()}


def test_hub_model_is_fetched_without_anything_it_does_not_need(hub: Hub, resolve: Resolve) -> None:
    answer = resolve("someone/good")
    assert answer["files"] == text(WANTED)
    assert hub.files_asked_for == set(WANTED)
    assert "100%" in str(answer["stderr"])


@pytest.mark.slow
def test_hub_model_without_an_owner_is_fetched(resolve: Resolve) -> None:
    assert resolve("plain")["files"] == text(PINNED)


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["v1", pytest.param(commit_of("v1"), marks=pytest.mark.slow)])
def test_revision_pins_the_files(resolve: Resolve, revision: str) -> None:
    assert resolve("someone/good", revision)["files"] == text(PINNED)


def test_fetched_model_is_there_offline_and_without_the_hub(hub: Hub, resolve: Resolve) -> None:
    resolve("someone/good")
    asked = len(hub.paths)
    assert resolve("someone/good", HF_HUB_OFFLINE="1")["files"] == text(WANTED)
    assert len(hub.paths) == asked
    hub.broken = True
    assert resolve("someone/good")["files"] == text(WANTED)
    assert resolve("someone/good", HF_ENDPOINT="http://127.0.0.1:9")["files"] == text(WANTED)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("model", "revision", "error", "message"),
    [
        ("someone/none", None, "ModelNotFoundError", "the hub has no such model, or HF_TOKEN does not give access"),
        pytest.param(
            "someone/gated",
            None,
            "ModelNotFoundError",
            "is gated: ask for access on its page, then set HF_TOKEN",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "someone/good",
            "v9",
            "ModelNotFoundError",
            "hub model someone/good has no revision 'v9'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "someone/empty",
            None,
            "ModelNotFoundError",
            "hub model someone/empty holds no *.safetensors file",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "someone/gguf",
            None,
            "ModelNotFoundError",
            "hub model someone/gguf must be named with the tag of one file, as OWNER/REPO:TAG; it holds 2 GGUF files: "
            "m-Q4_K_M.gguf, m-Q8_0.gguf",
            marks=pytest.mark.slow,
        ),
        pytest.param("someone/bert", None, "UnsupportedModelError", "bert is an encoder", marks=pytest.mark.slow),
        ("someone/pickle", None, "UnsafeCheckpointError", "as pickle only ('pytorch_model.bin')"),
        ("a--b", None, "ModelNotFoundError", "hub model a--b could not be fetched"),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(
    resolve: Resolve, model: str, revision: str | None, error: str, message: str
) -> None:
    answer = resolve(model, revision)
    assert answer["error"] == error
    assert message in str(answer["message"])


@pytest.mark.slow
def test_model_that_is_not_cached_says_why_it_was_not_fetched(hub: Hub, resolve: Resolve) -> None:
    answer = resolve("someone/good", "v1", HF_HUB_OFFLINE="1")
    sentence = "hub model someone/good at revision 'v1' is not in the cache, and HF_HUB_OFFLINE is set"
    assert (answer["error"], answer["message"]) == ("ModelNotFoundError", sentence)
    assert hub.paths == []
    answer = resolve("someone/good", HF_ENDPOINT="http://127.0.0.1:9")
    assert "is not in the cache, and the hub did not answer: " in str(answer["message"])
    hub.broken = True
    assert "500 Internal Server Error" in str(resolve("someone/good")["message"])


def snapshot(tmp_path: Path, repo_id: str = "someone/good") -> Path:
    [folder] = (tmp_path / "cache" / "hub" / f"models--{repo_id.replace('/', '--')}" / "snapshots").iterdir()
    return folder


@pytest.mark.slow
def test_a_cache_without_files_that_nobody_reads_is_complete(hub: Hub, resolve: Resolve, tmp_path: Path) -> None:
    unread = {"vocab.json": b"{}", "merges.txt": b"", "extra.json": b"{}", "other.safetensors": b"other"}
    files = {"config.json": WANTED["config.json"], "tokenizer.json": b"{}", "model.safetensors": b"all"}
    hub.repositories["someone/good"]["main"] = files | unread
    resolve("someone/good")
    for name in unread:
        (snapshot(tmp_path) / name).unlink()

    assert resolve("someone/good", HF_HUB_OFFLINE="1")["files"] == text(files)
    hub.broken = True
    assert resolve("someone/good")["files"] == text(files)


@pytest.mark.slow
def test_a_file_that_the_cache_lacks_is_named(resolve: Resolve, tmp_path: Path, hub: Hub) -> None:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = json.dumps({"weight_map": weight_map}).encode()
    hub.repositories["someone/good"]["main"] = WANTED | {"model.safetensors.index.json": index}
    resolve("someone/good")
    names = ("model-00002-of-00002.safetensors", "model.safetensors.index.json", "vocab.json", "chat_template.jinja")

    for name in (*names, "additional_chat_templates/tool_use.jinja"):
        cached = snapshot(tmp_path) / name
        cached.rename(tmp_path / "aside")
        answer = resolve("someone/good", HF_HUB_OFFLINE="1")
        (tmp_path / "aside").rename(cached)
        sentence = f"hub model someone/good lacks {name!r} in the cache, and HF_HUB_OFFLINE is set"
        assert (answer["error"], answer["message"]) == ("ModelNotFoundError", sentence)

    for name in names:
        (snapshot(tmp_path) / name).unlink()
    assert resolve("someone/good")["files"] == text(WANTED | {"model.safetensors.index.json": index})


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_name_of_a_commit_may_end_its_line(resolve: Resolve, tmp_path: Path, end: str) -> None:
    resolve("plain")
    reference = snapshot(tmp_path, "plain").parents[1] / "refs" / "main"
    reference.write_text(reference.read_text() + end)

    assert resolve("plain", HF_HUB_OFFLINE="1")["files"] == text(PINNED)


def test_no_model_is_the_embedded_one() -> None:
    folder = resolve_model(None)
    assert (folder.name, folder.parent.name) == ("storyteller", "weights")
    assert model_name(None) == "storyteller"


def test_the_embedded_models_own_name_is_the_embedded_one_unless_a_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("storyteller") == resolve_config("storyteller") == resolve_model(None)
    assert model_name("storyteller") == "storyteller"
    with pytest.raises(ModelNotFoundError, match="revision must not be given with a folder"):
        resolve_model("storyteller", "main")
    (tmp_path / "storyteller").mkdir()
    assert resolve_model("storyteller") == Path("storyteller")


BERT = b'{"model_type": "bert"}'
GPT2 = b'{"model_type": "gpt2"}'
HQQ = b'{"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}'


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"config.json": BERT, "model.safetensors": b""}, UnsupportedModelError, "bert is an encoder"),
        ({"config.json": BERT, "pytorch_model.bin": b""}, UnsupportedModelError, "bert is an encoder"),
        ({"config.json": HQQ, "model.safetensors": b""}, UnsupportedModelError, "quantized by the method 'hqq'"),
        ({"tiny.Q4_0.gguf": b""}, InvalidCheckpointError, r"tiny.Q4_0.gguf could not be read: it is empty"),
        ({"config.json": GPT2, "tiny.gguf": b"GG"}, InvalidCheckpointError, r"tiny.gguf ends at byte 2"),
        (
            {"a.gguf": b"", "b.gguf": b""},
            ModelNotFoundError,
            r"holds 2 GGUF files; name one of them, such as .*a\.gguf",
        ),
        (
            {"a-00001-of-00002.gguf": b""},
            InvalidCheckpointError,
            r"a-00001-of-00002.gguf is one of 2 parts, of which a-00002-of-00002.gguf is missing",
        ),
        ({"config.json": GPT2, "pytorch_model.bin": b""}, UnsafeCheckpointError, "gptserve convert FOLDER TARGET"),
        ({"ckpt.pt": b""}, UnsafeCheckpointError, "gptserve convert FOLDER TARGET"),
        ({"config.json": GPT2}, ModelNotFoundError, r"holds no \*\.safetensors file"),
    ],
)
def test_what_cannot_be_served_is_named_before_a_tokenizer_is_missed(
    files: dict[str, bytes], error: type[Exception], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        resolve_model(str(tmp_path))


def test_a_configuration_alone_can_be_inspected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(GPT2)
    assert resolve_config(str(tmp_path)) == tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "someone/gguf:Q4_K_M",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("someone/gguf:q4_k_m", "someone/one")),
    ],
)
def test_a_file_of_a_hub_is_fetched_alone_by_its_tag(hub: Hub, resolve: Resolve, model: str, tmp_path: Path) -> None:
    answer = resolve(model, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    files = answer["files"]
    assert isinstance(files, dict)
    assert json.loads(files["config.json"])["model_type"] == "llama"
    assert hub.files_asked_for == {"only.gguf" if model == "someone/one" else "m-Q4_K_M.gguf"}
    again = resolve(model, XDG_CACHE_HOME=str(tmp_path / "xdg"), HF_HUB_OFFLINE="1")  # what was fetched is enough
    assert again["files"] == files


def test_a_tag_that_no_file_has_names_those_there_are(resolve: Resolve) -> None:
    answer = resolve("someone/gguf:Q4_0")
    assert answer["error"] == "ModelNotFoundError"
    assert "as OWNER/REPO:TAG; 0 of its GGUF files fit: m-Q4_K_M.gguf, m-Q8_0.gguf" in str(answer["message"])


def test_folder_is_itself_and_named_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder)
    assert model_name(".") == model_name(str(folder)) == "my-model"
    assert model_name("someone/good") == "someone/good"


@pytest.mark.parametrize("model", ["./none", "/none", "a/b/c", "a b", "", "~/none-of-that-name", "a\nb", "-x"])
def test_what_is_neither_folder_nor_hub_id_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="model must be an existing folder or a hub id, got "):
        resolve_model(model)


def test_file_and_folder_with_revision_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match="model must be a folder, a GGUF file or a hub id, got the file "):
        resolve_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelNotFoundError, match="revision must not be given with a folder, got 'main' for "):
        resolve_model(str(tmp_path), "main")


def test_pickle_is_told_from_no_weights_at_all() -> None:
    require_safetensors(["a.safetensors", "b.bin"], "x")
    with pytest.raises(UnsafeCheckpointError, match=r"^x holds its weights as pickle only \('b\.bin'\)"):
        require_safetensors(["b.bin", "config.json"], "x")
    with pytest.raises(ModelNotFoundError, match=r"^x holds no \*\.safetensors file$"):
        require_safetensors(["config.json"], "x")

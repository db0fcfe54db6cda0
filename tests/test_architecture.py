"""The house as a whole: who may import whom and what, that importing does nothing, that the README's map is true."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import grimp
import pytest

from weights.families import FAMILIES

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine", "weights")
WITH_TORCH = {
    "engine.attention",
    "engine.attention.cpu",
    "engine.attention.reference",
    "engine.batch",
    "engine.decoder",
    "engine.engine",
    "engine.experts",
    "engine.fingerprint",
    "engine.kv_cache",
    "engine.layers",
    "engine.linear",
    "engine.llm",
    "engine.model_runner",
    "engine.rotary",
    "engine.sampler",
    "weights.checkpoint",
    "weights.mxfp4",
    "weights.storyteller.evaluate",
    "weights.storyteller.train",
}
"""The modules that import torch; a new one is torch-free unless it stands here."""

HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "fastapi",
    "pydantic",
    "uvicorn",
    "httpx",
    "huggingface_hub",
    "tiktoken",
}


def modules() -> set[str]:
    names = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def loaded_by(names: Iterable[str]) -> set[str]:
    """Return the heavy libraries in a fresh interpreter after importing these modules."""
    code = f"import importlib, json, sys\nfor n in {sorted(names)}: importlib.import_module(n)\n"
    return HEAVY & set(json.loads(run_python(code + "print(json.dumps(list(sys.modules)))")))


def test_imports_point_from_server_to_engine_to_weights() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)

    assert graph.find_illegal_dependencies_for_layers(layers=PACKAGES) == set()
    assert graph.find_illegal_dependencies_for_layers(layers=PACKAGES[::-1]) != set()


def test_the_modules_that_compute_import_torch_and_no_others() -> None:
    code = f"""
import importlib, sys
sys.modules["torch"] = None  # an import of it fails from here on
for name in {sorted(modules())}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == "torch", error
        print(name)
"""
    assert set(run_python(code).split()) == WITH_TORCH
    assert "torch" not in loaded_by(modules() - WITH_TORCH)


def test_the_command_line_is_light_to_import() -> None:
    assert loaded_by(["server.cli"]) == set()
    assert "fastapi" in loaded_by(["server.app"])


def test_importing_every_module_does_nothing() -> None:
    code = f"""
import importlib, logging, multiprocessing, psutil, signal, threading
before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], len(logging.getLogger().handlers)
for name in {sorted(modules())}:
    importlib.import_module(name)
me = psutil.Process()
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert me.children() == [] and me.net_connections() == []
assert before == ([signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], len(logging.getLogger().handlers))
"""
    assert run_python(code) == ""


def test_the_engine_names_no_family() -> None:
    # The types themselves, and what several have in common; the package's own name is none.
    words = {*FAMILIES, *(word for name in FAMILIES for word in re.split("[-_]", name)), "llama2", "qwen", "gemma"}
    words -= {"text"}
    pattern = re.compile(rf"(?<![a-z])({'|'.join(sorted(words, key=len, reverse=True))})(?![a-z])", re.IGNORECASE)
    named = set()
    for path in (ROOT / "engine").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):  # documentation may say whose a formula is
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        named |= {f"{path.name}: {found}" for found in pattern.findall(ast.unparse(tree))}

    assert named == set()
    assert pattern.findall("class GPT2Block: is_gpt_oss = model_type == 'llama'") == ["GPT", "gpt_oss", "llama"]


def test_only_the_command_line_reads_the_environment() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if reads_environment(path.read_text(encoding="utf-8"))
    }

    assert readers == {"server/cli.py"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("os.environ['HOME']", True),
        ("from os import environ", True),
        ("from os import getenv as get", True),
        ("read(os.environb)", True),
        ("def read(environment): ...", False),
    ],
)
def test_a_source_reads_the_environment_by_any_of_its_names(source: str, expected: bool) -> None:
    assert reads_environment(source) is expected


def reads_environment(source: str) -> bool:
    return re.search(r"\b(environ|getenv)b?\b", source) is not None


def test_the_map_of_the_readme_shows_every_file_once() -> None:
    entries = map_entries()
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [file for file in listed if (ROOT / file).is_file()]
    covers = {file: [entry for entry in entries if covered_by(file, entry)] for file in files}

    assert [file for file, found in covers.items() if not found] == [], "files that the map of README.md lacks"
    assert [file for file, found in covers.items() if len(found) > 1] == [], "files that the map shows twice"
    assert [entry for entry in entries if not any(entry in found for found in covers.values())] == [], "not in the tree"


def test_the_map_shows_each_module_by_itself() -> None:
    folders = [entry for entry in map_entries() if entry.endswith("/")]

    assert [entry for entry in folders if list((ROOT / entry).rglob("*.py")) and not entry.startswith("tests/")] == []


@pytest.mark.parametrize(
    ("file", "entry", "expected"),
    [
        ("engine/client.py", "engine/client.py", True),
        ("tests/engine/test_client.py", "tests/engine/", True),
        ("tests/engine_room.py", "tests/engine/", False),
        ("engine/client.py", "engine/clients.py", False),
    ],
)
def test_an_entry_covers_a_file_or_a_folder(file: str, entry: str, expected: bool) -> None:
    assert covered_by(file, entry) is expected


def covered_by(file: str, entry: str) -> bool:
    """Say whether an entry of the map, a file or a folder ending with /, shows this file."""
    return file.startswith(entry) if entry.endswith("/") else file == entry


def map_entries() -> list[str]:
    """Return the paths of the README's map: the first word of each line of its block."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.partition("\n## Map\n")[2].partition("\n```text\n")[2].partition("\n```\n")[0]
    return [line.split()[0] for line in block.splitlines() if line.strip()]

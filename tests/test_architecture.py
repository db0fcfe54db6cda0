"""Repository-wide rules: who may import whom and what, that importing does nothing, that docs/ is true and complete."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import get_args

import grimp
import pytest
import setuptools
from prometheus_client.parser import text_string_to_metric_families

from bench.size_budget import code_lines
from gptserve.engine.request import SamplingParams
from gptserve.server.core.metrics import Metrics
from gptserve.server.http.connections import Connections
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest
from gptserve.server.schemas.embeddings import EmbeddingRequest
from gptserve.server.schemas.scores import ClassifyRequest, RerankRequest, ScoreRequest
from gptserve.weights.families import FAMILIES
from gptserve.weights.pooling import Task
from tests.server.app_options import make_app
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "tests/README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
FILE = r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h|md))\b"
FOREIGN_FILES = {
    "asm/unistd.h",
    "conversion/gemma.py",
    "conversion/llama.py",
    "convert_slow_tokenizer.py",
    "docs/gguf.md",
    "ggml-common.h",
    "ggml.h",
    "gguf-py/gguf/constants.py",
    "linux/bpf_common.h",
    "linux/landlock.h",
    "linux/prctl.h",
    "linux/seccomp.h",
    "llama.cpp",
    "src/llama-vocab.cpp",
    "stats/engine_stats.py",
    "tensor_mapping.py",
}
MAX_SPINE_LINES = 3300
MAX_USER_WORDS = 13_000
PACKAGES = ("server", "engine", "weights")
WITH_TORCH = {
    "gptserve.engine.backends.cpu.attention",
    "gptserve.engine.backends.cpu.buffers",
    "gptserve.engine.backends.cpu.decoder",
    "gptserve.engine.backends.cpu.draw",
    "gptserve.engine.backends.cpu.int4",
    "gptserve.engine.backends.cpu.int8",
    "gptserve.engine.backends.cpu.linear",
    "gptserve.engine.backends.cpu.logprobs",
    "gptserve.engine.backends.cpu.obstacle",
    "gptserve.engine.backends.cpu.states",
    "gptserve.engine.backends.cpu.writer",
    "gptserve.engine.backends.gpu.attention",
    "gptserve.engine.backends.gpu.device_loss",
    "gptserve.engine.backends.gpu.graphs",
    "gptserve.engine.backends.gpu.operations",
    "gptserve.engine.backends.gpu.recorded_steps",
    "gptserve.engine.backends.gpu.sampler",
    "gptserve.engine.backends.gpu.selfcheck.attention",
    "gptserve.engine.backends.gpu.selfcheck.operations",
    "gptserve.engine.backends.gpu.selfcheck.proofs",
    "gptserve.engine.backends.gpu.selfcheck.sampler",
    "gptserve.engine.backends.gpu.token_counts",
    "gptserve.engine.backends.reference.adjustments",
    "gptserve.engine.backends.reference.attention",
    "gptserve.engine.backends.reference.draw",
    "gptserve.engine.backends.reference.grammar_masks",
    "gptserve.engine.backends.reference.logprobs",
    "gptserve.engine.engine",
    "gptserve.engine.model.activation",
    "gptserve.engine.model.attention",
    "gptserve.engine.model.attention_specs",
    "gptserve.engine.model.batch",
    "gptserve.engine.model.classifier",
    "gptserve.engine.model.convolution",
    "gptserve.engine.model.decoder",
    "gptserve.engine.model.linear_attention",
    "gptserve.engine.model.experts",
    "gptserve.engine.model.feed_forward",
    "gptserve.engine.model.group",
    "gptserve.engine.model.layer_inputs",
    "gptserve.engine.model.side",
    "gptserve.engine.model.stream_mixer",
    "gptserve.engine.model.streams",
    "gptserve.engine.model.layers",
    "gptserve.engine.model.linear",
    "gptserve.engine.model.loading",
    "gptserve.engine.model.norm",
    "gptserve.engine.model.operations",
    "gptserve.engine.model.program",
    "gptserve.engine.model.recurrent",
    "gptserve.engine.model.rotary",
    "gptserve.engine.model.routing",
    "gptserve.engine.model.states",
    "gptserve.engine.model.trial",
    "gptserve.engine.parallel.messages",
    "gptserve.engine.parallel.ranks",
    "gptserve.engine.parallel.worker",
    "gptserve.engine.runner.attention_choice",
    "gptserve.engine.runner.batch_invariance",
    "gptserve.engine.runner.description",
    "gptserve.engine.runner.fingerprint",
    "gptserve.engine.runner.hardware",
    "gptserve.engine.runner.input_squares",
    "gptserve.engine.runner.kv_cache",
    "gptserve.engine.runner.logprobs",
    "gptserve.engine.runner.overlap",
    "gptserve.engine.runner.pooling",
    "gptserve.engine.runner.probe",
    "gptserve.engine.runner.products",
    "gptserve.engine.runner.program_steps",
    "gptserve.engine.runner.prompt_logprobs",
    "gptserve.engine.runner.runner",
    "gptserve.engine.runner.sampler",
    "gptserve.engine.runner.seeded",
    "gptserve.engine.runner.setup",
    "gptserve.engine.runner.step_memory",
    "gptserve.engine.staging",
    "gptserve.llm",
    "gptserve.weights.checkpoint",
    "gptserve.weights.gguf.bits",
    "gptserve.weights.gguf.blocks",
    "gptserve.weights.gguf.codes",
    "gptserve.weights.gguf.tensors",
    "gptserve.weights.huge_pages",
    "gptserve.weights.loading_threads",
    "gptserve.weights.pinned_ring",
    "gptserve.weights.storyteller.recipe.evaluate",
    "gptserve.weights.storyteller.recipe.evaluate_chat",
    "gptserve.weights.storyteller.recipe.train",
    "gptserve.weights.torch_threads",
    "gptserve.weights.unread",
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
    names = {f"gptserve.{path.stem}" for path in (ROOT / "gptserve").glob("*.py") if path.stem != "__init__"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.parent.name == "kernels" or path.name in ("tracing.py",):
                continue  # these need Triton and OpenTelemetry, which are not installed everywhere
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.add(".".join(["gptserve", *parts][:-1] if parts[-1] == "__init__" else ["gptserve", *parts]))
    return names


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def loaded_by(names: Iterable[str]) -> set[str]:
    """Return the heavy libraries in a fresh interpreter after importing these modules."""
    code = f"import importlib, json, sys\nfor n in {sorted(names)}: importlib.import_module(n)\n"
    return HEAVY & set(json.loads(run_python(code + "print(json.dumps(list(sys.modules)))")))


def test_imports_point_from_server_to_engine_to_weights() -> None:
    graph = grimp.build_graph("gptserve", cache_dir=None)
    layers = [f"gptserve.{name}" for name in PACKAGES]

    assert graph.find_illegal_dependencies_for_layers(layers=layers) == set()
    assert graph.find_illegal_dependencies_for_layers(layers=layers[::-1]) != set()


@pytest.mark.slow
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
    assert loaded_by(["gptserve.server.cli.main"]) == set()
    imported = (
        "import sys, gptserve.server.command; print(*(name for name in sys.modules if 'gptserve.server' in name))"
    )
    assert run_python(imported).split() == ["gptserve.server", "gptserve.server.command"]
    assert "fastapi" in loaded_by(["gptserve.server.app"])


def test_the_engines_process_imports_torch_before_most_of_ours() -> None:
    """What its module imports comes before the process in each start, and before torch in it."""
    code = "import sys, {}; print(*sorted(name for name in sys.modules if name.startswith('gptserve')))"
    assert run_python(code.format("gptserve")).split() == ["gptserve"]
    before_torch = run_python(code.format("gptserve.engine.process.engine_process")).split()
    assert "gptserve.engine.child" in before_torch
    later = {"engine.config", "engine.request", "engine.runner", "weights.config", "engine.process.deferred_imports"}
    assert {f"gptserve.{name}" for name in later}.isdisjoint(before_torch)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["installed", "recipe"])
def test_importing_every_module_does_nothing(recipe: bool) -> None:
    """Those of the recipe import transformers, which takes longest."""
    names = sorted(name for name in modules() if (".recipe" in name) is recipe)
    code = f"""
import importlib, logging, multiprocessing, psutil, signal, threading
before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], len(logging.getLogger().handlers)
for name in {names}:
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
    words -= {"dense", "h", "next", "open", "text", "seed", "v1", "4", "5"}
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


def test_only_the_command_line_reads_settings_from_the_environment() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if reads_environment(path.read_text(encoding="utf-8"))
    }

    of_processes = {
        "engine/child.py",  # how torch's threads wait
        "engine/parallel/links.py",  # the key of nodes, which is no option
        "weights/confinement.py",  # where libraries lie
        "weights/gguf/folder.py",  # the cache, as huggingface_hub finds its own
        "weights/workers.py",  # which part of it a worker gets
    }
    assert readers == {"server/cli/main.py", "server/cluster/ray_app.py", *of_processes}


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


def test_one_package_is_installed_and_the_recipe_is_not() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["packages"]["find"]
    installed = set(setuptools.find_packages(str(ROOT), patterns["exclude"], patterns["include"]))
    packages = {path.parent.relative_to(ROOT) for top in PACKAGES for path in (ROOT / top).rglob("__init__.py")}
    kept = {".".join(("gptserve", *path.parts)) for path in packages if path.name != "recipe"}

    assert installed == kept | {"gptserve"}


def test_every_link_leads_to_its_folder() -> None:
    for name in PACKAGES:
        assert os.readlink(ROOT / "gptserve" / name) == f"../{name}"


def test_the_map_shows_every_folder_once_and_no_other() -> None:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(file) for file in listed if (ROOT / file).is_file()]
    folders = {f"{folder.as_posix()}/" for file in files for folder in file.parents if is_of_the_map(folder)}

    assert sorted(map_entries()) == sorted(folders)


def is_of_the_map(folder: Path) -> bool:
    """Whether a folder has a line of its own: those of the code and the others at the top of the repository."""
    return (
        folder.parts[:1] != () and (folder.parts[0] in PACKAGES or len(folder.parts) == 1) and folder.parts[0] != ".ci"
    )


def map_entries() -> list[str]:
    """Return the paths of the map in docs/dev/architecture.md: the first word of each line of its block."""
    text = (ROOT / "docs" / "dev" / "architecture.md").read_text(encoding="utf-8")
    block = text.partition("\n## Map\n")[2].partition("\n```text\n")[2].partition("\n```\n")[0]
    return [line.split()[0] for line in block.splitlines() if line.strip()]


def test_the_spine_stays_small() -> None:
    spine = column("docs/dev/architecture.md", "## The spine", 0)
    sizes = {file: len(code_lines((ROOT / file).read_text(encoding="utf-8"))) for file in sorted(spine)}

    assert {file.partition("/")[0] for file in spine} == {"server", "engine"}
    assert min(sizes.values()) > 0
    assert sum(sizes.values()) <= MAX_SPINE_LINES, sizes


def test_the_pages_for_users_stay_short() -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    num_words = {name: sum(1 for word in text.split() if re.search(r"\w", word)) for name, text in texts.items()}

    assert len(num_words) == 9
    assert sum(num_words.values()) <= MAX_USER_WORDS, f"{num_words}: what is for developers belongs in docs/dev/"


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    assert missing_paths(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_a_path_that_does_not_exist_is_named() -> None:
    text = "`server/app.py`, `server/`, `weights/families/NAME.py`, [this](models.md#context), [that](#errors)"
    wrong = "`server/nowhere.py`, [this](nowhere.md), [that](models.md#nowhere), [there](#nowhere)"

    expected = ["#nowhere", "models.md#nowhere", "nowhere.md", "server/nowhere.py"]
    assert missing_paths("docs/api.md", f"{text}; {wrong} are not") == expected


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}

    assert "test_every_test_that_a_page_names_exists" in tests
    assert set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text(encoding="utf-8"))) - tests == set()


def test_every_file_that_a_comment_names_exists() -> None:
    sources = [
        path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".cpp", ".h")
    ]
    tree = [
        f"/{path.relative_to(ROOT)}"
        for top in (*PACKAGES, "docs", "gptserve", "tests", "bench")
        for path in (ROOT / top).rglob("*.*")
    ]
    named = {
        (name, path.name) for path in sources for name in re.findall(FILE, comments(path)) if name not in FOREIGN_FILES
    }

    assert len(named) > 100
    assert {(name, where) for name, where in named if not any(path.endswith(f"/{name}") for path in tree)} == set()


def comments(path: Path) -> str:
    """Return the comments of a source, docstrings among them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return "\n".join(re.findall("//.*", text))
    expressions = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docstrings = [str(value.value) for value in expressions if isinstance(value, ast.Constant)]
    return "\n".join([*docstrings, *re.findall("# .*", text)])


def missing_paths(page: str, text: str) -> list[str]:
    """Return the paths in backticks and the targets of links that do not exist; NAME stands for any name."""
    tops = "|".join((*PACKAGES, "deploy", "tests", "bench", "docs"))
    paths = [path for path in re.findall(rf"`((?:{tops})/[\w./-]*)`", text) if "NAME" not in path]
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    return sorted([path for path in paths if not (ROOT / path).exists()] + [x for x in links if not leads(page, x)])


def leads(page: str, link: str) -> bool:
    """Whether the file of a link exists and, where it names one, the heading in it."""
    name, _, anchor = link.partition("#")
    target = (ROOT / page).parent / name if name else ROOT / page
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_model_family_has_a_row() -> None:
    assert_rows("docs/models.md", "# Models", set(FAMILIES))


def test_every_route_has_a_row() -> None:
    apps = [make_app(FakeEngineClient(), ByteTokenizer(), task=task) for task in get_args(Task)]
    paths = [entry for app in apps for entry in app.openapi()["paths"].items()]
    routes = {f"{method.upper()} {path}" for path, operations in paths for method in operations}

    assert_rows("docs/api.md", "## Routes", routes | {"GET /openapi.json"})  # which does not describe itself


def test_every_field_has_a_row() -> None:
    of_text, of_chat = set(CompletionRequest.model_fields), set(ChatRequest.model_fields)

    assert_rows("docs/api.md", "## Fields", of_text & of_chat)
    assert_rows("docs/api.md", "## Embeddings", set(EmbeddingRequest.model_fields) - {"model"})
    of_scores = {name for body in (ClassifyRequest, ScoreRequest, RerankRequest) for name in body.model_fields}
    assert_rows("docs/api.md", "## Scores", of_scores - {"model"})
    assert_rows("docs/api.md", "## Fields of completions only", of_text - of_chat)
    assert_rows("docs/api.md", "## Fields of chats only", of_chat - of_text)


def test_every_sampling_parameter_can_be_asked_for() -> None:
    lacking = {field.name for field in fields(SamplingParams)} - set(CompletionRequest.model_fields)
    assert lacking == {"grammar"}, "that one has several fields"


def test_every_field_is_read() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "server").rglob("*.py")]
    read = {name for source in sources for name in re.findall(r"\bbody\.(\w+)", source)}
    shapes = [path.read_text(encoding="utf-8") for path in (ROOT / "server" / "schemas").glob("*.py")]
    read |= {name for shape in shapes for name in re.findall(r"\bself\.(\w+)", shape)}
    parameters = {field.name for field in fields(SamplingParams)}
    only_neutral = {"suffix", "response_format", "spaces_between_special_tokens"}

    assert set(CompletionRequest.model_fields) | set(ChatRequest.model_fields) <= read | parameters | only_neutral


def test_every_error_code_has_a_row() -> None:
    sources = [path.read_text(encoding="utf-8") for top in ("server", "engine") for path in (ROOT / top).rglob("*.py")]
    given = re.compile(r'\b(?:code=|ServiceError\(|super\(\).__init__\()"(\w+)"')
    codes = {code for source in sources for code in given.findall(source)}

    assert len(codes) > 20
    assert codes - column("docs/api.md", "## Errors", 1) == set()


def test_every_metric_has_a_row() -> None:
    metrics = Metrics(FakeEngineClient(), "m")
    metrics.connections = Connections(8)
    names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    own = {name for name in names if name.startswith("gptserve_") and not name.endswith("_created")}

    assert_rows("docs/operations.md", "## Metrics", own)


def test_every_alert_has_a_row() -> None:
    text = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    assert_rows("docs/operations.md", "## Alerts", set(re.findall(r"alert: (\w+)", text)))


def test_a_row_that_is_missing_or_stale_is_named() -> None:
    with pytest.raises(AssertionError, match=r"docs/models.md, # Models: no row for \['gpt5'\]"):
        assert_rows("docs/models.md", "# Models", {*FAMILIES, "gpt5"})
    with pytest.raises(AssertionError, match=r"docs/models.md, # Models: rows for \['gpt2'\], which do not exist"):
        assert_rows("docs/models.md", "# Models", set(FAMILIES) - {"gpt2"})


def assert_rows(page: str, heading: str, names: set[str]) -> None:
    """Assert that the first cells of the tables below a heading name exactly these."""
    listed = column(page, heading, 0)
    missing, stale = sorted(names - listed), sorted(listed - names)
    assert not missing, f"{page}, {heading}: no row for {missing}"
    assert not stale, f"{page}, {heading}: rows for {stale}, which do not exist"


def column(page: str, heading: str, index: int) -> set[str]:
    """Return what stands in backticks in a column of the tables below a heading."""
    return {name for cells in table(page, heading) for name in re.findall(r"`([^`]+)`", cells[index])}


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of each row of the tables below a heading, without their heads."""
    text = "\n" + (ROOT / page).read_text(encoding="utf-8")
    lines = text.partition(f"\n{heading}\n")[2].partition("\n## ")[0].splitlines()
    heads = {i for i, line in enumerate(lines) for i in (i - 1, i) if line.startswith("|---")}
    rows = [line for i, line in enumerate(lines) if line.startswith("|") and i not in heads]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]

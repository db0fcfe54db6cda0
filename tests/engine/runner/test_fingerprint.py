"""The fingerprint: every cause changes it, and so do numbers whose cause nobody has named."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.cpu.linear import has_onednn
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.config import EngineConfig
from gptserve.engine.model.operations import TORCH, Operations
from gptserve.engine.runner.batch_invariance import Products
from gptserve.engine.runner.fingerprint import digest_of, fingerprint, numeric_causes
from gptserve.engine.runner.runner import ModelRunner
from gptserve.weights.families import load_config
from tests.engine.runs import make_engine

CPU = torch.device("cpu")


def causes(folder: Path, **changed: Any) -> dict[str, str]:
    given = {"weights_digest": "w", "model": load_config(folder), "device": CPU, "dtype": torch.float32}
    given |= {
        "config": EngineConfig(folder),
        "product": "native",
        "operations": TORCH,
        "products": Products(True),
        "num_ranks": 1,
    }
    given |= {"has_graphs": False, "draws": "torch"}
    return numeric_causes(**{**given, "backend": ReferenceAttention(), **changed})


def test_it_changes_with_each_cause_and_with_the_sample(tiny_gpt2: Path) -> None:
    known = causes(tiny_gpt2)
    seen = {fingerprint(known, "sample"), fingerprint(known, "another")}
    for name in known:
        seen.add(fingerprint(known | {name: known[name] + "."}, "sample"))
    assert len(seen) == len(known) + 2
    assert fingerprint(dict(known), "sample") in seen


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "torch": lambda patch: patch.setattr(torch, "__version__", "0.0"),
    "libraries and instructions": lambda patch: patch.setattr(torch.__config__, "show", lambda: "oneDNN 0.0"),
    "precision of products": lambda patch: patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium"),
    "gptserve": lambda patch: patch.setattr("gptserve.engine.runner.fingerprint.installed_version", lambda: "0.0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_surrounds_the_engine_is_a_cause(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = causes(tiny_gpt2)
    CHANGES[name](monkeypatch)
    after = causes(tiny_gpt2)
    assert {cause for cause in before if before[cause] != after[cause]} == {name}


def test_what_is_computed_and_by_which_code_is_a_cause(tiny_gpt2: Path) -> None:
    before = causes(tiny_gpt2)
    assert causes(tiny_gpt2, weights_digest="v")["weights"] != before["weights"]
    assert causes(tiny_gpt2, dtype=torch.bfloat16)["dtype"] != before["dtype"]
    assert {key for key in before if before[key] != causes(tiny_gpt2, has_graphs=True)[key]} == {
        "rows of decoding steps"
    }
    assert causes(tiny_gpt2, operations=Operations(build="triton 3"))["operations"] != before["operations"]
    if native.is_available():
        assert before["products"].startswith(f"native {native.supported_variants(32)[-1]} ")
    builds = {CpuAttention(name).build for name in CpuAttention.supported_instructions()}
    assert len(builds) == len(CpuAttention.supported_instructions())
    attention = {causes(tiny_gpt2, backend=CpuAttention(n))["attention"] for n in CpuAttention.supported_instructions()}
    assert len(attention | {before["attention"]}) == len(builds) + 1


@pytest.mark.skipif(not CpuAttention.is_available(), reason="the kernel is not built")
def test_the_kernels_build_is_its_code() -> None:
    [path] = Path(native.__file__).parent.glob("_native*.so")
    assert CpuAttention().build.split()[1] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_digest_sees_every_bit() -> None:
    logits = torch.randn(3, 5)
    other = logits.clone()
    other[2, 4] = torch.nextafter(other[2, 4], torch.tensor(9.0))
    assert digest_of(logits) == digest_of(logits.clone())
    assert digest_of(logits) != digest_of(other)
    assert digest_of(torch.zeros(2)) != digest_of(-torch.zeros(2))


@pytest.mark.skipif(not has_onednn(), reason="numbers are sampled where they do not depend on the batch")
def test_numbers_that_change_for_no_known_cause_are_seen(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_engine(tiny_gpt2).info.fingerprint
    logits = ModelRunner._logits_of
    monkeypatch.setattr(ModelRunner, "_logits_of", lambda *arguments: _nudged(logits(*arguments).clone()))
    assert make_engine(tiny_gpt2).info.fingerprint != before
    monkeypatch.undo()
    assert make_engine(tiny_gpt2).info.fingerprint == before


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU has no instructions to deny")
@pytest.mark.slow
def test_a_variable_that_steers_a_library_is_seen_in_the_sample(
    storyteller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of oneDNN, which multiplies where our own products cannot run."""
    monkeypatch.setattr(native, "is_available", lambda: False)
    code = (
        "from gptserve.engine.backends.cpu import native; native.is_available = lambda: False;"
        "import json; from pathlib import Path; from tests.engine.runner.test_fingerprint import causes, make_engine;"
        f"folder = Path({str(storyteller)!r});"
        "print(json.dumps([causes(folder), make_engine(folder).info.fingerprint]))"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, timeout=60)
    their_causes, theirs = json.loads(done.stdout)
    assert their_causes == causes(storyteller)
    assert theirs != make_engine(storyteller).info.fingerprint


def _nudged(logits: Tensor) -> Tensor:
    logits[:, 7] = torch.nextafter(logits[:, 7], torch.tensor(torch.inf))
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {"num_threads": 2},
        {"block_size": 3, "max_num_seqs": 2, "max_num_batched_tokens": 5},
        {"enable_prefix_caching": False, "num_blocks": 9, "max_model_len": 40},
    ],
    ids=str,
)
def test_what_changes_no_number_changes_no_fingerprint(tiny_gpt2: Path, options: dict[str, Any]) -> None:
    assert make_engine(tiny_gpt2, **options).info.fingerprint == make_engine(tiny_gpt2).info.fingerprint

"""Modules that run once somebody uses them, those of torch that an engine on a CPU leaves alone among them."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gptserve.engine.process import deferred_imports
from gptserve.engine.process.deferred_imports import deferred, torch_can_be_deferred
from tests.engine.client_harness import LIMIT_S

TORCH = """
import sys
from gptserve.engine.process.deferred_imports import DEFERRED, deferred
with deferred():
    import torch
assert "torch._refs" not in sys.modules and "torch.export.exported_program" not in sys.modules, "they were used"
product = torch.ones(2, 3) @ torch.ones(3, 2)
assert product.tolist() == [[3.0, 3.0]] * 2
from gptserve.engine.runner.seeded import seeded
with seeded(torch.device("cpu")) as generator:
    torch.randn(3, generator=generator)
assert "torch._refs" not in sys.modules, "a product or random numbers used them"
import torch.optim.adam
assert "torch.optim.swa_utils" not in sys.modules and "torch.distributions.normal" not in sys.modules, "they were used"
assert callable(torch.optim.lr_scheduler.StepLR) and "torch.optim.swa_utils" in sys.modules
assert [float(batch) for batch in torch.utils.data.DataLoader([1.0, 2.0])] == [1.0, 2.0]
assert torch.distributions.Normal(0.0, 1.0).mean == 0
assert callable(torch.profiler.profile) and callable(torch.quantization.quantize_dynamic)
assert callable(torch.masked.masked_tensor)
assert callable(torch.export.export) and "torch.export.exported_program" in sys.modules
torch._meta_registrations.activate_meta
assert "torch._refs" in sys.modules
assert torch.empty(2, 3, device="meta").matmul(torch.empty(3, 2, device="meta")).shape == (2, 2)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules are imported from; what is imported from it is forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("late_one", "prompt_one"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_module_runs_when_an_attribute_is_asked_for_once_and_others_at_once(place: Path) -> None:
    for name in ("late_one", "prompt_one"):
        (place / f"{name}.py").write_text(f"import sys\nsys.ran_here.append({name!r})\nvalue = 7\n")
    ran: list[str] = []
    sys.ran_here = ran  # type: ignore[attr-defined]
    try:
        with deferred(["late_one"]):
            import late_one
            import prompt_one
        assert ran == ["prompt_one"]
        assert inspect.getmodule(deferred) is not late_one  # it looks through all modules
        assert not hasattr(late_one, "__wrapped__")
        assert ran == ["prompt_one"]
        assert (late_one.value, prompt_one.value) == (7, 7)
        with pytest.raises(AttributeError, match="no attribute 'other'"):
            late_one.other  # noqa: B018
        assert ran == ["prompt_one", "late_one"]
    finally:
        del sys.ran_here  # type: ignore[attr-defined]


def test_a_thread_waits_for_a_module_that_another_one_runs(place: Path) -> None:
    (place / "late_one.py").write_text("import sys\nsys.runs.set()\nassert sys.goes_on.wait(60)\nvalue = 7\n")
    sys.runs, sys.goes_on = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    found: list[int] = []
    try:
        with deferred(["late_one"]):
            import late_one
        threads = [threading.Thread(target=lambda: found.append(late_one.value)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert sys.runs.wait(LIMIT_S)  # type: ignore[attr-defined]
        sys.goes_on.set()  # type: ignore[attr-defined]
        for thread in threads:
            thread.join(LIMIT_S)
        assert found == [7, 7]
    finally:
        del sys.runs, sys.goes_on  # type: ignore[attr-defined]


def test_a_module_that_fails_raises_where_it_is_used(place: Path) -> None:
    (place / "late_one.py").write_text("raise ValueError('broken')\n")
    with deferred(["late_one"]):
        import late_one
    with pytest.raises(ValueError, match="broken"):
        late_one.value  # noqa: B018


@pytest.mark.parametrize("driver", [False, True])
@pytest.mark.parametrize(("torch_version", "is_tried"), [("2.13.0+cpu", True), ("2.12.1", False), ("3.0", False)])
def test_torch_is_imported_whole_for_a_gpu_and_in_versions_that_were_not_tried(
    driver: bool, torch_version: str, is_tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_imports, "version", {"torch": torch_version}.__getitem__)
    monkeypatch.setattr(deferred_imports, "NVIDIA_DRIVER", tmp_path if driver else tmp_path / "none")
    assert torch_can_be_deferred() == (is_tried and not driver)


def test_torch_computes_on_a_cpu_without_the_modules_of_compilers_and_has_them_when_asked() -> None:
    done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_module_may_import_itself_in_a_circle_and_have_a_function_for_attributes(place: Path) -> None:
    (place / "late_one.py").write_text(
        "import prompt_one\nvalue = 7\n\ndef __getattr__(name):\n    if name == 'made':\n        return 8\n"
        "    raise AttributeError(name)\n"
    )
    (place / "prompt_one.py").write_text("import late_one\nfound = hasattr(late_one, 'value')\n")
    with deferred(["late_one"]):
        import late_one
    assert (late_one.value, late_one.made, hasattr(late_one, "other")) == (7, 8, False)
    assert not sys.modules["prompt_one"].found

"""What was proved is not compared again while nothing has changed, and is compared wherever that is not certain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptserve.engine.backends.gpu.selfcheck import proofs as proofs_module
from gptserve.engine.backends.gpu.selfcheck.proofs import FOLDER, NO_PROOFS, Proofs, digest_of_sources, proofs_of

pytest.importorskip("triton", reason="Triton is installed for Linux on x86-64 alone")

CUDA = torch.device("cuda")


class Comparison:
    """Counts how often it is asked, and finds what it is told to."""

    def __init__(self, found: str | None = None) -> None:
        self.found, self.num_asked = found, 0

    def __call__(self) -> str | None:
        self.num_asked += 1
        return self.found


def ask(proofs: Proofs, comparison: Callable[[], str | None], what: str = "gate", compared: object = "x") -> str | None:
    return proofs.disagreement(what, (compared,), comparison)


def test_what_agreed_is_not_compared_again(tmp_path: Path) -> None:
    comparison = Comparison()
    for _ in range(3):  # starts
        assert ask(Proofs(tmp_path / FOLDER, ("a card",)), comparison) is None
    assert comparison.num_asked == 1


def test_each_fact_and_all_that_is_compared_has_a_proof_of_its_own(tmp_path: Path) -> None:
    comparison = Comparison()
    for facts in (("a card", "driver 1"), ("a card", "driver 2"), ("a card",), ()):
        for what in ("gate", "normalize"):
            for compared in ("x", "y"):
                ask(Proofs(tmp_path, facts), comparison, what, compared)
    assert comparison.num_asked == len(list(tmp_path.iterdir())) == 4 * 2 * 2


def test_what_differs_or_fails_is_compared_at_each_start(tmp_path: Path) -> None:
    def fail() -> str | None:
        raise RuntimeError("no such GPU")

    proofs, comparison = Proofs(tmp_path), Comparison("by 0.1")
    assert [ask(proofs, comparison) for _ in range(2)] == ["by 0.1"] * 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such GPU"):
            ask(proofs, fail)
    assert comparison.num_asked == 2
    assert not list(tmp_path.iterdir())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def exchange(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"gate", b"norm"))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, exchange, empty, Path.unlink])
def test_a_damaged_proof_is_not_trusted_and_is_written_anew(damage: Callable[[Path], None], tmp_path: Path) -> None:
    proofs, comparison = Proofs(tmp_path), Comparison()
    ask(proofs, comparison)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    damage(path)
    comparison.found = "by 0.1"
    assert ask(proofs, comparison) == "by 0.1"
    comparison.found = None
    assert ask(proofs, comparison) is None
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [whole]
    assert comparison.num_asked == 3


def test_a_folder_that_cannot_be_written_costs_comparisons_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    comparison, folder = Comparison(), tmp_path / "file" / FOLDER
    with caplog.at_level(logging.INFO):
        assert [ask(Proofs(folder), comparison) for _ in range(2)] == [None, None]
    assert comparison.num_asked == 2
    (message, _) = caplog.messages
    assert message.startswith(f"the next start compares the GPU's kernels again, as {folder} cannot be written: ")


def test_a_proof_that_cannot_take_its_place_leaves_nothing_half_written(tmp_path: Path) -> None:
    proofs, comparison = Proofs(tmp_path), Comparison()
    ask(proofs, comparison)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()  # which is no file to read, either
    assert ask(proofs, comparison) is None
    assert comparison.num_asked == 2
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_gpu_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert proofs_of(torch.device("cpu")) == NO_PROOFS
    put_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert proofs_of(CUDA) == NO_PROOFS
    comparison = Comparison()
    for _ in range(2):
        ask(NO_PROOFS, comparison)
    assert comparison.num_asked == 2


def put_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make torch tell of a GPU, and Triton keep what it compiles in this folder."""
    import triton

    (folder / "driver").write_text("NVRM version: 580.159\nGCC version: 13\n")
    monkeypatch.setattr(proofs_module, "DRIVER", folder / "driver")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_proofs_lie_in_tritons_cache_and_hold_for_one_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton

    put_gpu(monkeypatch, tmp_path)
    first = proofs_of(CUDA)
    assert first.folder == tmp_path / FOLDER
    assert proofs_of(CUDA) == first
    assert "NVRM version: 580.159" in first.facts
    for place, name, value in (
        (torch.cuda, "get_device_name", lambda device: "NVIDIA H200"),
        (torch.cuda, "get_device_capability", lambda device: (9, 1)),
        (torch, "__version__", "99"),
        (torch.version, "cuda", "99"),
        (triton, "__version__", "99"),
        (triton.knobs.language, "fp32_default", "tf32"),
        (proofs_module, "digest_of_sources", lambda package: "other"),
    ):
        with monkeypatch.context() as change:
            change.setattr(place, name, value)
            assert proofs_of(CUDA).facts != first.facts, name
    (tmp_path / "driver").write_text("NVRM version: 590\n")
    assert proofs_of(CUDA).facts != first.facts
    (tmp_path / "driver").unlink()
    assert proofs_of(CUDA) == NO_PROOFS


def test_the_digest_tells_sources_apart(tmp_path: Path) -> None:
    files = {"engine/kernels/a.py": "x = 1\n", "engine/b.py": "", "weights/c.py": "y = 2\n"}

    def digest(**changes: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in (files | changes).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return digest_of_sources(folder)

    changes: list[dict[str, str]] = [{name: "z = 3\n"} for name in files]
    found = [digest(), *(digest(**change) for change in changes), digest(**{"engine/d.py": ""})]
    assert len(set(found)) == len(found)
    assert digest(**{"engine/notes.txt": "no source"}) == digest()

"""Imports torch without modules that an engine on a CPU never uses: they are imported once somebody asks for them.

Compilers alone need the first two: kernels for tensors without data, written in Python, and the export of programs.
Others are for training and profiling. They are a third of what importing torch takes. torch binds their names, and uses
them nowhere by itself; but a torch.Generator can be made only after the first is imported, so engine/runner/seeded.py
makes none.
engine_process.py calls this. Torch-free.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from gptserve.engine.runner.host_cpus import NVIDIA_DRIVER

TRIED = "2.13."
"""The versions of torch of which this was tried begin so; others are imported whole."""
DEFERRED = (
    "torch._meta_registrations",
    "torch.export",
    "torch.distributions",
    "torch.masked",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.utils.data",
)


def torch_can_be_deferred() -> bool:
    """Return whether DEFERRED may be left out: no GPU's compilers can use them, and this version was tried."""
    try:
        return not NVIDIA_DRIVER.exists() and version("torch").startswith(TRIED)
    except PackageNotFoundError:  # the import says so
        return False


@contextmanager
def deferred(names: Sequence[str] = DEFERRED) -> Iterator[None]:
    """Let modules of these names that are imported within it run when an attribute of theirs is first asked for.

    Double underscores ask for nothing: what looks through all modules reads them.
    """
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Deferring(spec.loader)
        return spec


class _Deferring(Loader):
    """Gives a module a function for the attributes that it lacks, which runs the module first."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._lock, self._runs = loader, threading.RLock(), False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty until it is used. What it raises is raised there, each time."""
        its = vars(module)

        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            with self._lock:  # other threads wait; this one comes again where imports go in a circle
                if its.get("__getattr__") is find and not self._runs:
                    self._runs = True
                    try:
                        self._loader.exec_module(module)
                        if its["__getattr__"] is find:  # else the module has a function of its own
                            del its["__getattr__"]
                    finally:
                        self._runs = False
                if its.get("__getattr__") is find and name not in its:
                    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} yet")
            return getattr(module, name)

        its["__getattr__"] = find

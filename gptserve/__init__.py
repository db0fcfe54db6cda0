"""gptserve: inference for GPT-style language models, exact and continuously batched.

Public, and stable between minor versions: `LLM`, `SamplingParams`, `EngineConfig`, the command `gptserve` and the HTTP
API. Everything else may change with any version. Importing this imports no torch; using `LLM` does.

    from gptserve import LLM, SamplingParams

    llm = LLM()
    print(llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)))

In the repository the three packages stand at its top, and links in this folder make them what is installed: one import
name. `server` builds on `engine`, `engine` on `weights`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptserve.engine.config import EngineConfig
    from gptserve.engine.request import SamplingParams
    from gptserve.llm import LLM

    __version__: str

__all__ = ["LLM", "EngineConfig", "SamplingParams"]

_HOMES = {"LLM": "llm", "EngineConfig": "engine.config", "SamplingParams": "engine.request"}


def __getattr__(name: str) -> Any:
    """Import what is public on first use: LLM needs torch, and the engine's process imports this before anything."""
    if name in _HOMES:
        return getattr(import_module(f"gptserve.{_HOMES[name]}"), name)
    if name == "__version__":
        from gptserve.version import installed_version

        return installed_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

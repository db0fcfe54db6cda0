"""The engine: scheduling, decoding, sampling. `engine.LLM` is the door for scripts; importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imported on first use: it needs torch, and the server process must not load it
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

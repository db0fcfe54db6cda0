"""`gptserve score`: how well a model predicts a text, in this process. `main.py` calls it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields

from gptserve.server.cli.arguments import COUNT
from gptserve.server.cli.flags import add_flags
from gptserve.server.cli.terminal import ctrl_c_kills
from gptserve.server.core.settings import ServerSettings


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gptserve score`, and those of `serve`."""
    parser.add_argument("FILE", help="UTF-8 text; - reads it from stdin")
    parser.add_argument("MODEL", nargs="?", help="folder, GGUF file or hub id (default: the embedded storyteller)")
    parser.add_argument("--window", type=COUNT, help="tokens of a window (default: the most that the model takes)")
    parser.add_argument(
        "--stride", type=COUNT, help="tokens from the start of a window to that of the next (default: half a window)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser)


def score_text(settings: ServerSettings, text: str, window: int | None, stride: int | None, *, as_json: bool) -> str:
    """Load the model as a server with these settings would, and return the report of its score of `text`.

    Raises WeightsError or EngineError.
    """
    with ctrl_c_kills():
        from gptserve.llm import LLM

    engine = {field.name: getattr(settings.engine, field.name) for field in fields(settings.engine)}
    del engine["model_dir"]
    [score] = LLM(settings.model, revision=settings.revision, **engine).score(text, window=window, stride=stride)
    if as_json:
        figures = {"perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}
        return json.dumps({**asdict(score), **figures}, indent=2)
    return (
        f"{score.num_tokens} tokens, {score.num_bytes} bytes\n"
        f"perplexity {score.perplexity:.4f}\n"
        f"bits per byte {score.bits_per_byte:.4f}"
    )

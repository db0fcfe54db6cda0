"""Builds engines and runs requests to their end, for tests of what an engine computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.request import Request, SamplingParams, TokenOutput
from gptserve.engine.scheduling.prompt_pace import PromptPace

OutputsById = dict[str, list[TokenOutput]]
CHUNK_TOKENS = 100  # no multiple of a block


class EvenPace(PromptPace):
    """Lets a step compute CHUNK_TOKENS of prompts beside sequences that decode, however long that takes."""

    def max_chunk_tokens(self, num_decoding: int, num_others: int) -> int:
        return CHUNK_TOKENS


def make_config(folder: Path, **options: Any) -> EngineConfig:
    """Return the options, or fp32 on the CPU with a small cache and one thread (a tiny model gains nothing by two)."""
    defaults = {"dtype": "float32", "device": "cpu", "kv_cache_bytes": 2**24, "num_threads": 1}
    return EngineConfig(**{"model_dir": folder, **defaults, **options})


def make_engine(folder: Path, **options: Any) -> Engine:
    """Return an engine of `make_config` that makes the same steps on any machine."""
    return Engine(make_config(folder, **options), pace=EvenPace())


def make_request(request_id: str, prompt: Sequence[int], *, seed: int = 0, **params: Any) -> Request:
    return Request(request_id, tuple(prompt), SamplingParams(**{"ignore_eos": True, **params}), seed)


def run(engine: Engine, requests: Sequence[AnyRequest]) -> OutputsById:
    """Add all requests at once and compute them to their end."""
    outputs: OutputsById = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def token_ids(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def ragged_prompts(num: int, longest: int, vocab_size: int = 96) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(num)]

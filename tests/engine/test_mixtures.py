"""Mixtures of each kind of router in an engine: bit for bit, a request alone has the results that it has under load."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.request import TokenLogprobs
from tests.engine.runs import make_engine, make_request, ragged_prompts, run, token_ids
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

ROUTERS = {
    "softmax of the chosen": "Mixtral, past its window",
    "softmax of all, a gate of the shared": "Qwen2 MoE",
    "softmax, corrected": "ERNIE 4.5 MoE",
    "sigmoid, corrected": "MiniMax M2",
    "sigmoid in groups": "GLM 4.5, in groups",
}
LOADS: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 16},
    "in chunks": {"max_num_seqs": 5, "max_num_batched_tokens": 7},
    "two threads": {"max_num_seqs": 16, "num_threads": 2},
    "preempted": {"max_num_seqs": 16, "num_blocks": 14, "block_size": 8, "enable_prefix_caching": False},
}
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
OF_FEW = ("softmax of the chosen", "sigmoid, corrected")
"""What these compute, others do, too."""
CASES = [
    pytest.param(router, kind, marks=() if kind == "bfloat16" and router not in OF_FEW else pytest.mark.slow)
    for router in ROUTERS
    for kind in KINDS
]
Results = dict[str, tuple[list[int], list[TokenLogprobs]]]
make = partial(make_engine, max_model_len=64)


@pytest.mark.some(1)
@pytest.mark.parametrize(("router", "kind"), CASES)
def test_alone_equals_under_any_load_and_in_any_order(router: str, kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[ROUTERS[router]])
    requests = [
        make_request(str(i), prompt, max_tokens=12, seed=i, temperature=0.8 * (i % 2), logprobs=3, prompt_logprobs=1)
        for i, prompt in enumerate(ragged_prompts(8, 30, vocab_size=90))
    ]

    def results(order: list[Any], engine: Any) -> Results:
        outputs = run(engine, order)
        found: Results = {}
        for request in order:
            its = outputs[request.request_id]
            logprobs = [entry for o in its for entry in (*(o.prompt_logprobs or ()), *(o.logprobs or ())) if entry]
            found[request.request_id] = token_ids(its), logprobs
        return found

    alone: Results = {}
    for request in requests:
        alone |= results([request], make(tmp_path, max_num_seqs=1, num_threads=1, **KINDS[kind]))
    assert len({tuple(ids) for ids, _ in alone.values()}) > 4
    other = KINDS["float32" if kind == "bfloat16" else "bfloat16"]
    assert results(requests, make(tmp_path, **other)) != alone
    for options in LOADS.values():
        for order in (requests, requests[::-1]):
            assert results(order, make(tmp_path, **KINDS[kind], **options)) == alone

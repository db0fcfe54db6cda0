"""What it costs to render a template and to encode a text in a worker process and not in the server's.

    python -m bench.workers

Prints medians in microseconds, first the server's, then the worker's, and the start and memory of a worker. In both
places the same code computes, with the embedded model's tokenizer.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench.machine import cpu_name
from gptserve.weights.chat.sandbox import open_template
from gptserve.weights.chat.template import PLAIN_TEMPLATE
from gptserve.weights.source import resolve_model
from gptserve.weights.tokenizers.library_encoder import LibraryEncoder, describe
from gptserve.weights.tokenizers.vocabulary import load_vocabulary
from gptserve.weights.tokenizers.worker_encoder import LIMITS
from gptserve.weights.workers import Limits, Workers

NUM_CALLS = 1000
TEXT = "Once upon a time there was a cat, and it sat on the mat. "


def main() -> None:
    descriptions = describe(load_vocabulary(resolve_model(None)))
    render, encoder = open_template(PLAIN_TEMPLATE), LibraryEncoder(*descriptions)
    templates = Workers("gptserve.weights.chat.sandbox:open_template", PLAIN_TEMPLATE, Limits())
    encoders = Workers("gptserve.weights.tokenizers.worker_encoder:open_encoder", descriptions, LIMITS)
    result: dict[str, object] = {"device": cpu_name()}
    for name, workers in (("template", templates), ("tokenizer", encoders)):
        began = time.perf_counter()
        workers.open()
        result[f"start of a worker with a {name}, ms"] = round(1000 * (time.perf_counter() - began))
        (worker,) = workers._all
        status = Path(f"/proc/{worker._process.pid}/status").read_text(encoding="utf-8")
        result[f"memory of a worker with a {name}, MB"] = int(status.partition("VmRSS:")[2].split()[0]) // 1000
    for turns in (1, 20, 400):
        messages = [{"role": "user", "content": TEXT}] * turns
        text, variables = TEXT * turns, {"messages": messages, "bos_token": "<s>", "add_generation_prompt": True}
        calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "render": (lambda v=variables: render(v), lambda v=variables: templates.call(variables=v)),
            "encode": (lambda t=text: encoder.encode(t), lambda t=text: encoders.call(text=t)),
        }
        for name, (here, there) in calls.items():
            result[f"{name} {len(text)} characters, us"] = [median_us(here), median_us(there)]
    templates.close()
    encoders.close()
    print(json.dumps(result, indent=2))


def median_us(call: Callable[[], object]) -> int:
    """Return the median time of a call."""
    times = []
    for _ in range(NUM_CALLS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e6)


if __name__ == "__main__":
    main()

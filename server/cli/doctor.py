"""`gptserve doctor`: serves the model for a moment, and says what of machine, settings and model is well. `main.py`
calls it.

It sees the server from outside, by its log, its metrics and a completion, as its clients will.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from gptserve.server.cli.errors import CommandError
from gptserve.server.cli.launch import started_server
from gptserve.server.core.settings import ServerSettings, as_text, server_options
from gptserve.weights.confinement import Confinement, available

Verdict = Literal["ok", "warn", "fail"]
Finding = tuple[Verdict, str]

REQUEST_LIMIT_S = 120.0
SCARCE_SHARE = 0.1  # of the memory: below it the system may end the engine under load
_OF_MODEL = ("model", "revision", "chat-template", "generation-config")
_LINE = re.compile(r"\S+ \S+ (INFO|WARNING|ERROR) +gptserve\S*: (.*)")  # of a log in text
_BANNER = ("model: ", "kernels: ", "memory: ")


def examine(settings: ServerSettings, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is found, as it is found. The server gets the options of model and engine, and this environment."""
    versions = f"gptserve {version('gptserve')}, torch {version('torch')}, Python {platform.python_version()}"
    yield "ok", f"versions: {versions} on {platform.system()} {platform.machine()}"
    yield _workers(available())
    yield "ok", f"settings: {settings.describe()[0] or 'all as by default'}"
    if not (settings.needs_key or settings.is_local):
        yield "warn", f"no API key is set: whoever can reach {settings.host} can use the server"
    lines: list[str] = []
    try:
        with started_server(*_flags(settings), environment=environment, show=lines.append) as url:
            yield from filter(None, map(_finding_of, lines))
            yield from _ask(url)
    except CommandError as error:
        yield "fail", f"the model cannot be served: {lines[-1].strip() if lines else error}"


def _flags(settings: ServerSettings) -> Iterator[str]:
    """Yield the flags that make a server compute as these settings do, whatever they say of address, keys and state."""
    for option in server_options():
        if option.name in settings.sources and (option.of_engine or option.name in _OF_MODEL):
            value = getattr(settings.engine if option.of_engine else settings, option.field)
            if isinstance(value, bool):
                yield f"--{option.name}" if value else f"--no-{option.name}"
            else:
                yield f"--{option.name}={as_text(value)}"


def _finding_of(line: str) -> Finding | None:
    match = _LINE.match(line)
    if match is None or (match[1] == "INFO" and not match[2].startswith(_BANNER)):
        return None
    return ("ok" if match[1] == "INFO" else "warn"), match[2]


def _ask(url: str) -> Iterator[Finding]:
    """Yield what a server tells of its kernels and memory, and a completion of it."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    with httpx.Client(base_url=url, timeout=REQUEST_LIMIT_S, trust_env=False) as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = {sample.name: sample for family in families for sample in family.samples}
        yield _kernels(samples["gptserve_build_info"].labels)
        engine = samples.get("gptserve_engine_process_resident_memory_bytes")
        yield _memory(0 if engine is None else engine.value, Path("/proc/meminfo"))
        started_at = time.perf_counter()
        response = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1, "temperature": 0})
        took_s = time.perf_counter() - started_at
    if response.status_code == httpx.codes.OK:
        yield "ok", f"request: {url} decoded a token in {took_s:.2f} s: {response.json()['choices'][0]['text']!r}"
    else:
        yield "fail", f"request: {url} answered {response.status_code}: {response.text}"


def _workers(held: Confinement) -> Finding:
    """Return what keeps the workers of templates, tokenizers and grammars from the rest of this machine."""
    return ("ok" if held.landlock and held.filters_calls else "warn"), f"workers: {held}"


def _kernels(build: Mapping[str, str]) -> Finding:
    """Return whether faster products with weights are to be had on this machine."""
    if build["device"] != "cpu" or build["product"].startswith("native"):
        return "ok", f"products with weights: {build['product']}, the fastest for this device"
    why = "their library is missing: the installation compiles it where there is a C++ compiler"
    return "warn", f"products with weights: {build['product']}, not our own kernels: {why}"


def _memory(engine_bytes: float, meminfo: Path) -> Finding:
    """Return how much memory the engine takes, and how much is left."""
    taken = f"memory: the engine's process takes {engine_bytes / 2**30:.2f} GiB"
    if not meminfo.exists():
        return "ok", taken
    sizes = {name: int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", meminfo.read_text())}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    left = f"{free / 2**20:.2f} of {total / 2**20:.2f} GiB are free"
    return ("warn" if free < SCARCE_SHARE * total else "ok"), f"{taken}; {left}"

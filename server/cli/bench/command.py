"""`gptserve bench`: measure how long the clients of a server wait under load. Any server of OpenAI's API will do."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import time
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gptserve
from gptserve.server.cli.bench.launch import ENDING_SIGNALS, signals_blocked
from gptserve.server.cli.bench.load import Load
from gptserve.server.cli.bench.report import HEADING, Measured, Objective, render, summarize
from gptserve.server.cli.bench.stream import Outcome
from gptserve.server.cli.bench.workload import Workload
from gptserve.server.cli.errors import CommandError
from gptserve.server.cli.remote import Remote
from gptserve.server.cli.terminal import print_text
from gptserve.server.core.settings import SettingsError

REQUESTS_A_CLIENT = 4
REQUESTS_AT_A_RATE = 64
WARM_UP_TOKENS = 8
WARM_UP_REQUESTS = 4  # before a rate, which does not say how many requests will be answered at once


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure: a load for each number of clients in a closed loop, then one for each rate a second."""

    workload: Workload
    concurrency: tuple[int, ...]
    rate: tuple[float, ...]
    num_requests: int | None
    """In each load; None is REQUESTS_A_CLIENT or REQUESTS_AT_A_RATE."""
    slo: Objective

    def run(self, remote: Remote, *, as_json: bool, plot: Path | None = None) -> None:
        """Print a row a load, or all as one line of JSON, and write the picture `plot`.

        Raises CommandError if the server completes nothing, or if the picture cannot be written.
        """
        model, version = remote.model_name(), remote.version()
        started, measured = datetime.now(UTC), list[Measured]()
        if not as_json:
            print_text([f"{model} at {remote.url}\n\n{HEADING}"])
        for load in self._loads(Load(remote.url, remote.headers, model)):
            measured.append(load)
            if not as_json:
                print_text([render(load.report)])
        if as_json:
            server = {"url": remote.url, "model": model, "version": version}
            client = {
                "gptserve": gptserve.__version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
                "cpus": os.cpu_count(),
            }
            about = {"started": started.isoformat(timespec="seconds"), "server": server, "client": client}
            reports = [asdict(load.report) for load in measured]
            print_text([json.dumps({"benchmark": "bench", **about, "asked": asdict(self), "loads": reports})])
        if plot is not None:
            self._plot(plot, f"{model} at {remote.url}", measured)

    def _plot(self, path: Path, title: str, measured: Sequence[Measured]) -> None:
        from gptserve.server.cli.bench.plot import draw

        lengths = f"prompts of {self.workload.prompt_tokens} tokens, answers of {self.workload.max_tokens}"
        closed, open_ = measured[: len(self.concurrency)], measured[len(self.concurrency) :]
        try:
            draw(f"{title}\n{lengths}", closed, open_).savefig(path)
        except OSError as error:
            raise CommandError(f"cannot write the plot to {path}: {error.strerror}") from error

    def _loads(self, load: Load) -> Iterator[Measured]:
        for clients in self.concurrency:
            yield _run(self._closed(load, clients))
        for rate in self.rate:
            yield _run(self._open(load, rate))

    async def _closed(self, load: Load, clients: int) -> Measured:
        await self._warm_up(load, clients)
        bodies = self.workload.bodies(self.num_requests or REQUESTS_A_CLIENT * clients)
        return await self._measure(clients, f"{clients} at a time", load.closed_loop(bodies, clients))

    async def _open(self, load: Load, rate: float) -> Measured:
        await self._warm_up(load, WARM_UP_REQUESTS)
        bodies = self.workload.bodies(self.num_requests or REQUESTS_AT_A_RATE)
        return await self._measure(rate, f"{rate:g} a second", load.open_loop(bodies, self.workload.arrivals(rate)))

    async def _warm_up(self, load: Load, number: int) -> None:
        """Send prompts of the same kind, which are not measured."""
        short = replace(self.workload, max_tokens=min(WARM_UP_TOKENS, self.workload.max_tokens))
        outcomes = await load.closed_loop(short.bodies(number), number)
        if all(outcome.failure for outcome in outcomes):
            first = outcomes[0]
            raise CommandError(
                f"the server completes no prompt: {': '.join(filter(None, (first.failure, first.message)))}"
            )

    async def _measure(self, number: float, name: str, outcomes: Awaitable[list[Outcome]]) -> Measured:
        start, cpu_start = time.perf_counter(), time.process_time()
        ended = await outcomes
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        return Measured(number, summarize(name, ended, seconds, cpu_seconds, self.slo), ended)


def check_plot(path: Path) -> None:
    """Raise SettingsError if no picture can be drawn or written there: after the loads it would be too late."""
    try:
        import gptserve.server.cli.bench.plot  # noqa: F401
    except ImportError:  # also an old one without what is used, or one that does not fit numpy
        raise SettingsError("--plot needs matplotlib: pip install 'gptserve[plots]'") from None
    if path.is_fifo():
        raise SettingsError(f"--plot must be a file that can be written, got {str(path)!r}: Is a pipe")
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise SettingsError(f"--plot must be a file that can be written, got {str(path)!r}: {error.strerror}") from None


def _run(measuring: Coroutine[Any, Any, Measured]) -> Measured:
    """Run it. Signals wait until asyncio has its handler: sooner, they would leave a task that has not begun."""

    async def begun() -> Measured:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
            return await measuring
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
            measuring.close()  # which has not begun, if a signal has waited and asyncio has no handler

    with signals_blocked():
        return asyncio.run(begun())

"""The real engine, told when and how to die; a spawned child imports it by name, and its server without torch."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from gptserve.engine.config import EngineConfig
from gptserve.engine.process.loop import Report, StepEngine
from gptserve.engine.scheduling.prompt_pace import Pace
from tests.engine import held_engine
from tests.engine.fake_step_engine import count, count_hang

if TYPE_CHECKING:
    from gptserve.engine.engine import Engine
    from gptserve.engine.runner.runner import Collect
    from gptserve.engine.runner.step_input import StepInput

Death = Literal["kill", "segfault", "hang", "no memory"]
POISON = 13, 13, 13
"""A request whose prompt begins with these ids takes the engine along."""


def load(
    config: EngineConfig,
    tally: str,
    deaths: Mapping[int, tuple[Death, int]],
    of_poison: Death = "kill",
    *,
    report: Report,
) -> Engine:
    """Load an engine that dies as `deaths` says: by the number of the load, from 1, the way and the step."""
    from gptserve.engine.engine import Engine

    number = count(tally) if tally else 0
    if deaths.get(number) == ("kill", 0):
        die("kill")
    engine = Engine(config, report, pace=Pace())  # a gate opens for one step: it must be enough for every prompt
    launch, num_runs = engine._runner.launch, 0
    way, last = deaths.get(number, ("kill", -1))

    def run(step: StepInput) -> Collect:
        nonlocal num_runs
        num_runs += 1
        if num_runs == last or (way == "no memory" and 0 < last < num_runs):
            die(way, tally)
        if any(tuple(position.known[:3]) == POISON for position in step.positions):
            die(of_poison, tally)
        return launch(step)

    engine._runner.launch = run  # type: ignore[method-assign]
    return engine


def load_in_server(config: EngineConfig, _log_format: str, _log_level: str, *, report: Report) -> StepEngine:
    """Take the place of server.logs.load_logging_engine: an engine that only POISON kills, and that a gate may hold."""
    return held_engine.load_in_server(functools.partial(load, config, "", {}), report)


def die(way: Death, tally: str = "") -> None:
    if way == "hang":
        count_hang(tally)
        while True:
            pass
    if way == "no memory":
        import torch

        torch.empty(2**60)
    os.kill(os.getpid(), signal.SIGSEGV if way == "segfault" else signal.SIGKILL)

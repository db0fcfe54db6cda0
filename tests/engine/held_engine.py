"""An engine that a test holds: it computes the first tokens of what arrives, and then waits until its gate is opened.

The gate is a folder, so that a test, a server's engine and the engine that replaces it share it. Nothing depends on how
fast any of them is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from gptserve.engine.process.loop import EngineFactory, Report, StepEngine
from gptserve.engine.request import Request, TokenOutput
from tests.engine.wrapped_engine import WrappedEngine

VARIABLE = "ENGINE_GATE"
"""The environment variable with the folder of the gate, for an engine that a server starts."""
POLL_S = 0.001


class EngineGate:
    """The test's side. It is open at first; `shut` counts the steps that an engine has made since it was loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._steps, self._loads, self._reached = (folder / name for name in ("steps", "loads", "reached"))

    def shut(self, after_steps: int = 0) -> None:
        """Let an engine make this many steps, and after that one step for each arrival."""
        self._reached.unlink(missing_ok=True)
        unfinished = self.folder / "unfinished"
        unfinished.write_text(str(after_steps))
        unfinished.replace(self._steps)

    def shut_to_new(self) -> None:
        """Let no engine load."""
        self._loads.touch()

    def open(self) -> None:
        """Let everything go on."""
        self._steps.unlink(missing_ok=True)
        self._loads.unlink(missing_ok=True)

    @property
    def is_reached(self) -> bool:
        """Whether an engine has work and waits."""
        return self._reached.exists()

    def holds(self, num_steps: int) -> bool:
        """Say whether an engine that has made `num_steps` must wait."""
        try:
            is_held = num_steps >= int(self._steps.read_text())
        except FileNotFoundError:
            return False
        if is_held:
            self._reached.touch()
        return is_held

    def wait_to_load(self) -> None:
        while self._loads.exists():
            time.sleep(POLL_S)


class HeldEngine(WrappedEngine):
    """A StepEngine whose steps its gate holds. While it waits, it takes commands and is not taken for stalled."""

    def __init__(self, engine: StepEngine, gate: EngineGate) -> None:
        super().__init__(engine)
        self._gate = gate
        self._num_steps = 0
        self._has_arrivals = False

    def add(self, request: Request) -> None:
        super().add(request)
        self._has_arrivals = True

    def step(self) -> list[TokenOutput]:
        if not self._has_arrivals and self._gate.holds(self._num_steps):
            time.sleep(POLL_S)
            return []
        self._has_arrivals = False
        self._num_steps += 1
        return super().step()


def load(folder: Path, factory: EngineFactory, *, report: Report) -> HeldEngine:
    """Load the engine that `factory` makes, held by the gate in this folder."""
    gate = EngineGate(folder)
    report(1, 4)
    gate.wait_to_load()
    return HeldEngine(factory(report=report), gate)


def load_in_server(factory: EngineFactory, report: Report) -> StepEngine:
    """Load the engine of a server, held if the environment names a gate."""
    is_held = VARIABLE in os.environ
    return load(Path(os.environ[VARIABLE]), factory, report=report) if is_held else factory(report=report)

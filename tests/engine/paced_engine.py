"""A real engine that is as slow as a large model, so that there is time to disturb what it computes."""

from __future__ import annotations

import time

from gptserve.engine.config import EngineConfig
from gptserve.engine.process.loop import Report, StepEngine
from gptserve.engine.request import TokenOutput
from gptserve.server.core.logs import load_logging_engine
from tests.engine.wrapped_engine import WrappedEngine

STEP_S = 0.1


class PacedEngine(WrappedEngine):
    """A StepEngine each step of which takes STEP_S longer."""

    def step(self) -> list[TokenOutput]:
        time.sleep(STEP_S)
        return super().step()


def load_in_server(config: EngineConfig, log_format: str, log_level: str, *, report: Report) -> StepEngine:
    """Take the place of server.logs.load_logging_engine."""
    return PacedEngine(load_logging_engine(config, log_format, log_level, report=report))

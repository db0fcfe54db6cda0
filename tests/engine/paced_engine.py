"""A real engine that is as slow as a large model, so that there is time to disturb what it computes."""

from __future__ import annotations

import time

from gptserve.engine.config import EngineConfig
from gptserve.engine.info import EngineInfo
from gptserve.engine.process.loop import Report, StepEngine
from gptserve.engine.request import Request, TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap
from gptserve.engine.stats import EngineStats
from gptserve.server.core.logs import load_logging_engine

STEP_S = 0.1


class PacedEngine:
    """A StepEngine each step of which takes STEP_S longer."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def add(self, request: Request) -> None:
        self._engine.add(request)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def draw_blocks(self) -> BlockMap:
        return self._engine.draw_blocks()

    def step(self) -> list[TokenOutput]:
        time.sleep(STEP_S)
        return self._engine.step()


def load_in_server(config: EngineConfig, log_format: str, log_level: str, *, report: Report) -> StepEngine:
    """Take the place of server.logs.load_logging_engine."""
    return PacedEngine(load_logging_engine(config, log_format, log_level, report=report))

"""A StepEngine around another one, for what a test changes of it."""

from __future__ import annotations

from gptserve.engine.info import EngineInfo
from gptserve.engine.process.loop import StepEngine
from gptserve.engine.request import Request, TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap
from gptserve.engine.stats import EngineStats


class WrappedEngine:
    """Does what its engine does."""

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
        return self._engine.step()

"""Makes the real engine, where the loop of engine/process/loop.py runs."""

from __future__ import annotations

from gptserve.engine.config import EngineConfig
from gptserve.engine.model.memory_ahead import populate_ahead
from gptserve.engine.process.imports import without_collections
from gptserve.engine.process.loop import Report, StepEngine


def load_engine(config: EngineConfig, *, report: Report) -> StepEngine:
    """Load the real engine; report the progress and show it on stderr. Only this imports torch."""
    populate_ahead(config)
    with without_collections():
        from gptserve.engine.engine import Engine
        from gptserve.engine.model.loading_bar import LoadingBar

    with LoadingBar(report) as bar:
        return Engine(config, bar.show)

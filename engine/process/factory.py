"""Makes the real engine, where the loop of engine/process/loop.py runs."""

from __future__ import annotations

from gptserve.engine.config import EngineConfig
from gptserve.engine.process.garbage import without_collections
from gptserve.engine.process.loop import Report, StepEngine


def load_engine(config: EngineConfig, *, report: Report) -> StepEngine:
    """Load the real engine; report the progress and show it on stderr. Only this imports torch."""
    from gptserve.engine.engine import Engine
    from gptserve.engine.process.loading_bar import LoadingBar

    with LoadingBar(report) as bar:
        return Engine(config, bar.show)


def load_engine_first(config: EngineConfig, *, report: Report) -> StepEngine:
    """Load it, sooner, in a process that has done nothing else."""
    from gptserve.engine.runner.memory_ahead import populate_ahead, take_populated
    from gptserve.engine.runner.read_ahead import read_ahead

    read_ahead(config.model_dir)
    populate_ahead(config)
    try:
        with without_collections():
            import gptserve.engine.engine  # noqa: F401
        return load_engine(config, report=report)
    finally:
        take_populated()  # what a failed load has left

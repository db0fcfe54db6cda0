"""`gptserve serve` on a node beyond the first: it computes for that one's engine, and serves no HTTP.

`main.py` calls it where node-rank is above 0.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import replace

from gptserve.engine.parallel.links import cluster_key
from gptserve.engine.parallel.node import Stop, run_node
from gptserve.server.core.settings import ServerSettings, server_options
from gptserve.weights.source import resolve_model

_READ_HERE = frozenset({"model", "revision", "log-format", "log-level", "config"})

logger = logging.getLogger(__name__)


def serve_node(settings: ServerSettings) -> None:
    """Compute for the first node until SIGINT or SIGTERM. Raises EngineError or WeightsError."""
    unread = [o.name for o in server_options() if not o.of_engine and o.name in settings.sources.keys() - _READ_HERE]
    if unread:
        logger.info("only the first node reads %s", ", ".join(unread))
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    folder = resolve_model(settings.model, settings.revision)
    run_node(replace(settings.engine, model_dir=folder), cluster_key(), stop)

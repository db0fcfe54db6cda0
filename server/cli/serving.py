"""What `gptserve serve` does with its settings: log them, start the engine's process, then import the server.

In this order, as importing torch there takes most of a start; `command.py` has started it already. `main.py` calls it.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, MutableMapping

from gptserve.engine.process.engine_process import end_ahead, start_ahead
from gptserve.server.cli.errors import CommandError
from gptserve.server.core.logs import configure_logging
from gptserve.server.core.settings import ServerSettings
from gptserve.server.core.settings_sources import injected_variables

logger = logging.getLogger(__name__)


def serve_with(settings: ServerSettings, environment: MutableMapping[str, str]) -> int:
    """Serve with these settings; return the exit status. Changes the environment of this process, which is the second.

    Raises CommandError, WeightsError or EngineError when the server cannot start.
    """
    environment["PYTHONSAFEPATH"] = "1"  # else child processes import from the current folder, which may be the model's
    configure_logging(settings.log_format, settings.log_level)
    if settings.engine.node_rank == 0:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    _log_settings(settings, environment)
    for variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        if environment.pop(variable, None) is not None:  # the metrics would be files that outlive the server
            logger.info("ignoring %s: this server is one process", variable)
    if settings.in_process or settings.engine.node_rank > 0:
        end_ahead()
    if settings.engine.node_rank > 0:
        from gptserve.server.cli.node import serve_node

        serve_node(settings)
        return 0
    if not settings.in_process:
        start_ahead()
    from gptserve.server.serve import StartError, serve

    try:
        return serve(settings)
    except StartError as error:
        raise CommandError(str(error)) from error


def _log_settings(settings: ServerSettings, environment: Mapping[str, str]) -> None:
    """Log what was chosen and what was ignored, and warn of what strangers can do."""
    chosen, others = settings.describe()
    if chosen:
        logger.info("settings: %s", chosen)
    logger.debug("default settings: %s", others)
    if injected := injected_variables(environment):
        logger.info("ignoring %d variables that Kubernetes made for a Service: %s", len(injected), ", ".join(injected))
    engine = settings.engine
    if not (settings.needs_key or settings.is_local or engine.node_rank):
        logger.warning("no API key is set: whoever can reach %s can use this server; see --api-key", settings.host)
    if engine.nnodes > 1:
        place = f"{engine.master_addr} port {engine.master_port}"
        logger.warning("ranks talk over TCP, without encryption, with %s: use trusted networks only", place)

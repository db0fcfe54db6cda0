"""Makes the parts of a server from its settings: the engine's client, and the application around one.

`serve.py` joins them in one process, `cluster/` has them on many machines. The web framework is imported when it is
asked for, as the engine's process imports this, too.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.process.client import EngineClient
from gptserve.engine.process.garbage import without_collections
from gptserve.engine.process.process_client import ProcessClient
from gptserve.engine.process.supervisor import Supervisor
from gptserve.engine.process.thread_client import ThreadClient
from gptserve.engine.request import SamplingParams
from gptserve.server.batches.store import BatchStore
from gptserve.server.core.logs import load_logging_engine
from gptserve.server.core.settings import ServerSettings
from gptserve.server.files.store import FileStore
from gptserve.server.jobs.store import JobStore
from gptserve.weights.generation import load_sampling_defaults
from gptserve.weights.source import model_name

if TYPE_CHECKING:  # they import the web framework
    from fastapi import FastAPI

    from gptserve.server.completions.model import Model
    from gptserve.server.operations.tracing import Tracing

logger = logging.getLogger(__name__)


class StartError(Exception):
    """The server cannot start; the message is the cause in one sentence."""


def make_engine(settings: ServerSettings, folder: Path) -> EngineClient:
    """Return the engine of these settings, which has not been started."""
    config = replace(settings.engine, model_dir=folder)
    factory = partial(load_logging_engine, config, settings.log_format, settings.log_level)
    if settings.in_process:
        return ThreadClient(factory)
    return Supervisor(
        partial(ProcessClient, factory),
        max_restarts=settings.max_engine_restarts,
        stall_limit_s=settings.engine_stall_timeout_s,
        load_limit_s=settings.engine_load_timeout_s,
    )


def make_app(
    settings: ServerSettings,
    engine: EngineClient,
    folder: Path,
    store: JobStore,
    file_store: FileStore,
    batch_store: BatchStore,
    *,
    is_one_of_several: bool = False,
) -> tuple[FastAPI, Model, Tracing | None]:
    """Return the application with its model, which owns worker processes, and its tracing; the caller closes both.

    Imports the web framework and opens the tokenizer. Raises StartError, WeightsError, KeyFileError.
    """
    with without_collections():
        from gptserve.server.app import create_app
        from gptserve.server.completions.app_options import AppOptions
        from gptserve.server.completions.model import ModelRegistry
        from gptserve.server.completions.model_folder import load_model

    names = settings.own_names or (model_name(settings.model),)
    model = load_model(folder, engine, names, settings, *sampling_defaults(settings, folder))
    tracing = None
    if settings.otlp_traces_endpoint is not None:
        from gptserve.server.operations.tracing import Tracing

        try:
            tracing = Tracing(settings.otlp_traces_endpoint)
        except ValueError as error:  # of the library's own variables
            model.close()
            raise StartError(f"otlp-traces-endpoint: {error}") from error
    options = AppOptions(settings, tracing=tracing, is_one_of_several=is_one_of_several)
    return create_app(ModelRegistry(model), options, store, file_store, batch_store), model, tracing


def sampling_defaults(settings: ServerSettings, folder: Path) -> tuple[dict[str, float], int | None]:
    """Return the model's sampling parameters and its limit of an answer in a chat. Raises StartError, WeightsError."""
    if settings.generation_config == "none":
        return {}, None
    defaults = load_sampling_defaults(folder)
    shown = " ".join(f"{name}={value:g}" for name, value in defaults.items())
    max_new_tokens = defaults.pop("max_new_tokens", None)
    try:
        SamplingParams(max_tokens=int(max_new_tokens or 1), **defaults)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        raise StartError(f"generation_config.json: {error}; start with --generation-config none") from error
    if shown:
        logger.info("sampling defaults of the model: %s (--generation-config none turns them off)", shown)
    return defaults, None if max_new_tokens is None else int(max_new_tokens)

"""The application, its options and its one model, as tests give them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from gptserve.engine.config import EngineConfig
from gptserve.engine.process.client import EngineClient
from gptserve.server.app import create_app
from gptserve.server.batches.folder import FolderBatchStore
from gptserve.server.batches.store import BatchStore
from gptserve.server.completions.app_options import AppOptions
from gptserve.server.completions.model import Model, ModelRegistry
from gptserve.server.core.settings import ServerSettings
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.files.folder import FolderFileStore
from gptserve.server.files.store import FileStore
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStore
from gptserve.server.tools.dialect import dialect_of
from gptserve.weights.pooling import Task


def app_settings(task: Task = "generate", **options: Any) -> ServerSettings:
    """Return the defaults but for `options`. Tests call the server by many names: it answers to all hosts."""
    return ServerSettings(engine=EngineConfig(Path("m"), task=task), **{"allowed_hosts": "*", **options})


def model_and_options(
    engine: EngineClient, tokenizer: Tokenizer, name: str = "m", *, aliases: tuple[str, ...] = (), **options: Any
) -> tuple[Model, AppOptions]:
    """Return a model and the options of its application: `options` are fields of these or of ServerSettings."""
    of_model, of_app = (
        {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        for kind in (Model, AppOptions)
    )
    settings = app_settings(**options)
    dialect = dialect_of(tokenizer, of_model.get("chat_template"), settings)
    return Model((name, *aliases), engine, tokenizer, dialect, **of_model), AppOptions(settings, **of_app)


def make_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    name: str = "m",
    store: JobStore | None = None,
    file_store: FileStore | None = None,
    batch_store: BatchStore | None = None,
    **options: Any,
) -> FastAPI:
    """Return an application around an engine, with options as `model_and_options` takes them."""
    model, app_options = model_and_options(engine, tokenizer, name, **options)
    stores = store or SqliteJobStore(None), file_store or FolderFileStore(None), batch_store or FolderBatchStore(None)
    return create_app(ModelRegistry(model), app_options, *stores)

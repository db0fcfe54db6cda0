"""The options of an application, as tests give them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from gptserve.engine.config import EngineConfig
from gptserve.server.completions.options import AppOptions
from gptserve.server.core.settings import ServerSettings


def app_options(model_name: str, **options: Any) -> AppOptions:
    """Return the defaults but for `options`, which are fields of AppOptions or of ServerSettings.

    Tests call the server by many names: it answers to all hosts.
    """
    options = {"allowed_hosts": "*", **options}
    own = {field.name: options.pop(field.name) for field in fields(AppOptions) if field.name in options}
    return AppOptions(ServerSettings(engine=EngineConfig(Path("m")), **options), model_name, **own)

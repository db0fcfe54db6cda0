"""The options of `gptserve serve` as a Serve configuration gives them, for engines and servers alike. Knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping

from gptserve.server.core.settings import ServerSettings
from gptserve.server.core.settings_checks import SettingsError
from gptserve.server.core.settings_sources import load_settings

OF_RAY = frozenset({"host", "port", "ssl-certfile", "ssl-keyfile", "write-timeout", "shutdown-timeout"})
"""What Ray Serve decides: its proxies listen, and it ends replicas."""


def cluster_settings(options: Mapping[str, str], environment: Mapping[str, str]) -> ServerSettings:
    """Return the settings from these options, and the variables of a node. Raises SettingsError."""
    for name, source in load_settings(options, environment).sources.items():
        if name in OF_RAY:
            raise SettingsError(f"{source}: on Ray Serve its own configuration says this")
        if name == "state-dir":
            raise SettingsError(f"{source}: servers on Ray share no folder; use state-url")
    return load_settings({"host": "0.0.0.0", **options}, environment)  # proxies listen on every node

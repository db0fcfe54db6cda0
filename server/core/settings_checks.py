"""The rules of settings that need a package which not everybody installs, and the error of all settings.

`settings.py` calls the checks.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REDACTED = "***"
_COLLECTOR = re.compile(r"https?://[^/\s?#@]+/[^\s#]+")  # the whole URL; a password would be shown by `config`
_TRACES_PACKAGE = "opentelemetry-exporter-otlp-proto-http"
_DATABASE_PACKAGE = "psycopg"
# What libpq would read in another way and then show, such as the end of a password with an @, is none.
_DATABASE = re.compile(r"postgres(ql)?://([^@/\s]*@)?[^@?\s]*(\?\w+=[^&=\s]*(&\w+=[^&=\s]*)*)?")
DATABASE_RULE = "a URL such as postgresql://user@host/database, with %40 for an @ in a password and %2F for a /"
_NO_BYTE = re.compile(r"%(?![0-9A-Fa-f]{2})|%00")


class SettingsError(Exception):
    """A setting is unknown or its value breaks a rule; the message names the setting, its source and the value."""


def check_traces(endpoint: str) -> None:
    """Check a collector's URL. Raises SettingsError."""
    if not _COLLECTOR.fullmatch(endpoint):
        rule = "a URL with its path and without a password, such as http://localhost:4318/v1/traces"
        given = REDACTED if "@" in endpoint else repr(endpoint)
        raise SettingsError(f"otlp-traces-endpoint must be {rule}, got {given}")
    try:
        version(_TRACES_PACKAGE)
    except PackageNotFoundError:
        raise SettingsError("otlp-traces-endpoint needs OpenTelemetry: pip install 'gptserve[otel]'") from None


def check_state_url(url: str, state_dir: Path | None) -> None:
    """Check a database's URL, which is secret as it may have a password. Raises SettingsError."""
    if state_dir is not None:
        raise SettingsError("state-url and state-dir exclude each other, got both")
    if not _DATABASE.fullmatch(url):
        raise SettingsError(f"state-url must be {DATABASE_RULE}, got {REDACTED}")
    if _NO_BYTE.search(url):
        raise SettingsError(f"state-url must have %25 for a %, and no %00, got {REDACTED}")
    try:
        version(_DATABASE_PACKAGE)
    except PackageNotFoundError:
        raise SettingsError("state-url needs psycopg: pip install 'gptserve[postgres]'") from None

"""Which version of gptserve this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the version that is installed; "unknown" in a source tree that is not."""
    try:
        return version("gptserve")
    except PackageNotFoundError:
        return "unknown"

"""`gptserve health` and `gptserve config`: what the settings of `gptserve serve` lead to, without a model.

`main.py` calls them. They import little: an image's health check runs every few seconds.
"""

from __future__ import annotations

import http.client
import ssl

from gptserve.server.cli.errors import CommandError
from gptserve.server.core.settings import ServerSettings, server_options

HEALTH_LIMIT_S = 4.0  # under the limit of the image's health check
_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def ask_health(settings: ServerSettings) -> str:
    """Return one line about the server that runs with these settings. Raises CommandError if it is not well.

    Proxies are passed by. The certificate is not checked: it may name another host than the one to listen on.
    """
    host = _ALL_ADDRESSES.get(settings.host, settings.host)
    is_tls = settings.ssl_certfile is not None
    url = f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{settings.port}/health"
    connection = http.client.HTTPConnection(host, settings.port, timeout=HEALTH_LIMIT_S)
    if is_tls:
        unchecked = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(host, settings.port, timeout=HEALTH_LIMIT_S, context=unchecked)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = response.read(2**16).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"{url} does not answer: {error}") from None
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise CommandError(f"{url} answers {response.status}: {body}")
    return f"{url} is healthy"


def show_settings(settings: ServerSettings) -> str:
    """Return a line for each option: its value, and where that is from. Keys are not shown."""
    rows = [option.show(settings).split("=", 1) for option in server_options()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"{name:{widths[0]}}  {value:{widths[1]}}  {settings.sources.get(name, 'default')}" for name, value in rows
    )

"""The head of a request: what HTTP asks of it, and its bytes again without the offer to speak another protocol.

Knows neither connections nor limits. `protocol.py` calls it with what httptools has parsed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gptserve.server.core.errors import ServiceError, show

# A name, an IPv4 address or an IPv6 address in brackets, and a port (RFC 3986, section 3.2.2).
_HOST = re.compile(rb"(\[[\w:.%~!$&'()*+,;=-]+\]|[\w.%~!$&'()*+,;=-]*)(:[0-9]*)?", re.ASCII)
Fields = Sequence[tuple[bytes, bytes]]


def check_head(method: bytes, target: bytes, version: str, fields: Fields) -> None:
    """Raise ServiceError for a request that can be parsed and yet not be answered; names of fields are lower-case."""
    if method == b"CONNECT":  # llhttp takes all that follows it for another protocol
        raise ServiceError("not_implemented", "this server is no proxy and does not take CONNECT")
    if version not in ("1.0", "1.1"):
        raise ServiceError("invalid_http", f"the protocol must be HTTP/1.0 or HTTP/1.1, got HTTP/{version}")
    if b"#" in target:  # RFC 9112, section 3.2
        raise ServiceError("invalid_http", f"the target of a request may have no fragment, got {_shown(target)}")
    hosts = [value.strip(b" \t") for name, value in fields if name == b"host"]
    if len(hosts) != 1 and (hosts or version == "1.1"):  # RFC 9112, section 3.2
        raise ServiceError("invalid_http", f"a request over HTTP/{version} must have one Host field, got {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        message = f"the Host field must be a name or an address, with or without a port, got {_shown(hosts[0])}"
        raise ServiceError("invalid_http", message)
    codings = [value.strip(b" \t") for name, value in fields if name == b"transfer-encoding"]
    if codings and [coding.lower() for coding in codings] != [b"chunked"]:  # RFC 9112, section 6.1
        got = _shown(b", ".join(codings))
        raise ServiceError(
            "not_implemented", f"the only Transfer-Encoding that this server takes is chunked, got {got}"
        )


def without_upgrade(method: bytes, target: bytes, version: str, fields: Fields) -> bytes:
    """Return a head that differs from the parsed one only in that it lacks the Upgrade fields.

    A server may ignore them (RFC 9110, section 7.8). Neither a name nor a value from the parser has a line end, so each
    field is one line again, and those that frame the body (Content-Length, Transfer-Encoding) mean what they meant.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % field for field in fields if field[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])


def _shown(value: bytes) -> str:
    return show(value.decode("latin-1"))

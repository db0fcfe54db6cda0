"""The head of a request as bytes again, without the offer to speak another protocol.

Knows neither connections nor limits. `protocol.py` calls it with what httptools has parsed.
"""

from __future__ import annotations

from collections.abc import Iterable


def without_upgrade(method: bytes, target: bytes, version: str, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a head that differs from the parsed one only in that it lacks the Upgrade fields.

    A server may ignore them (RFC 9110, section 7.8). Neither a name nor a value from the parser has a line end, so each
    field is one line again, and those that frame the body (Content-Length, Transfer-Encoding) mean what they meant.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % field for field in fields if field[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])

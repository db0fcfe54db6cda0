"""Loads the server's certificate and private key, or says why they are not usable."""

from __future__ import annotations

import ssl
from pathlib import Path


def load_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return a TLS context with these PEM files, None without them. Raises ValueError with file and reason."""
    if certificate is None or key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for name, path in (("ssl-certfile", certificate), ("ssl-keyfile", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"{name} {path} cannot be read: {error.strerror}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    except ssl.SSLError as error:
        raise ValueError(f"ssl-certfile {certificate} holds no certificate in PEM: {_reason(error)}") from error

    def refuse_password() -> str:
        raise ValueError(f"ssl-keyfile {key} is encrypted; give a key without a passphrase")

    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"ssl-keyfile {key} does not belong to the certificate in {certificate}") from error
        raise ValueError(f"ssl-keyfile {key} holds no private key in PEM: {_reason(error)}") from error
    return context


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()

"""The server's certificate and private key: loads them, says why they are not usable, and follows their renewal."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from gptserve.server.core.keys import file_version

logger = logging.getLogger(__name__)


class Tls:
    """The TLS context of new connections. Established connections keep the one that they began with."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load the files. Raises ValueError with file and reason if they are not usable."""
        self._certificate, self._key = certificate, key
        # Taken before reading, so that a later change is noticed.
        self._loaded = self._seen = self._version()
        self.context = load_tls(certificate, key)

    def follow_files(self) -> None:
        """Load the files again if they have changed and were the same at the last two calls.

        A renewal replaces the certificate and the key one after the other; between the two they do not fit. While they
        are not usable the context stays as it is, which is logged once. Reads files: call it in a thread.
        """
        last, self._seen = self._seen, self._version()
        if self._seen == self._loaded or self._seen != last:
            return
        self._loaded = self._seen
        try:
            self.context = load_tls(self._certificate, self._key)
        except (OSError, ValueError) as error:
            logger.error("%s; the certificate read before stays in use", error)
        else:
            logger.info("read the certificate again from %s, which has changed", self._certificate)

    def _version(self) -> tuple[object, object]:
        return file_version(self._certificate), file_version(self._key)


def load_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a TLS context with these PEM files. Raises ValueError with file and reason."""
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

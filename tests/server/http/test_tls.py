from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gptserve.server.http.tls import load_tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a certificate, its key, the same key encrypted, another key, and what is no PEM."""
    folder = tmp_path_factory.mktemp("tls")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    for command in (
        f"req -x509 {key} -nodes -days 2 -subj /CN=localhost -keyout key.pem -out certificate.pem",
        f"req -x509 {key} -nodes -days 2 -subj /CN=localhost -keyout other.pem -out other-certificate.pem",
        "ec -in key.pem -aes128 -passout pass:secret -out encrypted.pem",
        "x509 -in certificate.pem -outform DER -out certificate.der",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    (folder / "empty.pem").touch()
    return folder


def test_a_certificate_and_its_key_are_taken(folder: Path) -> None:
    assert load_tls(folder / "certificate.pem", folder / "key.pem") is not None
    assert load_tls(None, None) is None


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("missing.pem", "key.pem", "ssl-certfile {certificate} cannot be read: No such file or directory"),
        ("certificate.pem", "missing.pem", "ssl-keyfile {key} cannot be read: No such file or directory"),
        ("certificate.der", "key.pem", "ssl-certfile {certificate} holds no certificate in PEM: "),
        ("empty.pem", "key.pem", "ssl-certfile {certificate} holds no certificate in PEM: "),
        ("key.pem", "key.pem", "ssl-certfile {certificate} holds no certificate in PEM: "),
        ("certificate.pem", "certificate.der", "ssl-keyfile {key} holds no private key in PEM: "),
        ("certificate.pem", "certificate.pem", "ssl-keyfile {key} holds no private key in PEM: "),
        ("certificate.pem", "empty.pem", "ssl-keyfile {key} holds no private key in PEM: "),
        ("certificate.pem", "other.pem", "ssl-keyfile {key} does not belong to the certificate in {certificate}"),
        ("certificate.pem", "encrypted.pem", "ssl-keyfile {key} is encrypted; give a key without a passphrase"),
    ],
)
def test_what_cannot_be_used_is_named_with_the_reason(folder: Path, certificate: str, key: str, message: str) -> None:
    expected = message.format(certificate=folder / certificate, key=folder / key)
    with pytest.raises(ValueError, match="^" + re.escape(expected)) as caught:
        load_tls(folder / certificate, folder / key)
    assert "\n" not in str(caught.value)

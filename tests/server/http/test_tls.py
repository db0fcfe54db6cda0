from __future__ import annotations

import http.client
import logging
import re
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gptserve.server.http import server as http_server
from gptserve.server.http.tls import Tls, load_tls
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngineClient

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
    load_tls(folder / "certificate.pem", folder / "key.pem")


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


@pytest.fixture
def renewals(tmp_path: Path) -> Path:
    """Return a folder with a CA, and two certificates of it with their keys, called first and second."""
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    commands = [f"req -x509 {key} -days 2 -subj /CN=CA -keyout ca-key.pem -out ca.pem"]
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1")
    for serial, name in enumerate(("first", "second"), 1):
        commands.append(f"req {key} -subj /CN={name} -keyout {name}-key.pem -out {name}.csr")
        sign = f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca-key.pem -set_serial {serial} -days 2 -extfile names"
        commands.append(f"{sign} -out {name}.pem")
    for command in commands:
        subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def put(folder: Path, *, certificate: str, key: str) -> tuple[Path, Path]:
    """Replace the certificate and the key in use as programs that renew do."""
    in_use = folder / "certificate.pem", folder / "key.pem"
    for source, target in zip((certificate, key), in_use, strict=True):
        shutil.copy(folder / source, folder / "new")
        (folder / "new").rename(target)
    return in_use


def test_a_renewed_certificate_is_used_and_connections_go_on(
    serve: Callable[..., LiveServer], renewals: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "TICKS_PER_TLS_CHECK", 1)
    caplog.set_level(logging.INFO, "gptserve.server.http.tls")
    tls = Tls(*put(renewals, certificate="first.pem", key="first-key.pem"))
    server = serve(FakeEngineClient(), tls=tls)
    trusted = ssl.create_default_context(cafile=renewals / "ca.pem")

    def connect() -> tuple[http.client.HTTPSConnection, str]:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=trusted)
        connection.connect()
        certificate = connection.sock.getpeercert()
        assert certificate is not None
        return connection, str(certificate["serialNumber"])

    def ask(connection: http.client.HTTPSConnection) -> int:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        return response.status

    old, serial = connect()
    assert (serial, ask(old)) == ("01", 200)
    put(renewals, certificate="second.pem", key="second-key.pem")
    while serial == "01":
        new, serial = connect()
        status = ask(new)
        new.close()
    assert (serial, status, ask(old)) == ("02", 200, 200)
    old.close()
    said = [record.getMessage() for record in caplog.records if record.name == "gptserve.server.http.tls"]
    assert said == [f"read the certificate again from {renewals / 'certificate.pem'}, which has changed"]


def test_files_that_do_not_fit_together_keep_the_old_certificate(
    renewals: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = put(renewals, certificate="first.pem", key="first-key.pem")
    tls = Tls(certificate, key)
    first = tls.context
    put(renewals, certificate="second.pem", key="first-key.pem")
    tls.follow_files()
    assert not caplog.records, "the key may come in a moment"
    for _ in range(3):
        tls.follow_files()
    assert tls.context is first
    key.unlink()
    for _ in range(3):
        tls.follow_files()
    assert tls.context is first
    assert [record.getMessage() for record in caplog.records] == [
        f"ssl-keyfile {key} {why}; the certificate read before stays in use"
        for why in (f"does not belong to the certificate in {certificate}", "cannot be read: No such file or directory")
    ]
    put(renewals, certificate="second.pem", key="second-key.pem")
    tls.follow_files()
    assert tls.context is first
    tls.follow_files()
    assert tls.context is not first

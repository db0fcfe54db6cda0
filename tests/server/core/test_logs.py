"""Log lines: what stands on them in either format."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from gptserve.server.core.logs import JsonFormatter, RareWarning, TextFormatter, configure_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    names = ("", "gptserve")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = logging.getLogger().handlers
    yield
    logging.getLogger().handlers = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("gptserve.server.app").makeRecord(
        "gptserve.server.app", logging.INFO, "app.py", 1, message, (), None, extra=extra
    )
    made.created = 0.25
    return made


def test_a_text_line_names_the_request_first() -> None:
    line = TextFormatter().format(record("finished", request_id="cmpl-1", status=200))

    assert line.endswith("INFO    gptserve.server.app: cmpl-1: finished")


def test_a_text_line_without_extra_is_the_message() -> None:
    assert TextFormatter().format(record("hello")).endswith("INFO    gptserve.server.app: hello")


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("a\nFORGED\r", "a\\nFORGED\\r"),
        ("\x1b[31mred\x9b0m", "\\x1b[31mred\\x9b0m"),
        ("\u2028 \u202e \udcff", "\\u2028 \\u202e \\udcff"),
        ("é 日本 🙂 \\n", "é 日本 🙂 \\n"),
    ],
)
def test_a_text_line_cannot_be_forged_by_what_it_holds(sent: str, shown: str) -> None:
    line = TextFormatter().format(record(f"GET /{sent} status=404", request_id=sent))

    assert line.endswith(f"INFO    gptserve.server.app: {shown}: GET /{shown} status=404")


def test_a_text_line_is_followed_by_the_traceback_as_it_is() -> None:
    failed = record("failed\n")
    try:
        raise ValueError("why")
    except ValueError:
        failed.exc_info = sys.exc_info()

    first, *traceback = TextFormatter().format(failed).splitlines()

    assert first.endswith("failed\\n")
    assert (traceback[0], traceback[-1]) == ("Traceback (most recent call last):", "ValueError: why")


def test_a_json_line_holds_every_field() -> None:
    line = JsonFormatter().format(record("finished\nü", request_id="cmpl-1", status=200))

    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250+00:00",
        "level": "info",
        "logger": "gptserve.server.app",
        "message": "finished\nü",
        "request_id": "cmpl-1",
        "status": 200,
    }


def test_a_json_line_holds_the_traceback() -> None:
    failed = record("failed")
    try:
        raise ValueError("why")
    except ValueError:
        failed.exc_info = sys.exc_info()

    assert "ValueError: why" in json.loads(JsonFormatter().format(failed))["exception"]


def test_the_level_is_ours_and_others_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("text", "debug")

    logging.getLogger("gptserve.engine.scheduling.scheduler").debug("ours")
    logging.getLogger("httpx").info("theirs")
    logging.getLogger("httpx").warning("their warning")

    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["ours", "their warning"]


def test_configuring_twice_logs_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("text", "info")
    configure_logging("json", "info")

    logging.getLogger("gptserve").info("once")

    assert json.loads(capsys.readouterr().err)["message"] == "once"


def test_a_rare_warning_is_said_at_once_and_then_once_a_minute_with_a_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("gptserve.server.core.logs.time.monotonic", lambda: now)
    warning = RareWarning(logging.getLogger("gptserve.server.test"))
    for now in (1000.0, 1001.0, 1059.0, 1060.0, 1061.0, 1120.0, 1180.0):
        warning.log(f"at {now:g}")
    assert [record.getMessage() for record in caplog.records] == [
        "at 1000",
        "at 1060 (2 similar messages suppressed)",
        "at 1120 (1 similar message suppressed)",
        "at 1180",
    ]

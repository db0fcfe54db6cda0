"""The last lines of a start."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from gptserve.server.operations.banner import log_banner
from gptserve.weights.chat.template import ChatTemplate
from tests.server.app_options import model_and_options
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient

BODY = '{"prompt": "Once upon a time", "max_tokens": 300, "stream": true}'
CHAT = '{"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 300, "stream": true}'


def announce(url: str, engine: FakeEngineClient | None = None, **options: Any) -> None:
    model, of_app = model_and_options(engine or FakeEngineClient(), ByteTokenizer(), "teller", **options)
    log_banner(model, of_app.settings, url)


def test_the_banner_tells_the_model_its_kernels_its_memory_and_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        announce("http://127.0.0.1:8000", aliases=("gpt-4o",))

    assert [record.getMessage() for record in caplog.records] == [
        "model: teller = gpt-4o, float32 on cpu, context of 256 tokens",
        "kernels: attention reference, matrix products torch",
        "memory: 1.0 MiB reserved, and used as needed, for a KV cache of 1024 tokens; "
        "4 sequences of full length fit at once",
        "teller is ready on http://127.0.0.1:8000",
        "playground: http://127.0.0.1:8000/ in a browser",
        f"try: curl -N http://127.0.0.1:8000/v1/completions -d '{BODY}'",
    ]


def test_the_cache_of_a_gpu_is_used_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngineClient(info=replace(INFO, device="cuda:0"))
    with caplog.at_level(logging.INFO):
        announce("http://127.0.0.1:8000", engine)

    line = "memory: 1.0 MiB used for a KV cache of 1024 tokens; 4 sequences of full length fit at once"
    assert line in [record.getMessage() for record in caplog.records]


def test_states_are_told_beside_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngineClient(info=replace(INFO, num_states=9, states_bytes=27 * 2**19))
    with caplog.at_level(logging.INFO):
        announce("http://127.0.0.1:8000", engine)
    assert "memory: 13.5 MiB for 9 states of sequences" in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("options", "url", "command"),
    [
        ({}, "http://0.0.0.0:1", f"curl -N http://127.0.0.1:1/v1/completions -d '{BODY}'"),
        ({"task": "embed"}, "http://h:1", """curl http://h:1/v1/embeddings -d '{"input": "Once upon a time"}'"""),
        ({}, "https://[::]:1", f"curl -N https://[::1]:1/v1/completions -d '{BODY}'"),
        (
            {"chat_template": ChatTemplate("", {})},
            "http://h:1",
            f"curl -N http://h:1/v1/chat/completions -d '{CHAT}'",
        ),
        (
            {"api_keys": ("s3cret",)},
            "http://h:1",
            f"""curl -N http://h:1/v1/completions -H "Authorization: Bearer $GPTSERVE_API_KEY" -d '{BODY}'""",
        ),
    ],
)
def test_the_line_to_try_fits_the_server(
    options: dict[str, Any], url: str, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        announce(url, **options)

    assert caplog.records[-1].getMessage() == f"try: {command}"

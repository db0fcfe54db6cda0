from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gptserve.engine.request import FinishReason, Request, TokenLogprobs, TokenOutput
from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient, say


def log_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "gptserve.server.http.envelope"]


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models/unknown"])
def test_a_sane_request_id_comes_back(api: Api, path: str) -> None:
    response = api.get(path, headers={"x-request-id": "trace-1/a:b"})
    assert response.headers["x-request-id"] == "trace-1/a:b"


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"caf\xe9", b"a\tb"])
def test_any_other_request_id_is_replaced(api: Api, given: bytes) -> None:
    response = api.get("/health", headers=[(b"x-request-id", given)])
    assert response.headers["x-request-id"].encode("latin-1") != given
    assert len(response.headers["x-request-id"]) == 32


def test_every_request_gets_an_id_of_its_own(api: Api) -> None:
    assert len({api.get("/health").headers["x-request-id"] for _ in range(3)}) == 3


def test_a_bug_is_a_500_for_this_request_only(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_requests: object) -> None:
        raise RuntimeError("a secret of the house")

    with monkeypatch.context() as patch:
        patch.setattr(api.engine, "submit", fail)
        response = api.request("POST", "/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "broken"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "broken"
    assert response.json() == {
        "error": {
            "message": "the server failed to answer this request",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    record = next(record for record in caplog.records if record.exc_info)
    assert record.request_id == "broken"
    assert api.complete(prompt="x").status_code == 200


def test_a_finished_completion_is_one_log_line(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gptserve")
    api.request(
        "POST",
        "/v1/completions",
        json={"prompt": ["ab", "c"], "max_tokens": 4, "stop": "c", "user": "someone"},
        headers={"x-request-id": "r-1"},
    )
    (line,) = log_lines(caplog)
    fields = vars(line)
    assert (fields["request_id"], fields["method"], fields["path"]) == ("r-1", "POST", "/v1/completions")
    assert (fields["status"], fields["prompt_tokens"], fields["completion_tokens"]) == (200, 3, 6)
    assert fields["finish_reasons"] == {"stop": 2}
    assert fields["user"] == "someone"
    assert 0 < fields["ttft_s"] <= fields["total_s"]
    assert "status=200" in line.getMessage()


@pytest.mark.some(2)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
@pytest.mark.parametrize("shown", [False, True])
def test_prompts_are_logged_only_if_asked_for(
    make_api: Callable[..., Api], caplog: pytest.LogCaptureFixture, path: str, shown: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    api = make_api(FakeEngineClient(), log_prompts=shown)
    prompt = "my secret " + "x" * 5000
    messages = [{"role": "user", "content": prompt}]
    asked = {"completions": {"prompt": prompt}, "chat/completions": {"messages": messages}}.get(path, {"input": prompt})
    api.request("POST", f"/v1/{path}", json=asked)
    texts = [f"{record.getMessage()} {vars(record)}" for record in caplog.records]
    assert any("my secret" in text for text in texts) == shown
    assert all("x" * 4097 not in text for text in texts)


def test_the_waits_in_the_engine_are_logged(make_api: Callable[..., Api], caplog: pytest.LogCaptureFixture) -> None:
    def reply(request: Request) -> Iterator[TokenOutput]:
        yield TokenOutput(request.request_id, (97,), waits=(1.5, 2.5))
        yield TokenOutput(request.request_id, (98,), finish_reason=FinishReason.LENGTH)

    caplog.set_level(logging.INFO, logger="gptserve")
    make_api(FakeEngineClient(reply)).complete(prompt="a", max_tokens=2)
    (line,) = log_lines(caplog)
    assert (line.queue_s, line.prefill_s) == (1.5, 2.5)  # type: ignore[attr-defined]
    assert "queue_s=1.5 prefill_s=2.5 decode_s=" in line.getMessage()


def test_a_refused_request_is_logged_with_its_code(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gptserve")
    api.complete(prompt="x", temperature=-1)
    (line,) = log_lines(caplog)
    assert (vars(line)["status"], vars(line)["error"]) == (400, "invalid_value")


def test_probes_are_logged_for_debugging_only(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gptserve")
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        api.get(path)
    assert [line.levelname for line in log_lines(caplog)] == ["DEBUG", "DEBUG", "DEBUG", "INFO"]


def test_what_json_cannot_say_harms_only_its_own_request(api: Api) -> None:
    api.engine.reply = _not_a_number
    assert api.complete(prompt="x", logprobs=1).json()["error"]["code"] == "internal_error"
    stream = api.complete(prompt="x", logprobs=1, stream=True)
    assert '"code":"internal_error"' in stream.text
    assert "[DONE]" not in stream.text
    api.engine.reply = say("ok")
    assert api.complete(prompt="x").status_code == 200


def _not_a_number(request: Request) -> Iterator[TokenOutput]:
    for output in say("a")(request):
        yield replace(output, logprobs=(TokenLogprobs(97, float("nan"), 1),))

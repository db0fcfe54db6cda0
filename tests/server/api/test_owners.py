"""Background completions of several API keys: each owner has its own, and sees, stops and hinders nobody else's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.api.test_background import CHAT, split
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngineClient

Serve = Callable[..., LiveServer]
KEYS = {"a": "key-of-a", "b": "key-of-b"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    return path


def ask(server: LiveServer, key: str | None, method: str, path: str, **arguments: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    headers |= arguments.pop("headers", {})
    return httpx.request(method, server.url + path, headers=headers, timeout=20, **arguments)


def begin(server: LiveServer, key: str | None, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {"seed": 1, "background": True, **({} if "messages" in body else {"prompt": "x"}), **body}
    return ask(server, key, "POST", path, json=body, headers=headers or {})


def routes_of(completion_id: str) -> list[tuple[str, str]]:
    of_id = [("GET", ""), ("GET", "/events"), ("GET", "/events?starting_after=1"), ("POST", "/cancel")]
    paths = (f"/v1/completions/{completion_id}", f"/v1/chat/completions/{completion_id}")
    return [(method, path + rest) for path, (method, rest) in itertools.product(paths, of_id)]


def test_two_keys_that_try_everything_against_each_other_meet_nothing(serve: Serve, key_file: Path) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine, api_key_file=key_file)
    begun = {}
    for name, key in KEYS.items():
        for body in ({}, {"n": 3}, CHAT):
            response = begin(server, key, {"idempotency-key": "same key"} if not body else None, **body)
            assert response.status_code == 202
            begun[response.json()["id"]] = name
    assert len(begun) == 6, "the same Idempotency-Key begins one for each"
    for completion_id, name in begun.items():
        other = KEYS["b" if name == "a" else "a"]
        for method, path in routes_of(completion_id):
            refused = ask(server, other, method, path)
            unknown = ask(server, other, method, path.replace(completion_id, "cmpl-0"))
            assert refused.status_code == unknown.status_code == 404
            assert refused.text.replace(completion_id, "cmpl-0") == unknown.text
    for name, key in KEYS.items():
        listed = ask(server, key, "GET", "/v1/completions").json()["data"]
        assert [entry["id"] for entry in listed] == [i for i, owner in begun.items() if owner == name]
    assert len(engine.live_ids) == 2 * (1 + 3 + 1), "nothing was cancelled"

    blocked = begin(server, KEYS["b"], {"idempotency-key": "same key"}, n=2)
    assert blocked.status_code == 409
    mine = begin(server, KEYS["b"], {"idempotency-key": "only a has it not"}, n=2)
    assert mine.status_code == 202
    assert begin(server, KEYS["a"], {"idempotency-key": "only a has it not"}).status_code == 202, "b blocks nothing"


def test_an_owner_that_fills_the_limit_neither_blocks_another_nor_takes_its_results(
    serve: Serve, key_file: Path
) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine, api_key_file=key_file, max_results=4)
    kept = begin(server, KEYS["b"], max_tokens=1).json()["id"]
    engine.from_outside(engine.step)
    assert len(split(ask(server, KEYS["b"], "GET", f"/v1/completions/{kept}/events").text)) == 2
    statuses = [begin(server, KEYS["a"]).status_code for _ in range(4)]
    refused = begin(server, KEYS["a"])
    assert (statuses, refused.status_code) == ([202] * 4, 429)
    assert refused.json()["error"]["message"] == (
        "4 of your background or keyed completions are running, and the limit for all owners is 4"
    )
    assert begin(server, KEYS["b"]).status_code == 202
    assert ask(server, KEYS["b"], "GET", f"/v1/completions/{kept}").json()["status"] == "completed"
    refused = begin(server, KEYS["a"])
    assert "4 of your" in refused.json()["error"]["message"], "not those of others"


def test_a_key_that_is_replaced_under_its_name_loses_nothing(
    serve: Serve, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptserve.server.core.keys.CHECK_INTERVAL_S", 0.0)
    engine = FakeEngineClient()
    server = serve(engine, api_key_file=key_file)
    headers = {"idempotency-key": "k"}
    begun = begin(server, KEYS["a"], headers).json()
    key_file.write_text("a: the-new-one\nb: key-of-b\n")
    assert ask(server, "the-new-one", "GET", f"/v1/completions/{begun['id']}").status_code == 200
    assert begin(server, "the-new-one", headers).json()["id"] == begun["id"]
    assert begin(server, KEYS["b"], headers).json()["id"] != begun["id"]
    salts = [request.cache_salt for request in engine.submitted]
    begin(server, "the-new-one")
    assert engine.submitted[-1].cache_salt == salts[0] != salts[1]


def test_owners_share_no_cached_prefixes_whatever_salt_they_send(serve: Serve, key_file: Path) -> None:
    engine = FakeEngineClient()
    server = serve(engine, api_key_file=key_file)
    salts = [{}, {"cache_salt": "s"}, {"cache_salt": '["b", "s"]'}]
    for (_, key), salt, body in itertools.product(KEYS.items(), salts, ({}, CHAT)):
        assert begin(server, key, background=False, **salt, **body).status_code == 200
    of_text = {request.cache_salt for request in engine.submitted[::2]}
    assert len(of_text) == 2 * len(salts)
    assert of_text == {request.cache_salt for request in engine.submitted[1::2]}, "a chat has the same"


def test_without_keys_all_is_one_owners(serve: Serve) -> None:
    engine = FakeEngineClient()
    server = serve(engine)
    completion_id = begin(server, None, cache_salt="s").json()["id"]
    assert ask(server, "anything", "GET", f"/v1/completions/{completion_id}").status_code == 200
    assert engine.submitted[0].cache_salt == "s"


def test_an_owner_finds_its_own_again_after_a_restart(serve: Serve, key_file: Path, tmp_path: Path) -> None:
    first = LiveServer(FakeEngineClient(auto=False), state_dir=tmp_path / "state", api_key_file=key_file)
    headers = {"idempotency-key": "k"}
    with first.running():
        completion_id = begin(first, KEYS["a"], headers, max_tokens=3).json()["id"]
    second = serve(FakeEngineClient(), state_dir=tmp_path / "state", api_key_file=key_file)
    assert begin(second, KEYS["a"], headers, max_tokens=3).json()["id"] == completion_id
    events = ask(second, KEYS["a"], "GET", f"/v1/completions/{completion_id}/events")
    assert len(split(events.text)) == 4
    assert ask(second, KEYS["b"], "GET", f"/v1/completions/{completion_id}").status_code == 404
    assert begin(second, KEYS["b"], headers, max_tokens=3).json()["id"] != completion_id
    assert [request.cache_salt for request in second.engine.submitted] == ['["a", ""]', '["b", ""]']


def test_a_list_tells_ids_owners_lengths_and_ages_and_no_texts(serve: Serve, key_file: Path) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine, api_key_file=key_file, operators=("b",))
    of_a = begin(server, KEYS["a"], max_tokens=2, prompt="secret", n=2).json()
    of_b = begin(server, KEYS["b"], **CHAT).json()
    done = begin(server, KEYS["a"], max_tokens=1).json()
    engine.from_outside(engine.step)
    assert len(split(ask(server, KEYS["a"], "GET", f"/v1/completions/{done['id']}/events").text)) == 2
    own = ask(server, KEYS["a"], "GET", "/v1/completions").json()
    entries = {entry["id"]: entry for entry in own["data"]}
    assert (own["object"], list(entries)) == ("list", [of_a["id"], done["id"]])
    kept_bytes = entries[of_a["id"]].pop("bytes")
    assert 200 < kept_bytes < 2000
    assert entries[of_a["id"]] == {
        "id": of_a["id"],
        "object": "text_completion",
        "created": of_a["created"],
        "status": "in_progress",
        "key_name": "a",
        "prompt_tokens": 6,
        "completion_tokens": 2,
    }
    everybody = ask(server, KEYS["b"], "GET", "/v1/completions").json()["data"]
    assert [(entry["key_name"], entry["object"]) for entry in everybody] == [
        ("a", "text_completion"),
        ("b", "chat.completion"),
        ("a", "text_completion"),
    ]
    ended = ask(server, KEYS["b"], "GET", "/v1/completions?status=completed").json()["data"]
    assert [(entry["id"], entry["completion_tokens"]) for entry in ended] == [(done["id"], 1)]
    assert ask(server, KEYS["b"], "GET", f"/v1/completions/{of_a['id']}").status_code == 404, "a list is no text"
    assert of_b["id"] in {entry["id"] for entry in everybody}
    assert "secret" not in str(own)


def test_a_status_that_is_none_is_refused(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    refused = ask(server, None, "GET", "/v1/completions?status=done")
    assert (refused.status_code, refused.json()["error"]) == (
        400,
        {
            "message": "status must be one of queued, in_progress, completed, failed, cancelled, got 'done'",
            "type": "invalid_request_error",
            "param": "status",
            "code": "invalid_value",
        },
    )


def test_a_chat_is_found_under_its_own_path_too(serve: Serve) -> None:
    engine = FakeEngineClient()
    server = serve(engine)
    completion_id = begin(server, None, max_tokens=4, **CHAT).json()["id"]
    answers = [
        [
            ask(server, None, method, f"{path}/{completion_id}{rest}").text
            for method, rest in (
                ("GET", "/events"),
                ("GET", ""),
                ("POST", "/cancel"),
                ("GET", "/events?starting_after=2"),
            )
        ]
        for path in ("/v1/chat/completions", "/v1/completions")
    ]
    assert answers[0] == answers[1]
    assert len(split(answers[0][3])) == 3

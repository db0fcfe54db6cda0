"""What a response goes on from, over a FakeEngineClient: items by their ids, and conversations that are too long."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.server.responses import plan
from tests.server.api.test_owners import KEYS, ask
from tests.server.api.test_response_tools import TOOLS, serve_kind
from tests.server.api.test_responses import PATH, Serve, get, input_items, post, prompt_of, respond
from tests.server.conftest import Api, LiveServer
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient, say

MakeApi = Callable[..., Api]
END = "<|endoftext|>"


def reference(item_id: str) -> dict[str, str]:
    return {"type": "item_reference", "id": item_id}


def gone(where: str, item_id: str) -> dict[str, str]:
    rest = "does not exist: it was not stored, it was deleted or it has expired"
    error = {"type": "invalid_request_error", "param": where, "code": "completion_not_found"}
    return {"message": f"{where}: item {item_id!r} {rest}", **error}


def test_items_are_named_by_their_ids(serve: Serve, tmp_path: Path) -> None:
    with LiveServer(FakeEngineClient(say("Yé.", then_eos=True)), state_dir=tmp_path).running() as first:
        one = post(first, input="one").json()
        two = post(first, input="two", previous_response_id=one["id"]).json()
        given = [item["id"] for item in input_items(first, two["id"], order="asc").json()["data"]]
        [said] = two["output"]
        back = [*map(reference, given), {"id": said["id"]}, {"role": "user", "content": "three"}]
        three = post(first, input=back).json()
        spoken = "".join(f"[user]{word}{END}[assistant]Yé.{END}" for word in ("one", "two"))
        assert prompt_of(first) == f"{spoken}[user]three{END}>"
        httpx.delete(f"{first.url}{PATH}/{two['id']}")
        listed = input_items(first, three["id"], order="asc").json()
        assert [item["content"][0]["text"] for item in listed["data"]] == ["one", "Yé.", "two", "Yé.", "three"]

    later = serve(FakeEngineClient(say("No.", then_eos=True)), state_dir=tmp_path)
    assert input_items(later, three["id"], order="asc").json() == listed
    post(later, input=[reference(three["output"][0]["id"]), {"role": "user", "content": "four"}])
    assert prompt_of(later) == f"[assistant]Yé.{END}[user]four{END}>"
    refused = post(later, input=[reference(three["output"][0]["id"]), reference(said["id"])])
    assert (refused.status_code, refused.json()["error"]) == (404, gone("input[1]", said["id"]))


def test_calls_and_reasoning_are_named_by_their_ids(serve: Serve) -> None:
    server = serve_kind(serve, "thinking")
    answer = post(server, tools=TOOLS).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"} for item in answer["output"][2:]
    ]
    user = {"role": "user", "content": "hi"}
    post(server, input=[user, *answer["output"], *results], tools=TOOLS, store=False)
    whole = prompt_of(server)
    post(
        server, input=[user, *(reference(item["id"]) for item in answer["output"]), *results], tools=TOOLS, store=False
    )
    assert prompt_of(server) == whole


@pytest.mark.some(3)
@pytest.mark.parametrize("item_id", ["msg_1", "", "x", "msg_{}_9", "msg_{}_in_9", "rs_{}_0", "{}"])
def test_an_item_that_is_not_there_is_a_404(serve: Serve, item_id: str) -> None:
    server = serve(FakeEngineClient(say("Yé.", then_eos=True)))
    item_id = item_id.format(post(server).json()["id"].removeprefix("resp_"))
    refused = post(server, input=[{"role": "user", "content": "x"}, reference(item_id)])
    assert (refused.status_code, refused.json()["error"]) == (404, gone("input[1]", item_id))


def test_an_item_belongs_to_the_owner_of_its_response(serve: Serve, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    server = serve(FakeEngineClient(say("x", then_eos=True)), api_key_file=key_file)
    [item] = ask(server, KEYS["a"], "POST", PATH, json={"input": "secret"}).json()["output"]

    refused = ask(server, KEYS["b"], "POST", PATH, json={"input": [reference(item["id"])]})
    assert (refused.status_code, refused.json()["error"]) == (404, gone("input[0]", item["id"]))
    assert ask(server, KEYS["a"], "POST", PATH, json={"input": [reference(item["id"])]}).status_code == 200


def test_an_item_of_a_response_that_runs_is_refused(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    response_id = post(server, background=True).json()["id"]
    engine.wait_for(lambda: bool(engine.submitted))
    refused = post(server, input=[reference(f"msg_{response_id.removeprefix('resp_')}_0")])
    httpx.post(f"{server.url}{PATH}/{response_id}/cancel", timeout=20)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0]")
    message = f"input[0]: the response of the item must have ended; {response_id!r} is in_progress"
    assert refused.json()["error"]["message"].replace("is queued", "is in_progress") == message


def test_a_retry_finds_its_response_though_the_items_that_it_names_are_gone(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("Yé.", then_eos=True)))
    first = post(server).json()
    body = {"input": [reference(first["output"][0]["id"])]}
    key = {"idempotency-key": "k"}
    made = httpx.post(server.url + PATH, json=body, headers=key, timeout=20).json()
    httpx.delete(f"{server.url}{PATH}/{first['id']}")
    assert httpx.post(server.url + PATH, json=body, headers=key, timeout=20).json() == made
    assert post(server, **body).status_code == 404


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


LONG = "x" * 80
SAID = {"role": "assistant", "content": LONG}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, f"[system]S{END}[user]a{END}[assistant]{LONG}{END}[user]{LONG}{END}[user]c{END}>"),
        ({"max_output_tokens": 60}, f"[system]S{END}[user]{LONG}{END}[user]c{END}>"),
        ({"max_output_tokens": 200}, f"[system]S{END}[user]c{END}>"),
    ],
)
def test_the_oldest_items_of_a_conversation_that_is_too_long_are_dropped(
    api: Api, fields: dict[str, Any], expected: str
) -> None:
    asked = {"instructions": "S", "input": [user("a"), SAID, user(LONG), user("c")], **fields}
    answer = respond(api, truncation="auto", **{"max_output_tokens": 2, **asked})

    assert (answer.status_code, answer.json()["truncation"]) == (200, "auto")
    assert prompt_of(api) == expected
    refused = respond(api, truncation="disabled", **{"max_output_tokens": 2, **asked})
    assert (refused.status_code == 400) == bool(fields), "by default it is an error"


def test_what_stays_of_a_conversation_may_be_too_long_all_the_same(api: Api) -> None:
    asked = {"input": [user("a"), SAID, user("x" * 300)]}
    errors = [respond(api, truncation=truncation, **asked).json()["error"] for truncation in ("auto", "disabled")]
    assert errors[0] == errors[1]
    assert (errors[0]["code"], errors[0]["param"]) == ("context_length_exceeded", "input")
    wrong = respond(api, input="x", truncation="auto", temperature=9).json()["error"]
    assert wrong["param"] == "temperature"


class WatchingTokenizer(ByteTokenizer):
    """Looks at the server whenever it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], object] = lambda: None
        self.seen: list[object] = []

    def encode_with_special(self, text: str, *, template: bool = False) -> list[int]:
        self.seen.append(self.look())
        return super().encode_with_special(text, template=template)


@pytest.mark.parametrize("kept", [{}, {"store": False}, {"background": True}])
def test_a_conversation_that_must_be_cut_counts_as_one_request(serve: Serve, kept: dict[str, bool]) -> None:
    tokenizer = WatchingTokenizer()
    engine = FakeEngineClient(say("Yes.", then_eos=True))
    server = serve(engine, tokenizer=tokenizer, api_keys=("k",), max_requests_per_key=1)
    tokenizer.seen.clear()
    tokenizer.look = lambda: server.app.state.metrics.num_waiting
    body = {"input": [user("x" * 30)] * 40, "truncation": "auto", "max_output_tokens": 5, **kept}
    for _ in range(2):
        answer = ask(server, "k", "POST", PATH, json=body)
        assert (answer.status_code, answer.json().get("error")) == (200, None)
        server.wait_until_idle()
        assert len(tokenizer.seen) > 2, "it fits at once"
        assert set(tokenizer.seen) == {1}
    assert prompt_of(server) == f"[user]{'x' * 30}{END}" * 6 + ">"


def test_no_other_request_waits_while_a_large_conversation_becomes_a_chat(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return call(*arguments)

        return noted

    for name in ("_to_messages", "truncations"):
        monkeypatch.setattr(plan, name, noting(getattr(plan, name)))
    server = serve(FakeEngineClient(say("Yes.", then_eos=True)))
    asked = {"input": [user("x")] * 1000, "truncation": "auto", "max_output_tokens": 5}
    assert post(server, **asked).status_code == 200
    assert len(threads) > 3
    counted = httpx.post(f"{server.url}{PATH}/input_tokens", json={"input": asked["input"]}, timeout=20)
    assert counted.json()["error"]["code"] == "context_length_exceeded", "its chat was made"
    assert server._thread not in threads


def test_a_truncated_response_goes_on_from_all_that_was_said(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("Yé.", then_eos=True)))
    first = post(server, input=[user("a"), SAID, user("b")]).json()
    second = post(server, input=LONG + LONG, previous_response_id=first["id"], truncation="auto").json()
    assert prompt_of(server) == f"[user]b{END}[assistant]Yé.{END}[user]{LONG + LONG}{END}>"
    listed = input_items(server, second["id"]).json()["data"]
    assert [item["role"] for item in listed] == ["user", "assistant", "user", "assistant", "user"]
    assert get(server, second["id"]).json() == second


def test_calls_go_with_their_results(serve: Serve) -> None:
    server = serve_kind(serve, "hermes", "Yes.")
    long = "x" * 1500
    calls = [
        item
        for name in "abc"
        for item in (
            {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": name, "output": long},
        )
    ]
    answer = post(server, input=[user("a"), *calls], truncation="auto", max_output_tokens=9)
    assert answer.status_code == 200
    messages = json.JSONDecoder().raw_decode(prompt_of(server))[0]
    assert [(m["role"], m.get("tool_call_id")) for m in messages] == [
        *(("user", None), ("assistant", None), ("tool", "b"), ("assistant", None), ("tool", "c"))
    ]


VARIABLES = "{{ enable_thinking | default('-') }} {{ reasoning_effort | default('-') }}"


@pytest.mark.parametrize(
    ("effort", "kwargs", "shown"),
    [
        (None, None, "- -"),
        ("none", None, "False none"),
        ("low", None, "True low"),
        ("none", {"enable_thinking": True}, "True none"),
        (None, {"enable_thinking": False}, "False -"),
        ("high", {"enable_thinking": False, "reasoning_effort": "x"}, "False x"),
    ],
)
def test_the_effort_turns_thinking_on_and_off(
    make_api: MakeApi, effort: str | None, kwargs: dict[str, Any] | None, shown: str
) -> None:
    api = make_api(FakeEngineClient(), template=VARIABLES)
    respond(api, reasoning={"effort": effort}, chat_template_kwargs=kwargs, max_output_tokens=2)
    assert prompt_of(api) == shown
    api.chat("hi", reasoning_effort=effort, chat_template_kwargs=kwargs, max_tokens=2)
    assert prompt_of(api) == shown


def test_variables_of_the_server_are_refused(api: Api) -> None:
    error = respond(api, chat_template_kwargs={"tools": []}).json()["error"]
    assert error["message"] == "chat_template_kwargs must not hold tools, which the server gives"
    assert error["param"] == "chat_template_kwargs"

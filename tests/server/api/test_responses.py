"""The Responses API over a FakeEngineClient: answers, events from anywhere, conversations, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.server.schemas.response_fields import UNREAD
from gptserve.server.schemas.responses import Includable, InputItemList, ResponseObject, ResponsesRequest
from gptserve.server.tools.harmony import MARKS
from tests.server.api.test_owners import KEYS, ask
from tests.server.conftest import MODEL, Api, LiveServer
from tests.server.fake_engine import EOS, INFO, ByteTokenizer, FakeEngineClient, say
from tests.server.pydantic_says import NO_STRING
from tests.test_architecture import assert_rows

Serve = Callable[..., LiveServer]
PATH = "/v1/responses"
INCLUDABLE = get_args(Includable)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1], "default": None}}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
HARMONY = "<|channel|>analysis<|message|>Hm é<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|end|>"


def respond(api: Api, **body: Any) -> httpx.Response:
    return api.request("POST", PATH, json={"input": "hi", **body})


def post(server: LiveServer, **body: Any) -> httpx.Response:
    return httpx.post(server.url + PATH, json={"input": "hi", **body}, timeout=20)


def get(server: LiveServer, response_id: str, **query: Any) -> httpx.Response:
    return httpx.get(f"{server.url}{PATH}/{response_id}", params=query, timeout=20)


def read(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, whose types stand beside their data."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.splitlines() for block in response.text.split("\n\n") if block and not block.startswith(":")]
    events = [json.loads(lines[-1].removeprefix("data: ")) for lines in blocks]
    assert [lines[:-1] for lines in blocks] == [[f"event: {event['type']}"] for event in events]
    return events


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def prompt_of(api: Api, tokenizer: ByteTokenizer | None = None) -> str:
    """Return the prompt that reached the engine last."""
    token_ids = api.engine.submitted[-1].prompt_token_ids
    return b"".join(map((tokenizer or ByteTokenizer()).token_bytes, token_ids)).decode()


@pytest.fixture
def yes(serve: Serve) -> LiveServer:
    """A server whose answers are all `Yé.`."""
    return serve(FakeEngineClient(say("Yé.", then_eos=True)))


def test_an_answer_has_what_was_asked_and_what_came(yes: LiveServer) -> None:
    asked = {"metadata": {"a": "b"}, "temperature": 0.5, "seed": 7, "max_output_tokens": 9, "user": "me"}
    answer = post(yes, instructions="Be brief", text={"verbosity": "low"}, reasoning={"effort": "low"}, **asked).json()

    suffix = answer["id"].removeprefix("resp_")
    ResponseObject.model_validate(answer, strict=True, extra="forbid")
    assert answer | asked | {"instructions": "Be brief", "top_p": 1.0, "store": True, "background": False} == answer
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert (answer["model"], answer["system_fingerprint"]) == (MODEL, INFO.fingerprint)
    part = {"type": "output_text", "text": "Yé.", "annotations": [], "logprobs": []}
    item = {"id": f"msg_{suffix}_0", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert answer["output"] == [item]
    assert answer["usage"] == {
        "input_tokens": 27,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 32,
    }
    assert get(yes, answer["id"]).json() == answer


def test_one_that_was_not_stored_is_the_same_but_nowhere_to_be_found(yes: LiveServer) -> None:
    plain, stored = post(yes, store=False, seed=1).json(), post(yes, seed=1).json()

    assert text_of(plain) == text_of(stored) == "Yé."
    assert (plain["store"], plain["usage"]) == (False, stored["usage"])
    assert get(yes, plain["id"]).status_code == 404
    events = read(post(yes, store=False, stream=True))
    assert [event["type"] for event in events] == [event["type"] for event in read(post(yes, stream=True))]


@pytest.mark.parametrize("background", [True, False])
def test_events_come_in_the_order_of_openai(yes: LiveServer, background: bool) -> None:
    events = read(post(yes, stream=True, background=background))

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, begun, added, part, *deltas, text_done, part_done, item_done, last = events
    assert created["response"]["status"] == ("queued" if background else "in_progress")
    assert (begun["response"]["status"], begun["response"]["output"]) == ("in_progress", [])
    place = {"output_index": 0, "item_id": added["item"]["id"], "content_index": 0}
    assert all(place.items() <= event.items() for event in (part, *deltas, text_done, part_done))
    assert (added["item"]["status"], added["item"]["content"], part["part"]["text"]) == ("in_progress", [], "")
    assert [delta["delta"] for delta in deltas] == ["Y", "é", "."]
    assert (text_done["text"], part_done["part"]) == ("Yé.", item_done["item"]["content"][0])
    assert last["response"]["output"] == [item_done["item"]]
    assert get(yes, created["response"]["id"]).json() == last["response"]


def test_an_answer_that_is_cut_is_incomplete(yes: LiveServer) -> None:
    *_, item_done, last = read(post(yes, stream=True, max_output_tokens=2))

    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (item_done["item"]["status"], item_done["item"]["content"][0]["text"]) == ("incomplete", "Y\ufffd")
    assert get(yes, last["response"]["id"]).json() == last["response"]


def test_an_answer_without_text_is_an_empty_message(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("", then_eos=True)))
    events = read(post(server, stream=True))

    assert [event["type"].rpartition(".")[2] for event in events[2:]] == ["added"] * 2 + ["done"] * 3 + ["completed"]
    assert text_of(events[-1]["response"]) == ""
    assert text_of(post(server, store=False).json()) == ""


def test_logprobs_come_with_the_text(yes: LiveServer) -> None:
    *deltas, text_done, part_done, _, last = read(post(yes, stream=True, **LOGPROBS))[4:]
    scores = [score for delta in deltas for score in delta["logprobs"]]

    assert [score["bytes"] for score in scores] == [[token_id] for token_id in "Yé.".encode()] + [[*b"<|endoftext|>"]]
    assert scores[0] == {
        "token": "Y",
        "logprob": -89 / 8,
        "bytes": [89],
        "top_logprobs": [
            {"token": "\0", "logprob": 0, "bytes": [0]},
            {"token": "\1", "logprob": -0.125, "bytes": [1]},
        ],
    }
    assert text_done["logprobs"] == part_done["part"]["logprobs"] == scores
    assert last["response"]["output"][0]["content"][0]["logprobs"] == scores
    assert get(yes, last["response"]["id"]).json() == last["response"]


def test_reasoning_is_an_item_of_its_own(serve: Serve) -> None:
    tokenizer = ByteTokenizer(*MARKS)
    template = (
        "{% for m in messages %}{{ m.reasoning_content | default('') }}|{{ m.content }}|{% endfor %}<|start|>assistant"
    )
    reply = say(tokenizer.encode_with_special(HARMONY), then_eos=True)
    engine = FakeEngineClient(reply, info=replace(INFO, vocab_size=EOS + 1 + len(MARKS)))
    server = serve(engine, tokenizer=tokenizer, template=template)
    events = read(post(server, stream=True, **LOGPROBS))
    answer = events[-1]["response"]

    reasoning, message = answer["output"]
    assert (reasoning["type"], reasoning["status"], reasoning["summary"]) == ("reasoning", "completed", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm é"}]
    assert (message["type"], message["content"][0]["text"]) == ("message", "Yes.")
    assert [score["token"] for score in message["content"][0]["logprobs"]][:4] == [*"Yes."]
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}, "each that adds text"
    assert [event["type"].removeprefix("response.") for event in events[2:12]] == [
        "output_item.added",
        "content_part.added",
        *["reasoning_text.delta"] * 4,
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.done"] == [0, 1]
    assert get(server, answer["id"]).json() == answer

    post(server, input="And now?", previous_response_id=answer["id"])
    assert prompt_of(server, tokenizer).startswith("|hi|Hm é|Yes.||And now?|")
    stateless = [{"role": "user", "content": "hi"}, *answer["output"], {"role": "user", "content": "And now?"}]
    post(server, input=stateless)
    assert server.engine.submitted[-1].prompt_token_ids == server.engine.submitted[-2].prompt_token_ids


def test_a_conversation_goes_on_from_a_response_by_its_id(yes: LiveServer) -> None:
    first = post(yes, input="one", instructions="Be brief").json()
    assert prompt_of(yes) == "[system]Be brief<|endoftext|>[user]one<|endoftext|>>"
    parts = [{"type": "input_text", "text": text} for text in ("two", "and a half")]
    given = [{"type": "message", "role": "developer", "content": "Be kind"}, {"role": "user", "content": parts}]
    second = post(yes, input=given, previous_response_id=first["id"]).json()
    spoken = "[user]one<|endoftext|>[assistant]Yé.<|endoftext|>[system]Be kind<|endoftext|>"
    spoken += "[user]two\nand a half<|endoftext|>"
    assert prompt_of(yes) == f"{spoken}>", "without the instructions of the first"
    assert second["previous_response_id"] == first["id"]

    assert httpx.delete(f"{yes.url}{PATH}/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    post(yes, input="three", previous_response_id=second["id"], store=False)
    assert prompt_of(yes) == f"{spoken}[assistant]Yé.<|endoftext|>[user]three<|endoftext|>>", "each has all before it"
    gone = post(yes, previous_response_id=first["id"])
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "previous_response_id")


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json", '{"type":"object"}', unnamed_properties="refuse")),
        (
            {"type": "json_schema", "name": "s", "strict": True, "schema": SCHEMA},
            Grammar("json", json.dumps(SCHEMA, separators=(",", ":")), unnamed_properties="refuse"),
        ),
    ],
)
def test_the_format_of_the_text_reaches_the_engine(api: Api, wanted: dict[str, Any], grammar: Grammar | None) -> None:
    answer = respond(api, text={"format": wanted}, max_output_tokens=3)

    assert api.engine.submitted[0].params.grammar == grammar
    assert answer.json()["text"]["format"] == wanted


def test_parameters_reach_the_engine(api: Api) -> None:
    given = {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "ignore_eos": True}
    respond(api, max_output_tokens=3, seed=5, priority=0, cache_salt="s", stop=["c"], **given, **LOGPROBS)
    [request] = api.engine.submitted

    assert {name: getattr(request.params, name) for name in given} == given
    assert (request.seed, request.params.max_tokens, request.params.logprobs, request.cache_salt) == (5, 3, 2, "s")


REFUSED: list[tuple[dict[str, Any], str | None, str, str]] = [
    ({"input": None}, "input", "missing_required_parameter", "input is required"),
    ({"input": 3}, "input", "invalid_type", "input: input should be a string or a list of items, got 3"),
    (
        {"input": []},
        "input",
        "invalid_value",
        "input: list should have at least 1 item, not 0, got []",
    ),
    ({"input": [3]}, "input", "invalid_type", "input[0]: input should be an object, got 3"),
    ({"input": [{"content": "x"}]}, "input[0].role", "missing_required_parameter", "input[0].role is required"),
    (
        {"input": [{"role": "user", "content": 7}]},
        "input",
        "invalid_type",
        "input[0].content: input should be a string or a list of parts, got 7",
    ),
    (
        {"input": [{"role": "tool", "content": "x"}]},
        "input",
        "invalid_value",
        "input[0].role: input should be 'user', 'assistant', 'system' or 'developer', got 'tool'",
    ),
    (
        {"input": [{"role": "user", "content": "x"}, {"type": "compaction", "id": "msg_1"}]},
        "input[1]",
        "unsupported_parameter",
        "input[1]: an item of the type 'compaction' is not supported by this server",
    ),
    (
        {"input": [{"type": "item_reference"}]},
        "input[0].id",
        "missing_required_parameter",
        "input[0].id is required",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
        "unsupported_parameter",
        "input[0].content[0]: a part of the type 'input_image' is not supported by this server",
    ),
    (
        {"conversation": "conv_1"},
        "conversation",
        "unsupported_parameter",
        "a conversation object (previous_response_id is another way) is not supported by this server; "
        "leave out conversation",
    ),
    (
        {"prompt": {"id": "pmpt_1"}},
        "prompt",
        "unsupported_parameter",
        "a prompt template is not supported by this server; leave out prompt",
    ),
    (
        {"truncation": "oldest"},
        "truncation",
        "invalid_value",
        "truncation: input should be 'auto' or 'disabled', got 'oldest'",
    ),
    (
        {"reasoning": {"summary": "long"}},
        "reasoning.summary",
        "unsupported_parameter",
        "this summary of the reasoning is not supported by this server; leave out reasoning.summary",
    ),
    (
        {"reasoning": {"mode": "pro"}},
        "reasoning.mode",
        "unsupported_parameter",
        "another mode of reasoning is not supported by this server; leave out reasoning.mode",
    ),
    (
        {"reasoning": {"context": "all_turns"}},
        "reasoning.context",
        "unsupported_parameter",
        "a choice of the reasoning that the model sees again is not supported by this server; "
        "leave out reasoning.context",
    ),
    (
        {"prompt_cache_options": {"mode": "implicit", "prewarm": True}},
        "prompt_cache_options.prewarm",
        "unsupported_parameter",
        "filling the prompt cache without an answer is not supported by this server; "
        "leave out prompt_cache_options.prewarm",
    ),
    (
        {"context_management": [{"type": "compaction", "compact_threshold": 9}]},
        "context_management",
        "unsupported_parameter",
        "compaction of the conversation is not supported by this server; leave out context_management",
    ),
    (
        {"personality": "friendly"},
        "personality",
        "unsupported_parameter",
        "a personality is not supported by this server; leave out personality",
    ),
    (
        {"include": ["file_search_call.result"]},
        "include",
        "invalid_value",
        "include[0]: input should be "
        + " or ".join((", ".join(map(repr, INCLUDABLE[:-1])), repr(INCLUDABLE[-1])))
        + ", got 'file_search_call.result'",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "refusal"}]}]},
        "input[0].content[0].refusal",
        "missing_required_parameter",
        "input[0].content[0].refusal is required",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "refusal", "refusal": 3}]}]},
        "input",
        "invalid_type",
        f"input[0].content[0].text: {NO_STRING}, got 3",
    ),
    (
        {"text": {"format": {"type": "json_schema"}}},
        "text.format.schema",
        "invalid_value",
        "text.format.schema must be given with the type json_schema",
    ),
    (
        {"text": {"format": {"type": "text", "schema": {}}}},
        "text.format.schema",
        "invalid_value",
        "text.format.schema may be given only with the type json_schema",
    ),
    (
        {"text": {"format": {"type": "json_schema", "schema": [None]}}},
        "text",
        "invalid_type",
        "text.format.schema: input should be an object, got [null]",
    ),
    (
        {"top_logprobs": 3},
        "top_logprobs",
        "invalid_value",
        "top_logprobs may be given only with include message.output_text.logprobs",
    ),
    (
        {"store": False, "background": True},
        "store",
        "invalid_value",
        "store must not be false with background or an Idempotency-Key",
    ),
    ({"max_tokens": 3}, "max_tokens", "unknown_parameter", "max_tokens is not a field of this route"),
    ({"instruction": "x"}, "instruction", "unknown_parameter", "unknown field instruction; did you mean instructions?"),
    ({"temperature": 9}, "temperature", "invalid_value", "temperature must be in [0.0, 2.0], got 9.0"),
    (
        {"max_output_tokens": 300},
        "max_output_tokens",
        "context_length_exceeded",
        "max_output_tokens or the prompt is too long. This model's maximum context length is 256 tokens; the prompt "
        "has 10 and max_output_tokens is 300, together 310",
    ),
    (
        {"input": "x" * 300},
        "input",
        "context_length_exceeded",
        "The prompt is too long. This model's maximum context length is 256 tokens, with a new one; the prompt has 308",
    ),
    ({"metadata": {"a": 1}}, "metadata", "invalid_type", f"metadata.a: {NO_STRING}, got 1"),
    (
        {"metadata": {str(i): "x" for i in range(17)}},
        "metadata",
        "invalid_value",
        "metadata: object should have at most 16 items, not more, got {'0': 'x', '1': 'x', '10': 'x', '11': 'x', ...}",
    ),
]


@pytest.mark.parametrize(("body", "param", "code", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_what_is_not_supported_is_refused_in_words(
    refusing_api: Api, body: dict[str, Any], param: str, code: str, message: str
) -> None:
    refused = respond(refusing_api, **body)

    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }
    assert refusing_api.engine.submitted == []


def test_a_template_may_refuse_the_input(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), template="{{ raise_exception('roles must alternate') }}")
    error = respond(api).json()["error"]

    assert (error["code"], error["param"]) == ("invalid_chat_template_input", "input")


def test_what_asks_for_nothing_is_taken(api: Api) -> None:
    neutral = {
        name: rule.neutral[0] if rule.neutral else "x" for name, rule in UNREAD.items() if rule.neutral or not rule.lack
    }
    given = [{"type": "message", "id": "msg_1", "status": "completed", "role": "user", "content": "hi"}]
    answer = respond(api, input=given, reasoning={"summary": "detailed"}, include=[*INCLUDABLE], **neutral)

    assert answer.status_code == 200
    assert "x-gptserve-ignored" not in answer.headers


def test_every_field_has_a_row() -> None:
    assert_rows("docs/stored-completions.md", "## Response fields", set(ResponsesRequest.model_fields))
    assert_rows("docs/stored-completions.md", "## Response fields that ask for nothing", set(UNREAD))


def test_every_reader_gets_the_events_after_the_one_it_names(serve: Serve) -> None:
    engine = FakeEngineClient(say("Yé.", then_eos=True), auto=False)
    server = serve(engine)
    response_id = post(server, background=True).json()["id"]
    engine.wait_for(lambda: bool(engine.submitted))
    with httpx.stream("GET", f"{server.url}{PATH}/{response_id}?stream=true&starting_after=1", timeout=20) as early:
        engine.from_outside(lambda: [engine.step() for _ in range(9)] and None)
        early.read()
    whole = read(get(server, response_id, stream="true"))

    assert read(early) == whole[2:]
    for last in range(len(whole)):
        assert read(get(server, response_id, stream="true", starting_after=last)) == whole[last + 1 :]
    beyond = get(server, response_id, stream="true", starting_after=len(whole))
    assert (beyond.status_code, beyond.json()["error"]["message"]) == (
        400,
        "starting_after may be at most 10, as the response has no more events, got 11",
    )


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"stream": "yes"}, "stream must be true or false, got 'yes'"),
        ({"starting_after": "1"}, "starting_after may be given only with stream true"),
        (
            {"stream": "true", "starting_after": "-1"},
            "starting_after must be the sequence_number of an event, such as 17, got '-1'",
        ),
    ],
)
def test_a_reader_that_asks_for_no_event_is_refused(yes: LiveServer, query: dict[str, str], message: str) -> None:
    refused = get(yes, post(yes).json()["id"], **query)

    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)


def test_a_reader_ahead_of_a_response_waits_only_where_the_same_tokens_come(serve: Serve) -> None:
    for batch_invariant, expected in ((True, 200), (False, 400)):
        engine = FakeEngineClient(auto=False, info=replace(INFO, batch_invariant=batch_invariant))
        server = serve(engine)
        response_id = post(server, background=True, max_output_tokens=3).json()["id"]
        engine.wait_for(lambda engine=engine: bool(engine.submitted))
        url = f"{server.url}{PATH}/{response_id}?stream=true&starting_after=5"
        with httpx.stream("GET", url, timeout=20) as ahead:
            assert ahead.status_code == expected
            engine.from_outside(lambda engine=engine: [engine.step() for _ in range(3)] and None)
            ahead.read()
        if batch_invariant:
            assert [event["sequence_number"] for event in read(ahead)] == [6, 7, 8, 9, 10]
        else:
            assert ahead.json()["error"]["message"].startswith("starting_after may be at most 1, as the response")


def failing(request: Request) -> Iterator[TokenOutput]:
    yield TokenOutput(request.request_id, (97,))
    yield TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="out of luck")


@pytest.mark.parametrize("store", [True, False])
def test_a_response_that_fails_ends_with_an_event_that_says_so(serve: Serve, store: bool) -> None:
    server = serve(FakeEngineClient(failing))
    events = read(post(server, stream=True, store=store))
    failed = events[-1]["response"]

    assert (events[-1]["type"], events[-1]["sequence_number"]) == ("response.failed", len(events) - 1)
    assert (failed["status"], text_of(failed), failed["output"][0]["status"]) == ("failed", "a", "incomplete")
    assert failed["error"] == {"code": "server_error", "message": "choice 0: out of luck"}
    if store:
        assert get(server, failed["id"]).json() == failed
        assert read(get(server, failed["id"], stream="true")) == events
        refused = post(server, previous_response_id=failed["id"]).json()["error"]["message"]
        assert refused == f"previous_response_id must be of a response that has ended well; '{failed['id']}' is failed"
    assert post(server, store=store).status_code == 500


def test_a_response_is_cancelled(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    queued = post(server, background=True).json()
    assert (queued["status"], queued["output"], queued["usage"], queued["background"]) == ("queued", [], None, True)
    engine.wait_for(lambda: bool(engine.submitted))
    with httpx.stream("GET", f"{server.url}{PATH}/{queued['id']}?stream=true", timeout=20) as reader:
        lines = reader.iter_lines()
        engine.from_outside(engine.step)
        assert any("output_text.delta" in line for line in lines)
        running = get(server, queued["id"]).json()
        assert (running["status"], running["output"][0]["status"]) == ("in_progress", "in_progress")
        cancelled = httpx.post(f"{server.url}{PATH}/{queued['id']}/cancel", timeout=20).json()
        *_, end = (line for line in lines if line)
    assert (cancelled["status"], text_of(cancelled), cancelled["usage"]["output_tokens"]) == ("cancelled", "a", 1)
    assert cancelled["output"][0]["status"] == "incomplete"
    assert json.loads(end.removeprefix("data: "))["error"]["code"] == "cancelled", "which is not part of the response"
    assert engine.live_ids == []
    assert httpx.post(f"{server.url}{PATH}/{queued['id']}/cancel", timeout=20).json() == cancelled


def test_one_that_is_deleted_while_it_runs_is_gone(serve: Serve, tmp_path: Path) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine, state_dir=tmp_path)
    response_id = post(server, background=True).json()["id"]
    engine.wait_for(lambda: bool(engine.submitted))

    assert httpx.delete(f"{server.url}{PATH}/{response_id}", timeout=20).status_code == 200
    assert (engine.live_ids, get(server, response_id).status_code) == ([], 404)
    assert httpx.delete(f"{server.url}{PATH}/{response_id}", timeout=20).status_code == 404
    assert httpx.get(f"{server.url}/v1/completions", timeout=20).json()["data"] == []


@pytest.mark.parametrize(("background", "headers"), [(False, {}), (True, {}), (False, {"idempotency-key": "k"})])
def test_only_one_that_is_to_go_on_outlives_its_client(serve: Serve, background: bool, headers: dict[str, str]) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    body = {"input": "hi", "stream": True, "background": background}
    with httpx.stream("POST", server.url + PATH, json=body, headers=headers, timeout=20) as response:
        created = next(line for line in response.iter_lines() if line.startswith("data: "))
        response_id = json.loads(created.removeprefix("data: "))["response"]["id"]
        engine.wait_for(lambda: bool(engine.submitted))
    if background or headers:
        assert get(server, response_id).json()["status"] == "queued"
        engine.from_outside(engine.step)
        httpx.post(f"{server.url}{PATH}/{response_id}/cancel", timeout=20)
    else:
        engine.wait_for(lambda: bool(engine.aborted))
        server.wait_until_idle()
        assert get(server, response_id).json()["status"] == "cancelled"


def test_a_retry_with_a_key_gets_the_same_response(yes: LiveServer) -> None:
    key = {"idempotency-key": "order-66"}
    first, again = (httpx.post(yes.url + PATH, json={"input": "hi"}, headers=key).json() for _ in range(2))
    other = httpx.post(yes.url + PATH, json={"input": "ho"}, headers=key)

    assert first == again
    assert (len(yes.engine.submitted), other.json()["error"]["code"]) == (1, "idempotency_key_reused")
    refused = httpx.post(yes.url + PATH, json={"input": "hi", "store": False}, headers=key)
    assert refused.json()["error"]["param"] == "store"


@pytest.mark.some(2)
@pytest.mark.parametrize("body", [{}, {"background": True}, {"stream": True}])
def test_a_retry_finds_its_response_when_the_one_before_it_is_gone(yes: LiveServer, body: dict[str, Any]) -> None:
    first = post(yes).json()["id"]
    body, key = {"input": "and then?", "previous_response_id": first, **body}, {"idempotency-key": "again"}
    begun = httpx.post(yes.url + PATH, json=body, headers=key, timeout=20)
    yes.wait_until_idle()
    assert httpx.delete(f"{yes.url}{PATH}/{first}", timeout=20).status_code == 200

    again, other = httpx.post(yes.url + PATH, json=body, headers=key, timeout=20), httpx.post(yes.url + PATH, json=body)
    assert (begun.status_code, again.status_code, other.status_code) == (200, 200, 404)
    response_id = json.loads(begun.text.split("data: ")[1].split("\n")[0])["response"]["id"] if "stream" in body else ""
    assert (response_id or begun.json()["id"]) in again.text
    assert len(yes.engine.submitted) == 2


@pytest.mark.parametrize("body", [{}, {"max_output_tokens": 2}])
def test_one_that_has_ended_with_its_client_cannot_be_cancelled(yes: LiveServer, body: dict[str, Any]) -> None:
    answer = post(yes, **body).json()
    refused = httpx.post(f"{yes.url}{PATH}/{answer['id']}/cancel", timeout=20)
    message = f"cannot cancel a synchronous response: '{answer['id']}' has ended, and background was not true"
    told = {"message": message, "type": "invalid_request_error", "param": "id", "code": "invalid_value"}
    assert (refused.status_code, refused.json()) == (400, {"error": told})
    assert get(yes, answer["id"]).json() == answer


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("store", ["true", "false"])
def test_what_json_cannot_repeat_is_refused_before_it_is_computed(yes: LiveServer, number: str, store: str) -> None:
    parameters = f'{{"type": "object", "x": {number}}}'
    tools = f'"tools": [{{"type": "function", "name": "f", "parameters": {parameters}}}], "tool_choice": "none"'
    content = f'{{"input": "hi", "store": {store}, {tools}}}'
    refused = httpx.post(yes.url + PATH, content=content, headers={"content-type": "application/json"}, timeout=20)
    code = "invalid_value" if number == "1e999" else "invalid_json"
    assert (refused.status_code, refused.json()["error"]["code"], yes.engine.submitted) == (400, code, [])


def test_the_routes_of_completions_and_of_responses_do_not_find_each_others(yes: LiveServer) -> None:
    response_id = post(yes).json()["id"]
    body = {"prompt": "x", "background": True, "max_tokens": 2}
    completion_id = httpx.post(f"{yes.url}/v1/completions", json=body, timeout=20).json()["id"]

    for path in (f"/v1/completions/{response_id}", f"/v1/chat/completions/{response_id}/events"):
        assert httpx.get(yes.url + path).json()["error"]["code"] == "completion_not_found"
    assert get(yes, completion_id).json()["error"] == {
        "message": f"response '{completion_id}' does not exist: it was not stored, it was deleted or it has expired",
        "type": "invalid_request_error",
        "param": "id",
        "code": "completion_not_found",
    }
    assert post(yes, previous_response_id=completion_id).status_code == 404
    assert [entry["object"] for entry in httpx.get(f"{yes.url}/v1/completions").json()["data"]] == [
        "response",
        "text_completion",
    ]


def test_a_response_belongs_to_the_owner_of_its_key(serve: Serve, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    server = serve(FakeEngineClient(say("x", then_eos=True)), api_key_file=key_file)
    response_id = ask(server, KEYS["a"], "POST", PATH, json={"input": "secret"}).json()["id"]
    path = f"{PATH}/{response_id}"
    reads = [("GET", path + query) for query in ("", "?stream=true", "/input_items")]
    of_id = [*reads, ("POST", f"{path}/cancel"), ("DELETE", path)]

    for method, of in of_id:
        refused, unknown = (ask(server, KEYS["b"], method, asked) for asked in (of, of.replace(response_id, "resp_0")))
        assert refused.status_code == unknown.status_code == 404
        assert refused.text.replace(response_id, "resp_0") == unknown.text
        assert ask(server, None, method, of).status_code == 401
    body = {"input": "and?", "previous_response_id": response_id}
    assert ask(server, KEYS["b"], "POST", PATH, json=body).status_code == 404
    assert ask(server, KEYS["a"], "POST", PATH, json=body).status_code == 200
    assert ask(server, KEYS["a"], "DELETE", path).status_code == 200


def test_all_of_a_conversation_survives_a_restart(serve: Serve, tmp_path: Path) -> None:
    asked = {
        "instructions": "Be brief",
        "metadata": {"a": "b"},
        "text": {"format": {"type": "json_object"}},
        **LOGPROBS,
    }
    with LiveServer(FakeEngineClient(say("Yé.", then_eos=True)), state_dir=tmp_path).running() as server:
        first = post(server, input="one", **asked).json()
        second = read(post(server, input="two", previous_response_id=first["id"], stream=True))
    later = serve(FakeEngineClient(say("No.", then_eos=True)), state_dir=tmp_path)
    last = second[-1]["response"]

    assert get(later, first["id"]).json() == first
    assert read(get(later, last["id"], stream="true", starting_after=3)) == second[4:]
    post(later, input="three", previous_response_id=last["id"])
    said = "[assistant]Yé.<|endoftext|>"
    expected = f"[user]one<|endoftext|>{said}[user]two<|endoftext|>{said}[user]three<|endoftext|>>"
    assert prompt_of(later) == expected


def input_items(server: LiveServer, response_id: str, **query: Any) -> httpx.Response:
    return httpx.get(f"{server.url}{PATH}/{response_id}/input_items", params=query, timeout=20)


def test_the_items_that_a_response_was_made_of_are_listed(serve: Serve, tmp_path: Path) -> None:
    part = {"type": "input_text", "text": "Rain"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [part]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    given = [thought, call, result, {**result, "output": "Sun"}, {"role": "developer", "content": "two"}]
    with LiveServer(FakeEngineClient(say("Yé.", then_eos=True)), state_dir=tmp_path).running() as server:
        first = post(server, input="one", instructions="not listed").json()
        second = post(server, input=given, previous_response_id=first["id"]).json()
        whole = input_items(server, second["id"], order="asc").json()
    later = serve(FakeEngineClient(), state_dir=tmp_path)

    assert whole == input_items(later, second["id"], order="asc").json()
    InputItemList.model_validate(whole, strict=True, extra="forbid")
    suffix = second["id"].removeprefix("resp_")
    own = [{name: item[name] for name in item if name not in ("id", "status")} for item in whole["data"]]
    said = {"type": "output_text", "text": "Yé.", "annotations": [], "logprobs": []}
    assert own == [
        {"type": "message", "role": "user", "content": [{**part, "text": "one"}]},
        {"type": "message", "role": "assistant", "content": [said]},
        *given[:-1],
        {"type": "message", "role": "developer", "content": [{**part, "text": "two"}]},
    ]
    ids = [f"{prefix}_{suffix}_in_{i}" for i, prefix in enumerate(["msg", "msg", "rs", "fc", "fco", "fco", "msg"])]
    assert [item["id"] for item in whole["data"]] == ids
    assert (whole["object"], whole["first_id"], whole["last_id"], whole["has_more"]) == ("list", ids[0], ids[-1], False)

    pages, after = [], {}
    while not pages or pages[-1]["has_more"]:
        pages.append(input_items(later, second["id"], limit=3, **after).json())
        after = {"after": pages[-1]["last_id"]}
    assert [item["id"] for page in pages for item in page["data"]] == ids[::-1]
    assert [page["first_id"] for page in pages] == [ids[6], ids[3], ids[0]]
    empty = input_items(later, second["id"], after=ids[0]).json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert httpx.delete(f"{later.url}{PATH}/{second['id']}").status_code == 200
    assert input_items(later, second["id"]).json()["error"]["code"] == "completion_not_found"


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("query", "code", "message"),
    [
        ({"limit": 0}, "invalid_value", "limit must be a whole number from 1 to 100, got '0'"),
        ({"limit": 101}, "invalid_value", "limit must be a whole number from 1 to 100, got '101'"),
        ({"limit": "1e1"}, "invalid_value", "limit must be a whole number from 1 to 100, got '1e1'"),
        ({"order": "up"}, "invalid_value", "order must be asc or desc, got 'up'"),
        ({"after": "x"}, "invalid_value", "after must be the id of an entry of the list, got 'x'"),
        (
            {"include": "message.output_text.logprobs"},
            "invalid_value",
            "include may have message.output_text.logprobs only where the request for the response had it, too",
        ),
        (
            {"include[]": "file_search_call.result"},
            "invalid_value",
            f"include may have {', '.join(INCLUDABLE)}, got 'file_search_call.result'",
        ),
    ],
)
def test_what_is_wrong_with_a_list_of_items_is_refused_in_words(
    yes: LiveServer, query: dict[str, Any], code: str, message: str
) -> None:
    refused = input_items(yes, post(yes).json()["id"], **query)
    param = next(iter(query)).removesuffix("[]")
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert (refused.status_code, refused.json()) == (400, {"error": error})


def test_what_is_included_is_what_the_response_was_asked_for_with(yes: LiveServer) -> None:
    scored, plain = post(yes, **LOGPROBS).json(), post(yes).json()
    wanted = {"include[]": [LOGPROBS["include"][0], "reasoning.encrypted_content"]}

    assert get(yes, scored["id"], **wanted).json() == scored
    assert read(get(yes, scored["id"], stream="true", **wanted))[-1]["response"] == scored
    for fields in ({}, {"stream": "true"}):
        assert get(yes, plain["id"], **wanted, **fields).json()["error"]["param"] == "include"
        assert get(yes, plain["id"], include="reasoning.encrypted_content", **fields).status_code == 200


def test_a_response_of_another_tokenizer_has_failed_and_says_so_to_every_reader(serve: Serve, tmp_path: Path) -> None:
    with LiveServer(FakeEngineClient(say("Yé.", then_eos=True)), state_dir=tmp_path).running() as server:
        response_id = post(server).json()["id"]
    tokenizer = ByteTokenizer()
    tokenizer.fingerprint = "other bytes"
    later = serve(FakeEngineClient(), tokenizer=tokenizer, state_dir=tmp_path)
    *_, failed = read(get(later, response_id, stream="true", starting_after=6))

    assert (failed["type"], failed["response"]["output"]) == ("response.failed", [])
    assert failed["response"] == get(later, response_id).json()

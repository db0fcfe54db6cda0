"""Items and events of a response: whatever comes, the events tell of the items, one after another."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gptserve.server.responses.output import ResponseOutput
from gptserve.server.responses.tools import ResponseTools
from gptserve.server.text.output import Delta, TokenScore

SCORE = TokenScore(b"x", 0, -1.0, ((b"y", -0.5),))
DELTAS = st.lists(
    st.one_of(
        st.builds(Delta, st.sampled_from(["", "a", "bc"]), logprobs=st.sampled_from([None, [], [SCORE]])),
        st.builds(Delta, st.sampled_from(["", "d"]), reasoning=st.sampled_from(["e", "fg"]), token_ids=st.just((1,))),
    )
)


def as_json(value: Any) -> Any:
    """Return what a client reads; lists of logprobs are iterators before."""
    return json.loads(json.dumps(value, default=list))


@given(DELTAS, st.booleans(), st.sampled_from(["completed", "incomplete"]))
def test_the_events_tell_of_every_item_and_leave_none_open(deltas: list[Delta], marks: bool, status: Any) -> None:
    output = ResponseOutput("resp_1", ResponseTools(None), marks_reasoning=marks)
    events = []
    for delta in (*deltas, Delta("", finish_reason="stop")):
        events += [as_json(event) for event in output.add(delta)]
    so_far = as_json(output.items(status))
    events += [as_json(event) for event in output.end(status)]
    items = as_json(output.items("in_progress"))

    assert items == so_far, "none is open"
    assert [item["status"] for item in items[:-1]] == ["completed"] * (len(items) - 1)
    assert (items[-1]["status"], len({item["id"] for item in items})) == (status, len(items))
    told: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(told) - (kind != "output_item.added")
        if kind == "output_item.added":
            told.append(event["item"])
        elif kind == "content_part.added":
            told[-1]["content"].append(event["part"])
        elif kind.endswith(".delta"):
            [part] = told[-1]["content"]
            assert kind == f"{part['type']}.delta"
            part["text"] += event["delta"]
            if part["type"] == "output_text":
                part["logprobs"] += event["logprobs"]
        elif kind == "content_part.done":
            assert told[-1]["content"] == [event["part"]]
        elif kind == "output_item.done":
            assert told[-1] == {**event["item"], "status": "in_progress"}
            told[-1] = event["item"]
    assert told == items
    spoken = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    thought = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
    assert (spoken, thought) == ("".join(d.text for d in deltas), "".join(d.reasoning for d in deltas))
    assert output.num_reasoning_tokens == sum(bool(delta.reasoning) for delta in deltas)


def test_before_anything_came_there_is_nothing_to_end() -> None:
    output = ResponseOutput("resp_1", ResponseTools(None), marks_reasoning=False)
    assert list(output.end("incomplete")) == []


def test_a_token_of_the_reasoning_has_no_logprobs() -> None:
    output = ResponseOutput("resp_1", ResponseTools(None), marks_reasoning=True)
    for delta in (Delta("", [SCORE]), Delta("", [SCORE], reasoning="r"), Delta("", [SCORE]), Delta("t", [SCORE])):
        list(output.add(delta))

    reasoning, message = as_json(output.items("in_progress"))
    assert "logprobs" not in reasoning["content"][0]
    assert [score["token"] for score in message["content"][0]["logprobs"]] == ["x"]

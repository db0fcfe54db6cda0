"""Which parts of an answer each format takes for calls, however the text is cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.server.text.calls import CallDelta, call_id, join_calls
from gptserve.server.tools.formats import FORMATS, ToolFormatName, format_of
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Tape

Call = tuple[str, str]
NAMES = frozenset(("f", "get_time"))


def read(name: ToolFormatName, text: str, cuts: Sequence[int] = ()) -> list[tuple[str, tuple[CallDelta, ...]]]:
    """Return what each piece adds: text and calls."""
    tape, parts = Tape(), Parts(lambda index: f"id {index}")
    steps = FORMATS[name].read(tape, parts, NAMES)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    added = []
    for number, (start, end) in enumerate(itertools.pairwise(edges), 1):
        tape.feed(text[start:end], is_last=number == len(edges) - 1)
        next(steps, None)
        content, reasoning, calls = parts.take()
        assert not reasoning
        added.append((content, calls))
    return added


def joined(pieces: list[tuple[str, tuple[CallDelta, ...]]]) -> tuple[str, list[Call]]:
    calls = join_calls(call for _, added in pieces for call in added)
    assert [(call.index, call.id) for call in calls] == [(i, f"id {i}") for i in range(len(calls))]
    return "".join(text for text, _ in pieces), [(str(call.name), call.arguments) for call in calls]


F = '{"name": "f", "arguments": {"a": 1}}'
CASES: list[tuple[ToolFormatName, str, str, list[Call]]] = [
    ("hermes", "Just text < <tool", "Just text < <tool", []),
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", "", [("f", '{"a": 1}')]),
    ("hermes", f"I look.\n<tool_call>{F}</tool_call>\n<tool_call>{F}</tool_call>\nSo.", "I look.\nSo.",
     [("f", '{"a": 1}')] * 2),
    ("hermes", '<tool_call>{"arguments": {"s": "}\\"{\\\\"}, "id": "x", "name": "unknown"}</tool_call>', "",
     [("unknown", '{"s": "}\\"{\\\\"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>', "",
     [("f", '{"a": "é"}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", f"<tool_call>{F}<tool_call>{F}}}\n</tool_call>", "", [("f", '{"a": 1}')] * 2),
    ("hermes", f"<tool_call>{F}", "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, {"b', "", [("f", '{"a": [1, {"b')]),
    ("hermes", '<tool_call>\n{"name": "f"', '<tool_call>\n{"name": "f"', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": 1}</tool_call>.', ".", [("f", "1")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments" : null , "name": "f"}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": -1.5e3 }', "", [("f", "-1.5e3")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": nul}.', '<tool_call>{"name": "f", "arguments": nul}.', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": }', '<tool_call>{"name": "f", "arguments": }', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": ["a", {"b": [1]}]}</tool_call>', "",
     [("f", '["a", {"b": [1]}]')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "Os\\"lo é"}', "", [("f", '"Os\\"lo é"')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": " "}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a":\n"one\ntwo\t\\"\\\nthree\\\\"}}', "",
     [("f", '{"a":\n"one\\u000atwo\\u0009\\"\\u000athree\\\\"}')]),
    ("mistral-v11", '[TOOL_CALLS]f[ARGS]{"a": "one\ntwo"}', "", [("f", '{"a": "one\\u000atwo"}')]),
    ("llama", '{"name": "f", "parameters": ["a"]}', "", [("f", '["a"]')]),
    ("hermes", '<tool_call>{"name": "no name", "id": ""}', '<tool_call>{"name": "no name", "id": ""}', []),
    ("hermes", '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
    ("hermes", f"<tool_call> none <tool_call>{F}</tool_call>", "<tool_call> none ", [("f", '{"a": 1}')]),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama", '\n<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "get_time"}\n', "",
     [("f", "{}"), ("get_time", "{}")]),
    ("llama", '{"name": "Anna", "parameters": {}}', '{"name": "Anna", "parameters": {}}', []),
    ("llama", ' {"title": "f"}', ' {"title": "f"}', []),
    ("llama", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
    ("llama", '{"name": "f", "parameters": {}} And more', "And more", [("f", "{}")]),
    ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", f"[TOOL_CALLS] [{F}, {F}]", "", [("f", '{"a": 1}')] * 2),
    ("mistral", f"Now. [TOOL_CALLS]{F} x", "Now. x", [("f", '{"a": 1}')]),
    ("mistral", f'[TOOL_CALLS][{F}, {{"x": 1}}]', '{"x": 1}]', [("f", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral-v11", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_time[CALL_ID]a1[ARGS]{}', "",
     [("f", '{"a": 1}'), ("get_time", "{}")]),
    ("mistral-v11", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral-v11", "[TOOL_CALLS]f(1)", "[TOOL_CALLS]f(1)", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_told_from_text(name: ToolFormatName, text: str, content: str, calls: list[Call]) -> None:
    whole, by_char = read(name, text), read(name, text, range(len(text)))
    assert joined(whole) == (content, calls)
    assert joined(by_char) == (content, calls)


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[",
        "]",
        ", ",
        ";",
        "\n",
    ),
    *('{"name": "f", ', '"arguments": ', '"parameters":', "{", "}", '"', "\\", "é", "a1", F, '{"a": "\\n"}}', "<", "f"),
]


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_the_deltas_add_up_to_the_same_however_the_text_is_cut(
    name: ToolFormatName, text: str, cuts: list[int]
) -> None:
    pieces = read(name, text, cuts)
    assert joined(pieces) == joined(read(name, text))
    begun = set[int]()
    for call in itertools.chain.from_iterable(added for _, added in pieces):
        assert (call.index in begun) == (call.name is None) == (call.id is None), "the first of a call names it"
        assert call.name is not None or call.arguments, "nothing is sent that adds nothing"
        begun.add(call.index)


def test_arguments_come_as_they_are_written() -> None:
    pieces = read("hermes", f"<tool_call>{F}", range(100))
    assert [call.arguments for _, added in pieces for call in added] == list('{"a": 1}')


def test_a_long_answer_takes_time_in_proportion() -> None:
    """Every step reads only what is new: work is counted in characters that the tape gives out."""
    read_chars = [0, 0]
    for i, length in enumerate((1000, 10_000)):
        tape, parts = Tape(), Parts(str)
        original = tape.read

        def counted(num_chars: int = 1, i: int = i, original: object = original) -> str:
            read_chars[i] += num_chars
            return original(num_chars)  # type: ignore[operator, no-any-return]

        tape.read = counted  # type: ignore[method-assign]
        steps = FORMATS["hermes"].read(tape, parts, NAMES)
        for char in '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * length:
            tape.feed(char, is_last=False)
            next(steps, None)
    assert read_chars[1] - read_chars[0] == 9000


def test_ids_depend_on_their_place_alone() -> None:
    places = list(itertools.product(("chatcmpl-1", "chatcmpl-2"), range(2), range(12)))
    ids = [call_id(*place) for place in places]
    assert ids == [call_id(*place) for place in places]
    assert len(set(ids)) == len(ids)
    assert all(len(made) == 9 and made.isalnum() and made.isascii() for made in ids), "Mistral's templates want this"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>', "hermes"),
        ('in the format {"name": function name, "parameters": dictionary of argument name and its value}.', "llama"),
        ("{{- '[TOOL_CALLS]' + tool_calls|tojson }}", "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral-v11"),
        ("<tool_call>\n<function=example_function_name>", None),
        ("<tool_calls>", None),
        ('<tool_calls>\n<tool_call>{"name": …}</tool_call>\n</tool_calls>', None),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_the_chat_template_tells_the_format(template: str, name: ToolFormatName | None) -> None:
    assert format_of(template) is (None if name is None else FORMATS[name])

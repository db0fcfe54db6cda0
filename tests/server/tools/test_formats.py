"""Which parts of an answer each format takes for calls, however the text is cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.server.text.calls import CallDelta, call_id, join_calls
from gptserve.server.tools.deepseek import BAR
from gptserve.server.tools.formats import OWN_FORMATS, format_of
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Tape
from gptserve.server.tools.values import Tools

Call = tuple[str, str]
TOOLS: Tools = {"f": {"s": "text", "o": "text or null"}, "get_time": {}}


def read(name: str, text: str, cuts: Sequence[int] = ()) -> list[tuple[str, tuple[CallDelta, ...]]]:
    """Return what each piece adds: text and calls."""
    tape, parts = Tape(), Parts(lambda index: f"id {index}")
    steps = OWN_FORMATS[name].read(tape, parts, TOOLS)
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
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.id == f"id {call.index}" or ":" in str(call.id) for call in calls), "or it is the model's"
    return "".join(text for text, _ in pieces), [(str(call.name), call.arguments) for call in calls]


def coder(name: str = "f", **values: object) -> str:
    """Return a call as Qwen3-Coder writes it."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def deepseek(*calls: str) -> str:
    """Return calls between DeepSeek's marks."""
    marks = {name: f"<{BAR}tool▁{name}{BAR}>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")}
    written = (call.format(sep=marks["sep"]) for call in calls)
    inner = "".join(f"{marks['call▁begin']}{call}{marks['call▁end']}" for call in written)
    return f"{marks['calls▁begin']}{inner}{marks['calls▁end']}"


def dsml(block: str, *values: str) -> str:
    """Return two calls as DeepSeek writes them from V3.2 on, the first of them with these names and values."""
    pairs = zip(values[::2], values[1::2], strict=True)
    written = "".join(f'<@parameter name="{name}">{value}</@parameter>\n' for name, value in pairs)
    calls = f'<@invoke name="f">\n{written}</@invoke>\n<@invoke name="get_time">\n</@invoke>\n'
    return f"<@{block}>\n{calls}</@{block}>".replace("@", f"{BAR}DSML{BAR}")


def kimi(call_id: str, arguments: str) -> str:
    """Return a call as Kimi K2 writes it."""
    call = f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


F = '{"name": "f", "arguments": {"a": 1}}'
CASES: list[tuple[str, str, str, list[Call]]] = [
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
    ("llama", '<|python_start|>{"name": "f", "parameters": {}}<|python_end|>', "", [("f", "{}")]),
    ("llama", '<|python_start|><|python_end|>{"name": "f", "parameters": {}}{"name": "f"}', "",
     [("f", "{}"), ("f", "{}")]),
    ("llama", "<|python_start|>1<|python_end|>", "<|python_start|>1<|python_end|>", []),
    ("mistral", f"[TOOL_CALLS] [{F}, {F}]", "", [("f", '{"a": 1}')] * 2),
    ("mistral", f"Now. [TOOL_CALLS]{F} x", "Now. x", [("f", '{"a": 1}')]),
    ("mistral", f'[TOOL_CALLS][{F}, {{"x": 1}}]', '{"x": 1}]', [("f", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral-v11", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_time[CALL_ID]a1[ARGS]{}', "",
     [("f", '{"a": 1}'), ("get_time", "{}")]),
    ("mistral-v11", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral-v11", "[TOOL_CALLS]f(1)", "[TOOL_CALLS]f(1)", []),
    ("qwen-coder", "So.\n" + coder(s=' a\n"b\n', n=5) + "\n" + coder("get_time") + "\nDone.", "So.\nDone.",
     [("f", '{"s": " a\\n\\"b\\n", "n": 5}'), ("get_time", "{}")]),
    ("qwen-coder", coder(s="null", o="null", p="None", q="True"), "",
     [("f", '{"s": "null", "o": null, "p": null, "q": true}')]),
    ("qwen-coder", coder(o="nullify", a="{'a': (1, 2.5, None), \"b\": 'it\\'s'}", b='{"a": "1\t2"}'), "",
     [("f", '{"o": "nullify", "a": {"a": [1, 2.5, null], "b": "it\'s"}, "b": {"a": "1\\u00092"}}')]),
    ("qwen-coder", coder(a="+49", b="(5)", c="nan", d="'x", e="", f="1_0"), "",
     [("f", '{"a": "+49", "b": "(5)", "c": "nan", "d": "\'x", "e": "", "f": "1_0"}')]),
    ("qwen-coder", "<function=f>\n<parameter=s>x</parameter></function>", "", [("f", '{"s": "x"}')]),
    ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n</param", "", [("f", '{"s": "x\\n</param')]),
    ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=n>\n5", "", [("f", '{"n": 5')]),
    ("qwen-coder", "<tool_call>\n<function=f>\n<b></function>.", "<b></function>.", [("f", "")]),
    ("qwen-coder", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("qwen-coder", "<function=f g>", "<function=f g>", []),
    ("seed", "<seed:tool_call>\n<function=f>\n<parameter=s>x\n</parameter>\n</function>\n</seed:tool_call>", "",
     [("f", '{"s": "x\\n"}')]),
    ("glm", "So.<tool_call>f\n<arg_key>s</arg_key>\n<arg_value> x\n</arg_value>\n<arg_key>n</arg_key>\n"
     "<arg_value>[1]</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>\n", "So.",
     [("f", '{"s": " x\\n", "n": [1]}'), ("get_time", "{}")]),
    ("glm", "<tool_call>f<arg_key>s</arg_key><arg_value>5</arg_value></tool_call>.", ".", [("f", '{"s": "5"}')]),
    ("glm", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x", "", [("f", '{"s": "x')]),
    ("glm", "<tool_call>f\n<arg_key>s</arg_key>none", "none", [("f", "")]),
    ("glm", "<tool_call>a b</tool_call>", "<tool_call>a b</tool_call>", []),
    ("pythonic", "[f(s='it\\'s', n=-1.50, l=[True, None, {'a': .5}]), get_time()]\n", "",
     [("f", '{"s": "it\'s", "n": -1.50, "l": [true, null, {"a": 0.5}]}'), ("get_time", "{}")]),
    ("pythonic", ' <|python_start|>[f(s="\\u00e9\\x41\\q\\n\\U0001f600\\/", t=(),)]<|python_end|>', "",
     [("f", '{"s": "\\u00e9\\u0041\\\\q\\n😀/", "t": []}')]),
    ("pythonic", "[f](x) is a link", "[f](x) is a link", []),
    ("pythonic", "[g(a=1)]", "[g(a=1)]", []),
    ("pythonic", '[f("x")]', '[f("x")]', []),
    ("pythonic", "[f(a=b)] So", ")] So", [("f", '{"a": ')]),
    ("pythonic", "[f(a=1), what]", "what]", [("f", '{"a": 1}')]),
    ("pythonic", "Call [f(a=1)]", "Call [f(a=1)]", []),
    ("pythonic", "[f(s='x", "", [("f", '{"s": "x')]),
    ("pythonic", "[f(s='x\\", "", [("f", '{"s": "x')]),
    ("pythonic", "[f(s='x\\u12", "", [("f", '{"s": "x\\\\u12')]),
    ("gemma-4", 'I look.<|tool_call>call:f{l:[1,<|"|>b<|"|>,{k:null}],o:{},s:<|"|>a "b"\n{,}<|"|>,t:true}<tool_call|>'
     "<|tool_call>call:get_time{}<tool_call|>\nWait", "I look.Wait",
     [("f", '{"l": [1, "b", {"k": null}], "o": {}, "s": "a \\"b\\"\\n{,}", "t": true}'), ("get_time", "{}")]),
    ("gemma-4", '<|tool_call>call:f{ "a b" : "x", <|"|>c:d<|"|>: -1.5e3, e: [], }<tool_call|>', "",
     [("f", '{"a b": "x", "c:d": -1.5e3, "e": []}')]),
    ("gemma-4", '<|tool_call>call:f{{"a": <|"|>x<|"|>}}<tool_call|>', "", [("f", '{"a": "x"}')]),
    ("gemma-4", "<|tool_call>call:f{a:1}<|tool_call>call:f{a:2}", "", [("f", '{"a": 1}'), ("f", '{"a": 2}')]),
    ("gemma-4", "<|tool_call>call:f{a:b}<tool_call|>.", ".", [("f", '{"a": ')]),
    ("gemma-4", '<|tool_call>call:f{a:<|"|>x', "", [("f", '{"a": "x')]),
    ("gemma-4", "<|tool_call>call:f{a:[1", "", [("f", '{"a": [1')]),
    ("gemma-4", "<|tool_call>call:f{a 1}<tool_call|>", "", [("f", "{")]),
    ("gemma-4", "<|tool_call>f{}<tool_call|>", "<|tool_call>f{}<tool_call|>", []),
    ("gemma-4", "<|tool_call>call:f()<tool_call|>", "<|tool_call>call:f()<tool_call|>", []),
    ("gemma-4", "<|tool_call>call:" + "f{a:" + "[" * 70, "", [("f", '{"a": ' + "[" * 64)]),
    ("lfm", "I look.<|tool_call_start|>[f(a=1), f()]<|tool_call_end|>Wait", "I look.Wait",
     [("f", '{"a": 1}'), ("f", "{}")]),
    ("lfm", "<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>[]<|tool_call_end|>", []),
    ("olmo", "So <function_calls>\nf(a=1)\nget_time()\n</function_calls>", "So ",
     [("f", '{"a": 1}'), ("get_time", "{}")]),
    ("deepseek-v3", deepseek("function{sep}f\n```json\n{{\"a\": 1}}\n```"), "", [("f", '{"a": 1}')]),
    ("deepseek-v3.1", "So." + deepseek('f{sep}{{"a": 1}}', "get_time{sep}{{}}") + " x", "So.x",
     [("f", '{"a": 1}'), ("get_time", "{}")]),
    ("deepseek-v3.1", deepseek("f"), deepseek("f"), []),
    ("deepseek-v3.2", dsml("function_calls", 's" string="true', "5", 'n" string="false', "5"), "",
     [("f", '{"s": "5", "n": 5}'), ("get_time", "{}")]),
    ("deepseek-v4", dsml("tool_calls", 'n" string="true', "5", 's" string="false', "[5]") + "\n", "",
     [("f", '{"n": "5", "s": [5]}'), ("get_time", "{}")]),
    ("kimi-k2", kimi('functions.f:0', '{"a": 1}') + "x", "x", [("f", '{"a": 1}')]),
    ("kimi-k2", kimi("f g", "{}"), kimi("f g", "{}"), []),
    ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n    '
     '{"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>', "",
     [("f", '{"a": 1}'), ("get_time", "{}")]),
    ("cohere", "<|START_ACTION|>[]", "<|START_ACTION|>[]", []),
    ("command-r", 'So.\nAction:\n```json\n[\n    {\n        "tool_name": "f",\n        "parameters": {\n            '
     '"a": 1\n        }\n    },\n    {\n        "tool_name": "get_time",\n        "parameters": {}\n    }\n]```\nx',
     "So.\nx", [("f", '{\n            "a": 1\n        }'), ("get_time", "{}")]),
    ("command-r", 'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]```',
     'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]```', []),
    ("command-r", "Action: sit. Action:```json", "Action: sit. Action:```json", []),
    ("minimax-m1", f"So.<tool_calls>\n{F}\n{F}\n</tool_calls>x", "So.x", [("f", '{"a": 1}')] * 2),
    ("apriel", f"So.<tool_calls>[{F}, {F[:-1]}, \"id\": \"x\"}}]</tool_calls>\nx", "So.x", [("f", '{"a": 1}')] * 2),
    ("nemotron-2", '<TOOLCALL>[{"name": "f", "arguments": "{}"}]</TOOLCALL>', "", [("f", "{}")]),
    ("granite-3", f"<|tool_call|>[{F}]", "", [("f", '{"a": 1}')]),
    ("granite-3", "<|tool_call|>[] none", "<|tool_call|>[] none", []),
    ("minimax-m1", "<tool_calls>\n</tool_calls>", "<tool_calls>\n</tool_calls>", []),
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x</parameter>\n</invoke>\n'
     '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>\n', "",
     [("f", '{"s": "x"}'), ("get_time", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_told_from_text(name: str, text: str, content: str, calls: list[Call]) -> None:
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
    *("<function=f>\n", "</function>", "<parameter=s>\n", "</parameter>", "f\n<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "[f(", "s=", "n=", "'", ")", "<|tool_call_start|>", "<function_calls>", "True", "null", "-1.5"),
    *('<invoke name="f">', '<parameter name="o">', "</invoke>", "<minimax:tool_call>", "<tool_calls>", "f(a=1)"),
    *(deepseek('f{sep}{{"a": 1}}'), deepseek("f")[:-10], dsml("tool_calls", 's" string="true', "5")[:-20]),
    *(kimi("functions.f:0", "{}"), "<|START_ACTION|>[", '{"tool_name": "f", "parameters": {}}'),
    *('{"name": "f", ', '"arguments": ', '"parameters":', "{", "}", '"', "\\", "é", "a1", F, '{"a": "\\n"}}', "<", "f"),
]


def pieces_of(name: str) -> list[str]:
    """Return pieces of texts, with whole answers of a format and halves of them."""
    own = [text for form, text, _, _ in CASES if form == name]
    return [*PIECES, *own, *(text[: len(text) // 2] for text in own), *(text[len(text) // 2 :] for text in own)]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", sorted(OWN_FORMATS))
@given(data=st.data())
def test_the_deltas_add_up_to_the_same_however_the_text_is_cut(name: str, data: st.DataObject) -> None:
    text = data.draw(st.lists(st.sampled_from(pieces_of(name)), max_size=12).map("".join))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    pieces = read(name, text, cuts)
    assert joined(pieces) == joined(read(name, text))
    begun = set[int]()
    for call in itertools.chain.from_iterable(added for _, added in pieces):
        assert (call.index in begun) == (call.name is None) == (call.id is None), "the first of a call names it"
        assert call.name is not None or call.arguments, "nothing is sent that adds nothing"
        begun.add(call.index)


def test_the_id_of_a_call_is_what_the_model_writes_where_its_template_shows_that() -> None:
    text = "".join(kimi(call_id, "{}") for call_id in ("functions.f:3", "functions.f:3", "f"))
    calls = [call for _, added in read("kimi-k2", text, range(len(text))) for call in added if call.name]
    assert [(call.name, call.id) for call in calls] == [("f", "functions.f:3"), ("f", "id 1"), ("f", "id 2")]


def test_a_string_comes_as_it_is_written() -> None:
    text = coder(s="one two", n="[1, 2]", o="three")
    pieces = [call.arguments for _, added in read("qwen-coder", text, range(len(text))) for call in added]
    assert pieces == ["", '{"s": ', '"', *"one two", '"', ', "n": ', "[1, 2]", ', "o": ', '"t', *"hree", '"', "}"]


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
        steps = OWN_FORMATS["hermes"].read(tape, parts, TOOLS)
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
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen-coder"),
        ("<seed:tool_call>\n<function=name>\n<parameter=name>", "seed"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>", "glm"),
        ("<tool_call>{function-name}<arg_key>a</arg_key><arg_value>b</arg_value><arg_key>", "glm"),
        ("format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
         "pythonic"),
        (deepseek("{{function}}{sep}name\n```json\n"), "deepseek-v3"),
        (deepseek("name{sep}"), "deepseek-v3.1"),
        (f"{{% set token = '{BAR}DSML{BAR}' %}}<' + token + 'function_calls>", "deepseek-v3.2"),
        (f"{{% set token = '{BAR}DSML{BAR}' %}}<' + token + 'tool_calls>", "deepseek-v4"),
        (kimi("{{ id }}", ""), "kimi-k2"),
        ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "x", "parameters": {}}]<|END_ACTION|>', "cohere"),
        ("Write 'Action:' followed by a json-formatted list of actions:\n```json\n[{\"tool_name\": title}]```",
         "command-r"),
        ("please respond with <tool_calls></tool_calls> XML tags", "minimax-m1"),
        ('<minimax:tool_call>\n<invoke name="tool-name-1">', "minimax-m2"),
        ("<tool_calls>[{", "apriel"),
        ('<TOOLCALL>[{"name": "tool_name1", "arguments": "tool_args1"}]</TOOLCALL>', "nemotron-2"),
        ("only with <|tool_call|> followed by a JSON list of tools used.", "granite-3"),
        ("List of tools: <|tool_list_start|>[", "lfm"),
        ("{{- '<|tool_call>call:' + name + '{' -}}", "gemma-4"),
        ("<tool_call>\n<function=example_function_name>", None),
        ("<tool_calls>", None),
        ('<tool_calls>\n<tool_call>{"name": …}</tool_call>\n</tool_calls>', None),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_the_chat_template_tells_the_format(template: str, name: str | None) -> None:
    assert format_of(template) is (None if name is None else OWN_FORMATS[name])

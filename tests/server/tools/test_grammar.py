"""Answers that a grammar of tools allows: what a model writes at random within one has calls that validate."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar.compiler import Compiler
from gptserve.engine.grammar.grammar import Grammar, UnnamedProperties
from gptserve.engine.grammar.matcher import Matcher
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.server.schemas.completions import ChatRequest
from gptserve.server.text.output import ChoiceOutput, Delta
from gptserve.server.tools.deepseek import BAR
from gptserve.server.tools.dialect import Dialect, Reading
from gptserve.server.tools.formats import OWN_FORMATS
from gptserve.server.tools.harmony import MARKS, find_marks
from gptserve.server.tools.reasoning import THINK, ThinkMarks
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.server.tools.test_formats import deepseek, kimi

SPECIAL = (
    *(*MARKS, "<|constrain|>", "[TOOL_CALLS]", "[ARGS]", "</arg_value>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
EOS = 0
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Århus"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PLACE, "strict": True}},
    {"type": "function", "function": {"name": "get_time"}},
]
SCHEMAS = {"get_weather": PLACE, "get_time": {"type": "object", "maxProperties": 0}}
KINDS = (*OWN_FORMATS, "harmony")


@pytest.fixture(scope="module")
def folder(storyteller: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storyteller's vocabulary with the special tokens of harmony and Mistral; no weights."""
    folder = tmp_path_factory.mktemp("vocabulary")
    saved = json.loads((storyteller / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((storyteller / "config.json").read_text(encoding="utf-8"))
    first = config["vocab_size"]
    saved["added_tokens"] += [{"id": first + i, "content": mark, "special": True} for i, mark in enumerate(SPECIAL)]
    (folder / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": first + len(SPECIAL)}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Compiler:
    return Compiler(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.open(folder)


def reading_of(
    tokenizer: Tokenizer,
    kind: str,
    prompt: str = "",
    *,
    think: ThinkMarks | None = None,
    unnamed: UnnamedProperties = "refuse",
    **fields: Any,
) -> Reading:
    marks, form = (find_marks(tokenizer), None) if kind == "harmony" else (None, OWN_FORMATS[kind])
    dialect = Dialect(tokenizer, marks, form, knows_tools=True, think=think, unnamed_properties=unnamed)
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields})
    dialect.check(body)
    prompt = "<|start|>assistant" if kind == "harmony" else prompt
    reading = dialect.reading(body, tokenizer.encode_with_special(prompt))
    assert reading is not None
    return reading


def split(reading: Reading, tokenizer: Tokenizer, ids: list[int]) -> Delta:
    """Return what the tokens of an answer that ends by itself are."""
    reader = reading.reader("chatcmpl-x", 0)
    choice = ChoiceOutput(tokenizer, skip=reading.special_ids, channel_of=reader.channel_of)
    output = TokenOutput("r", (*ids, EOS), finish_reason=FinishReason.STOP, stop_token_id=EOS)
    return reader.read(choice.add(output))


def allows(matcher: Matcher, ids: list[int]) -> bool:
    """Whether a grammar allows these tokens and then the end."""
    known: list[int] = []
    for token_id in (*ids, EOS):
        [row] = matcher.masks(known, (), 0)
        if not row[token_id >> 5] >> (token_id & 31) & 1:
            return False
        known.append(token_id)
    return True


def write_at_random(
    matcher: Matcher, rng: random.Random, max_tokens: int = 2000, begin: Sequence[int] = ()
) -> list[int] | None:
    """Return tokens that a grammar allows, each as likely as any other, up to the end; None without one."""
    known = list(begin)
    while len(known) < max_tokens:
        [row] = matcher.masks(known, (), 0)
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]
        assert len(allowed), matcher.fault
        token_id = EOS if EOS in allowed and rng.random() < 0.5 else int(rng.choice(allowed))
        if token_id == EOS:
            return known
        known.append(token_id)
    return None


def validate(delta: Delta) -> int:
    for call in delta.tool_calls:
        assert call.name is not None
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return len(delta.tool_calls)


@pytest.mark.some(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    ],
)
def test_whatever_is_written_within_a_forced_grammar_calls_tools_by_their_schemas(
    compiler: Compiler, tokenizer: Tokenizer, kind: str, fields: dict[str, Any]
) -> None:
    reading = reading_of(tokenizer, kind, **fields)
    assert reading.grammar is not None
    counts = []
    for seed in range(6):
        # Reasoning at random would go on to the limit: the first messages of harmony are left out.
        matcher, rng = compiler.compile(reading.grammar), random.Random(seed)
        ids = write_at_random(Following(matcher, kind, tokenizer), rng)  # type: ignore[arg-type]
        assert ids is not None
        delta = split(reading, tokenizer, ids)
        assert (delta.text.strip(), delta.reasoning, delta.finish_reason) == ("", "", "tool_calls")
        counts.append(validate(delta))
        if fields["tool_choice"] != "required":
            assert {call.name for call in delta.tool_calls} == {"get_weather"}
    assert min(counts) >= 1
    assert max(counts) == 1 or fields == {"tool_choice": "required"}


class Following:
    """A matcher that begins a harmony answer with a call."""

    def __init__(self, matcher: Matcher, kind: str, tokenizer: Tokenizer) -> None:
        self._matcher, self.fault = matcher, ""
        self._first = tokenizer.encode_with_special("<|channel|>commentary to=") if kind == "harmony" else []

    def masks(self, known: list[int], draft: tuple[int, ...], num_before_end: int) -> list[np.ndarray[Any, Any]]:
        [row] = self._matcher.masks(known, draft, num_before_end)
        if len(known) >= len(self._first):
            return [row]
        only = np.zeros_like(row)
        token_id = self._first[len(known)]
        only[token_id >> 5] = row[token_id >> 5] & (1 << (token_id & 31))
        return [only]


def dsml(block: str) -> str:
    """Return a call as DeepSeek writes it from V3.2 on."""
    return f'<@{block}>\n<@invoke name="get_time">\n</@invoke>\n</@{block}>'.replace("@", f"{BAR}DSML{BAR}")


CALL = {
    "hermes": '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "get_time", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]',
    "mistral-v11": "[TOOL_CALLS]get_time[ARGS]{}",
    "harmony": "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}",
    "qwen-coder": "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=get_time>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>get_time\n</tool_call>",
    "pythonic": "[get_time()]",
    "lfm": "<|tool_call_start|>[get_time()]<|tool_call_end|>",
    "gemma-4": "<|tool_call>call:get_time{}<tool_call|>",
    "olmo": "<function_calls>\nget_time()\n</function_calls>",
    "deepseek-v3": deepseek("function{sep}get_time\n```json\n{{}}\n```"),
    "deepseek-v3.1": deepseek("get_time{sep}{{}}"),
    "deepseek-v3.2": dsml("function_calls"),
    "deepseek-v4": dsml("tool_calls"),
    "kimi-k2": kimi("functions.get_time:0", "{}"),
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_time", "parameters": {}}\n]'
    "<|END_ACTION|>",
    "command-r": 'Action:\n```json\n[\n    {\n        "tool_name": "get_time",\n        "parameters": {}\n    }\n]```',
    "minimax-m1": '<tool_calls>\n{"name": "get_time", "arguments": {}}\n</tool_calls>',
    "apriel": '<tool_calls>[{"name": "get_time", "arguments": {}}]</tool_calls>',
    "nemotron-2": '<TOOLCALL>[{"name": "get_time", "arguments": {}}]</TOOLCALL>',
    "granite-3": '<|tool_call|>[{"name": "get_time", "arguments": {}}]',
    "minimax-m2": '<minimax:tool_call>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
}
SECOND = {
    "hermes": "\n" + CALL["hermes"],
    "llama": "; " + CALL["llama"],
    "mistral-v11": CALL["mistral-v11"],
    "qwen-coder": "\n" + CALL["qwen-coder"],
    "seed": "\n" + CALL["seed"],
    "glm": "\n" + CALL["glm"],
    "gemma-4": CALL["gemma-4"],
}
DSML_ARGUMENT = f'<{BAR}DSML{BAR}parameter name="a" string="true">1</{BAR}DSML{BAR}parameter>\n'
ARGUMENT = {  # what stands before which mark; others have JSON
    "qwen-coder": ("<parameter=a>\n1\n</parameter>\n", "</function>"),
    "seed": ("<parameter=a>1</parameter>\n", "</function>"),
    "glm": ("<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n", "</tool_call>"),
    **dict.fromkeys(("pythonic", "lfm", "olmo"), ("a=1", ")")),
    "gemma-4": ("a:1", "}"),
    **dict.fromkeys(("deepseek-v3.2", "deepseek-v4"), (DSML_ARGUMENT, f"</{BAR}DSML{BAR}invoke>")),
    "minimax-m2": ('<parameter name="a">1</parameter>\n', "</invoke>"),
}


def with_argument(kind: str, call: str) -> str:
    """Return a call of CALL with an argument."""
    if kind not in ARGUMENT:
        return call.replace("{}", '{"a": 1}')
    argument, mark = ARGUMENT[kind]
    assert mark in call
    return call.replace(mark, argument + mark)


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.some(22)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_strict_answer_may_be_text_unless_calls_are_required(
    compiler: Compiler, tokenizer: Tokenizer, kind: str, choice: str, is_parallel: bool
) -> None:
    reading = reading_of(tokenizer, kind, tool_choice=choice, parallel_tool_calls=is_parallel)
    assert reading.grammar is not None
    matcher = compiler.compile(reading.grammar)
    harmony = kind == "harmony"
    before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" if harmony else "I look. "
    text = "<|channel|>final<|message|>Four." if harmony else "Four."
    cases = {
        CALL[kind]: True,
        text: choice == "auto",
        before + CALL[kind]: (choice == "auto" and kind != "llama") or harmony,
        CALL[kind].replace("get_time", "get_tim"): False,
        with_argument(kind, CALL[kind]): choice == "auto",  # that one is not strict
        CALL[kind].replace("get_time", "get_weather"): False,
        CALL[kind] + SECOND.get(kind, "x"): is_parallel and kind in SECOND,
    }
    if harmony:
        cases[ANALYSIS + CALL[kind]] = True
    given = {case: allows(matcher.copy(), tokenizer.encode_with_special(case)) for case in cases}
    if kind == "llama":
        cases[before + CALL[kind]] = choice == "auto"  # as text
    assert given == cases


@pytest.mark.parametrize(
    ("is_parallel", "separator", "is_allowed"), [(True, ", ", True), (True, ",", False), (False, ", ", False)]
)
def test_calls_in_an_array_have_a_comma_and_a_space_between_them(
    compiler: Compiler, tokenizer: Tokenizer, is_parallel: bool, separator: str, is_allowed: bool
) -> None:
    reading = reading_of(tokenizer, "mistral", tool_choice="required", parallel_tool_calls=is_parallel)
    assert reading.grammar is not None
    call = '{"name": "get_time", "arguments": {}}'
    ids = tokenizer.encode_with_special(f"[TOOL_CALLS][{call}{separator}{call}]")
    assert allows(compiler.compile(reading.grammar), ids) is is_allowed


@pytest.mark.parametrize("think", [THINK, ThinkMarks("[THINK]", "[/THINK]")])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_comes_before_calls(
    compiler: Compiler, tokenizer: Tokenizer, choice: str, is_open: bool, think: ThinkMarks
) -> None:
    prompt = f"Hi{think.begin}\n" if is_open else f"Hi {think.begin}\n\n{think.end}\n\n"
    reading = reading_of(tokenizer, "hermes", prompt, think=think, tool_choice=choice)
    assert reading.grammar is not None
    matcher = compiler.compile(reading.grammar)
    thought = f"{'' if is_open else think.begin}I <tool_call> may call.{think.end}\n\n"
    cases = {
        thought + CALL["hermes"]: True,
        thought + "Four.": choice == "auto",
        CALL["hermes"]: not is_open,
        thought + "<tool_call>x": False,
        thought.replace(think.end, ""): False,
    }
    assert {case: allows(matcher.copy(), tokenizer.encode(case)) for case in cases} == cases
    delta = split(reading, tokenizer, tokenizer.encode(thought + CALL["hermes"]))
    assert (delta.text, delta.reasoning, validate(delta)) == ("", "I <tool_call> may call.", 1)


CARD: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name"],
    "additionalProperties": False,
}


def wanting(schema: Any = CARD) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def compact(kind: str, call: str) -> str:
    """Return a call as it is beside JSON, which has no white space where the format makes that one text of both."""
    return call.replace(", ", ",").replace(": ", ":") if kind == "llama" else call


@pytest.mark.some(11)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_beside_tools_a_text_has_to_match_what_is_wanted(
    compiler: Compiler, tokenizer: Tokenizer, kind: str, is_parallel: bool
) -> None:
    reading = reading_of(tokenizer, kind, parallel_tool_calls=is_parallel, **wanting())
    assert reading.grammar is not None
    matcher = compiler.compile(reading.grammar)
    harmony = kind == "harmony"
    before, final = (ANALYSIS, "<|channel|>final<|message|>") if harmony else ("", "")
    call, second = compact(kind, CALL[kind]), compact(kind, SECOND.get(kind, "x"))
    cases = {
        before + call: True,
        before + final + '{"name":"get_time","n":4}': True,
        before + final + '{"name":"<tool_call>"}': True,
        final + '{"name": "x"}': False,
        final + "Four.": False,
        "I look. " + call: False,
        final + '{"name":"x"}' + call: False,
        call.replace("get_time", "get_tim"): False,
        compact(kind, with_argument(kind, call)): True,  # that one is not strict
        call.replace("get_time", "get_weather"): False,
        call + second: is_parallel and kind in SECOND,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + final + '{"name":"x"}': False,
    }
    assert {case: allows(matcher.copy(), tokenizer.encode_with_special(case)) for case in cases} == cases
    for text in ('{"name":"get_time","n":4}', f'{{"name":"{CALL["hermes"][:11]}"}}'):
        delta = split(reading, tokenizer, tokenizer.encode_with_special(before + final + text))
        assert (delta.text, delta.tool_calls, delta.finish_reason) == (text, (), "stop")
    delta = split(reading, tokenizer, tokenizer.encode_with_special(before + call))
    assert (delta.text, delta.reasoning, validate(delta)) == ("", "Hm." if harmony else "", 1)


# In llama's format an object with a function's name may be a call, so that not all objects of such a schema are text.
@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("kind", "schema"), [*((kind, CARD) for kind in OWN_FORMATS), ("hermes", {"type": "object"}), ("mistral", {})]
)
def test_whatever_is_written_beside_tools_is_calls_or_validates(
    compiler: Compiler, tokenizer: Tokenizer, kind: str, schema: dict[str, Any]
) -> None:
    reading = reading_of(tokenizer, kind, tools=TOOLS[:1], **wanting(schema))
    assert reading.grammar is not None
    compiled, reasons = compiler.compile(reading.grammar), []
    mark = ARGUMENT[kind][1] if kind in ARGUMENT else "}"
    call = tokenizer.encode_with_special(compact(kind, CALL[kind]).replace("time", "weather").partition(mark)[0])
    for seed in range(8):
        begin = call if seed % 2 else ()
        ids = write_at_random(compiled.copy(), random.Random(seed), max_tokens=250, begin=begin)
        if ids is not None:
            delta = split(reading, tokenizer, ids)
            reasons.append(delta.finish_reason)
            if not validate(delta):
                jsonschema.validate(json.loads(delta.text), schema)
    assert set(reasons) == {"stop", "tool_calls"}


def test_a_wanted_text_has_the_white_space_that_was_asked_for(compiler: Compiler, tokenizer: Tokenizer) -> None:
    wanted = {"structured_outputs": {"json": CARD, "whitespace_pattern": "[ /]?"}}
    for kind in ("llama", "hermes"):
        reading = reading_of(tokenizer, kind, **wanted)
        assert reading.grammar is not None
        matcher = compiler.compile(reading.grammar)
        cases = [CALL[kind], '{"name":/"x"}', '{"name": "x", "n": 2}']
        assert [allows(matcher.copy(), tokenizer.encode(case)) for case in cases] == [True] * 3


def test_calls_that_must_come_leave_no_place_for_a_wanted_text(tokenizer: Tokenizer) -> None:
    for kind in KINDS:
        forced = reading_of(tokenizer, kind, tool_choice="required").grammar
        assert reading_of(tokenizer, kind, tool_choice="required", **wanting()).grammar == forced


REGEX = {"structured_outputs": {"regex": "(?s:.*)"}}
LARK = {"structured_outputs": {"grammar": 'start: WORD "."\nWORD: /[a-z]+/'}}
CHOICE = {"guided_choice": ["a", "}b"]}


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [(wanting(), '{"name":"x"}', "x"), (REGEX, "<think>", None), (LARK, "ab.", "ab"), (CHOICE, "}b", "b")],
)
@pytest.mark.parametrize("kind", ["thinking", "harmony"])
def test_reasoning_comes_before_a_wanted_text(
    compiler: Compiler, tokenizer: Tokenizer, kind: str, wanted: dict[str, Any], good: str, bad: str | None
) -> None:
    fields = {"tools": None, **wanted}
    if kind == "harmony":
        reading, before = reading_of(tokenizer, kind, **fields), ANALYSIS + "<|channel|>final<|message|>"
    else:
        reading, before = reading_of(tokenizer, "hermes", "Hi<think>", think=THINK, **fields), "Hm.</think>"
    assert reading.grammar is not None
    matcher = compiler.compile(reading.grammar)
    cases = {before + good: True, good: False, **({} if bad is None else {before + bad: False})}
    assert {case: allows(matcher.copy(), tokenizer.encode_with_special(case)) for case in cases} == cases
    delta = split(reading, tokenizer, tokenizer.encode_with_special(before + good))
    assert (delta.text, delta.reasoning, delta.finish_reason) == (good, "Hm.", "stop")


def test_json_may_come_after_reasoning_that_the_prompt_has_not_opened(compiler: Compiler, tokenizer: Tokenizer) -> None:
    reading = reading_of(tokenizer, "hermes", "Hi", think=THINK, tools=None, **wanting())
    assert reading.grammar is not None
    matcher = compiler.compile(reading.grammar)
    cases = {'<think>Hm.</think>{"name":"x"}': True, '{"name":"x"}': True, "<think>": False, "Hm.": False}
    assert {case: allows(matcher.copy(), tokenizer.encode(case)) for case in cases} == cases


def test_no_reasoning_comes_before_json_where_the_prompt_has_ended_one(
    tokenizer: Tokenizer, compiler: Compiler
) -> None:
    reading = reading_of(tokenizer, "hermes", "Hi<think>\n\n</think>\n\n", think=THINK, **wanting())
    assert reading.grammar is not None
    matcher = compiler.compile(reading.grammar)
    cases = {"<think>Hm.</think>" + CALL["hermes"]: False, CALL["hermes"]: True, '{"name":"x"}': True}
    assert {case: allows(matcher.copy(), tokenizer.encode(case)) for case in cases} == cases


def test_only_what_needs_a_grammar_has_one(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]

    def grammar(**fields: Any) -> Grammar | None:
        return reading_of(tokenizer, "hermes", **fields).grammar

    assert grammar(tools=tools) is None
    assert grammar(tools=tools, tool_choice="auto", parallel_tool_calls=True) is None
    assert grammar(tools=tools, parallel_tool_calls=False) is not None
    assert grammar(tools=TOOLS) is not None


TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
UNNAMED = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "z": 2}}\n</tool_call>'


@pytest.mark.parametrize("unnamed", ["refuse", "allow"])
def test_arguments_have_no_other_names_unless_an_operator_allows_them(
    compiler: Compiler, tokenizer: Tokenizer, unnamed: UnnamedProperties
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": OPEN}}]
    for kind, text in (("hermes", UNNAMED), ("harmony", f'{TO_F}{{"a": 1, "z": 2}}')):
        reading = reading_of(tokenizer, kind, unnamed=unnamed, tools=tools, tool_choice="required")
        assert reading.grammar is not None
        allowed = [
            allows(compiler.compile(reading.grammar), tokenizer.encode_with_special(case))
            for case in (text, text.replace(', "z": 2', ""))
        ]
        assert allowed == [unnamed == "allow", True]


def test_parameters_that_cannot_be_followed_name_the_function(tokenizer: Tokenizer) -> None:
    parameters = {"properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidRequestError) as caught:
        reading_of(tokenizer, "hermes", tools=tools, tool_choice="required")
    assert str(caught.value).startswith(
        "the parameters of the function 'f' cannot be compiled: properties.a: oneOf is "
    )
    assert caught.value.param == "tools"

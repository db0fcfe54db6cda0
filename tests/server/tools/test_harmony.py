"""harmony's channels: what is reasoning, what is text and what is neither, however the tokens come."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.server.text.output import ChoiceOutput, Delta, join_deltas
from gptserve.server.tools.dialect import Reading
from gptserve.server.tools.harmony import MARKS, HarmonyChannels, find_marks
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.server.fake_engine import EOS, ByteTokenizer

CONSTRAIN = "<|constrain|>"
TOKENIZER = ByteTokenizer(*MARKS, CONSTRAIN)
OPEN = "<|start|>assistant"


def split(text: str, prompt: str = OPEN, cuts: Sequence[int] = (), *, has_tools: bool = False) -> list[Delta]:
    """Return the deltas of an answer whose outputs end at `cuts`, and at the end of its length."""
    marks = find_marks(TOKENIZER)
    assert marks is not None
    channels = HarmonyChannels(marks).follow(TOKENIZER.encode_with_special(prompt), TOKENIZER)
    reader = Reading(None, TOKENIZER.special_ids, channels=channels, has_tools=has_tools).reader("chatcmpl-1", 0)
    choice = ChoiceOutput(TOKENIZER, channel_of=reader.channel_of)
    ids = TOKENIZER.encode_with_special(text)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [
        reader.read(
            choice.add(TokenOutput("r", tuple(ids[a:b]), finish_reason=FinishReason.LENGTH if b == edges[-1] else None))
        )
        for a, b in itertools.pairwise(edges)
        if a < b or b == edges[-1]
        if choice.finish_reason is None
    ]


def parts(text: str, prompt: str = OPEN) -> tuple[str, str]:
    whole = join_deltas(split(text, prompt))
    return whole.reasoning, whole.text


ANSWER = "<|channel|>analysis<|message|>Hm, é.<|end|><|start|>assistant<|channel|>final<|message|>Four ✓"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (ANSWER, "Hm, é.", "Four ✓"),
        ("<|channel|>final<|message|>Four", "", "Four"),
        ("<|channel|>analysis<|message|>Hm", "Hm", ""),
        ("<|channel|>anal", "", ""),
        ("<|message|>Four", "", "Four"),
        ("<|channel|>analysis <|constrain|>json<|message|>{}<|end|>", "{}", ""),
        ("<|channel|>commentary<|message|>First, I look.<|end|>" + OPEN + ANSWER, "Hm, é.", "First, I look.Four ✓"),
        ("<|channel|>analysis<|message|>a<|end|>stray" + OPEN + ANSWER, "aHm, é.", "strayFour ✓"),
        ("<|channel|>analysis to=python<|message|>1+1<|end|><|message|>2", "1+1", "2"),
        ("<|channel|>analysis2<|message|>no such channel", "", "no such channel"),
        ("<|channel|>" + "x" * 200 + " analysis<|message|>a", "", "a"),
    ],
)
def test_analysis_is_reasoning_and_the_rest_is_text(text: str, reasoning: str, content: str) -> None:
    assert parts(text) == (reasoning, content)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", ("", "")),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm", ("text", "")),
        (OPEN + "<|channel|>analysis<|message|>Hm<|end|>" + OPEN + "<|channel|>final<|message|>F", ("", "text")),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm<|end|>", ("", "text")),
        ("User: Hi\nAssistant:", ("", "text")),
        ("", ("", "text")),
    ],
)
def test_an_answer_goes_on_where_the_prompt_leaves_off(prompt: str, expected: tuple[str, str]) -> None:
    assert parts("text", prompt) == expected


@given(
    st.lists(
        st.sampled_from([*MARKS, CONSTRAIN, "analysis", "final", " to=functions.f", "é✓", "a", " "]), max_size=20
    ).map("".join),
    st.lists(st.integers(0, 100), max_size=10),
    st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_however_it_is_cut(text: str, cuts: list[int], has_tools: bool) -> None:
    assert join_deltas(split(text, cuts=cuts, has_tools=has_tools)) == join_deltas(split(text, has_tools=has_tools))


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", [("f", "{}")], ""),
        (" to=functions.f<|channel|>commentary json<|message|>{<|constrain|>}<|end|>a", [("f", "{}")], "a"),
        ("<|channel|>analysis to=functions.a.b-c<|message|>é" + OPEN + ANSWER, [("a.b-c", "é")], "Four ✓"),
        ("<|channel|>commentary to=functions.f<|message|>1<|message|>2", [("f", "1")], "2"),
        ("<|channel|>commentary to=functions.f<|message|>", [("f", "")], ""),
        ("<|channel|>commentary to=python<|message|>1", [], "1"),
        ("<|channel|>commentary to=functions.<|message|>1", [], "1"),
        ("<|channel|>commentary to=functions.f", [], ""),
        ("<|channel|>final<|message|>to=functions.f", [], "to=functions.f"),
    ],
)
def test_messages_to_functions_are_calls(text: str, calls: list[tuple[str, str]], content: str) -> None:
    whole = join_deltas(split(text, has_tools=True))
    assert ([(call.name, call.arguments) for call in whole.tool_calls], whole.text) == (calls, content)
    without = join_deltas(split(text))
    assert without.tool_calls == ()
    assert all(arguments in without.text + without.reasoning for _, arguments in calls if arguments != "{}")


def test_a_call_may_end_within_a_character() -> None:
    ids = TOKENIZER.encode_with_special(OPEN + "<|channel|>commentary to=functions.f<|message|>é")[:-1]
    text = [*ids[len(TOKENIZER.encode_with_special(OPEN)) :]]
    marks = find_marks(TOKENIZER)
    assert marks is not None
    reader = Reading(None, TOKENIZER.special_ids, channels=HarmonyChannels(marks), has_tools=True).reader("c", 0)
    choice = ChoiceOutput(TOKENIZER, channel_of=reader.channel_of)
    delta = reader.read(choice.add(TokenOutput("r", tuple(text), finish_reason=FinishReason.LENGTH)))
    assert [call.arguments for call in delta.tool_calls] == ["\ufffd"]


class PieceTokenizer:
    """Token i is the i-th of the pieces given."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


@given(st.lists(st.sampled_from([*MARKS, "analysis", "final", "é✓", "a", " "]), max_size=20), st.data())
def test_it_does_not_matter_how_the_bytes_between_marks_are_cut_into_tokens(
    texts: list[str], data: st.DataObject
) -> None:
    pieces: list[bytes] = []
    for text in texts:
        cuts = [] if text in MARKS else data.draw(st.lists(st.integers(0, len(text.encode())), max_size=3))
        edges = [0, *sorted(cuts), len(text.encode())]
        pieces += [text.encode()[a:b] for a, b in itertools.pairwise(edges)]
    marks = {i: mark for i, piece in enumerate(pieces) for mark in MARKS if piece == mark.encode()}
    tokenizer = PieceTokenizer(pieces)
    choice = ChoiceOutput(tokenizer, channel_of=HarmonyChannels(marks).channel_of)
    whole = choice.add(TokenOutput("r", tuple(range(len(pieces))), finish_reason=FinishReason.LENGTH))
    assert (whole.reasoning, whole.text) == parts("".join(texts), "")


def test_the_text_of_a_mark_is_no_mark() -> None:
    ids = TOKENIZER.encode("<|end|>")
    marks = find_marks(TOKENIZER)
    assert marks is not None
    channels = HarmonyChannels(marks)
    assert [channels.channel_of(token_id, bytes([token_id])) for token_id in ids] == ["text"] * 7


def test_marks_are_found_by_their_ids() -> None:
    assert find_marks(TOKENIZER) == {EOS + 1 + i: mark for i, mark in enumerate(MARKS)}


def test_marks_are_found_in_a_models_own_vocabulary(storyteller: Path, tmp_path: Path) -> None:
    saved = json.loads((storyteller / "tokenizer.json").read_text(encoding="utf-8"))
    first = Tokenizer.open(storyteller).vocab_size
    ids = range(first, first + len(MARKS))
    saved["added_tokens"] += [{"id": i, "content": mark, "special": True} for i, mark in zip(ids, MARKS, strict=True)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    assert find_marks(Tokenizer.open(tmp_path)) == dict(zip(ids, MARKS, strict=True))
    assert find_marks(Tokenizer.open(storyteller)) is None


@pytest.mark.parametrize("special", [(), MARKS[:3], ("<|im_start|>", "<|im_end|>")])
def test_a_vocabulary_without_all_the_marks_has_no_channels(special: tuple[str, ...]) -> None:
    assert find_marks(ByteTokenizer(*special)) is None


def test_marks_that_plain_text_gives_are_none() -> None:
    class PlainTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return self.encode_with_special(text)

    assert find_marks(PlainTokenizer(*MARKS)) is None

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gptserve.engine.request import FinishReason, TokenLogprobs, TokenOutput
from gptserve.server.text.output import (
    Channel,
    ChoiceOutput,
    Delta,
    Detokenizer,
    RankedToken,
    TokenScore,
    join_deltas,
    token_name,
)
from gptserve.server.text.stop import StopAutomaton, StopStrings
from tests.server.fake_engine import EOS, ByteTokenizer

# Bytes that begin, continue and break characters of every length come up often.
UTF8_PIECES = st.sampled_from(["a", "é", "✓", "😀", "�"]).map(str.encode)
BYTES = st.lists(st.one_of(UTF8_PIECES, st.binary(max_size=3)), max_size=8).map(b"".join)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def naive_cut(text: str, stops: Sequence[str], first: int = 1, *, includes: bool = False) -> tuple[str, str | None]:
    """Search the text so far after each character from the `first`; the longest stop string that ends there wins."""
    for end in range(first, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if includes else end - len(longest)], longest
    return text, None


class PieceTokenizer:
    """Token i is the i-th of the pieces given."""

    max_token_bytes = 100

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def output(*token_ids: int, **fields: object) -> TokenOutput:
    return TokenOutput("r", token_ids, **fields)


def feed_all(choice: ChoiceOutput, token_ids: Sequence[int], finish: FinishReason = FinishReason.LENGTH) -> list[Delta]:
    """Feed one token an output, the last with `finish`, until the choice has ended."""
    deltas = []
    for i, token_id in enumerate(token_ids):
        is_last = i == len(token_ids) - 1
        deltas.append(choice.add(output(token_id, finish_reason=finish if is_last else None)))
        if choice.finish_reason is not None:
            break
    return deltas


@given(BYTES, st.lists(st.integers(0, 40), max_size=8))
def test_text_is_that_of_decoding_all_at_once(data: bytes, cuts: list[int]) -> None:
    detokenizer = Detokenizer()
    pieces = [detokenizer.decode(piece) for piece in split(data, cuts)]
    assert "".join(pieces) + detokenizer.decode(b"", True) == data.decode(errors="replace")


@given(st.text(max_size=8), st.lists(st.integers(0, 40), max_size=8))
def test_valid_text_never_shows_a_replacement_character_of_its_own(text: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer()
    pieces = [detokenizer.decode(piece) for piece in split(text.encode(), cuts)]
    assert "".join(pieces) == text
    assert detokenizer.decode(b"", True) == ""


def test_bytes_that_can_never_become_a_character_are_not_held_back() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.decode(b"\xe2\x9c") == ""
    assert detokenizer.decode(b"a") == "�a"


@given(st.text("ab", max_size=14), STOPS, st.lists(st.integers(0, 14), max_size=6))
@example("abb", ["aba", "b"], [])  # one ends within the beginning of another
@example("aabb", ["aaba", "ab"], [1, 2, 3])
def test_stop_strings_equal_the_search_of_the_whole_text_for_every_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stop_strings = StopStrings(StopAutomaton(stops))
    shown, given_so_far = "", ""
    for piece in map(bytes.decode, split(text.encode(), cuts)):
        shown += stop_strings.feed(piece)
        given_so_far += piece
        if stop_strings.matched is not None:
            break
        starts = [
            length
            for length in range(len(given_so_far) + 1)
            if any(stop.startswith(given_so_far[len(given_so_far) - length :]) for stop in stops)
        ]
        held = max(starts, default=0)
        assert shown == given_so_far[: len(given_so_far) - held], "exactly what may start a stop string is held back"
    else:
        shown += stop_strings.flush()
    assert (shown, stop_strings.matched) == naive_cut(text, stops)


@given(st.text("ab", max_size=14), STOPS, st.integers(0, 14), st.booleans())
def test_stop_strings_that_end_too_early_are_text(text: str, stops: list[str], min_tokens: int, includes: bool) -> None:
    patterns = StopAutomaton(stops)
    choice = ChoiceOutput(ByteTokenizer(), stop=patterns, min_tokens=min_tokens, includes_stop=includes)
    whole = join_deltas(feed_all(choice, text.encode()) or [Delta("")])
    assert (whole.text, whole.stop_reason) == naive_cut(text, stops, min_tokens + 1, includes=includes)


def test_a_stop_string_that_is_included_is_not_held_back() -> None:
    choice = ChoiceOutput(ByteTokenizer(), stop=StopAutomaton(["END"]), includes_stop=True)
    assert [choice.add(output(token_id)).text for token_id in b"aEN"] == ["a", "E", "N"]
    assert choice.add(output(*b"Dx")) == Delta("D", None, "stop", "END")


def test_a_stop_token_that_is_included_has_its_text_unless_it_is_special() -> None:
    for stop_token_id, skip, text in ((98, (), "ab"), (EOS, (EOS,), "a"), (EOS, (), "a<|endoftext|>")):
        choice = ChoiceOutput(ByteTokenizer(), stop_token_ids=(98, EOS), includes_stop=True, skip=skip)
        delta = choice.add(output(97, stop_token_id, finish_reason=FinishReason.STOP, stop_token_id=stop_token_id))
        assert delta == Delta(text, None, "stop", stop_token_id)


def test_token_ids_are_those_that_count() -> None:
    choice = ChoiceOutput(ByteTokenizer(), stop=StopAutomaton(["ND"]), returned_prompt=(1, 2))
    assert choice.add(output(0xC3)) == Delta("", token_ids=(0xC3,), prompt_token_ids=(1, 2))
    deltas = [choice.add(output(*b"\xa9EN")), choice.add(output(*b"Dxy"))]
    assert [delta.token_ids for delta in deltas] == [tuple(b"\xa9EN"), tuple(b"D")]
    assert not any(delta.is_empty or delta.prompt_token_ids for delta in deltas)
    assert choice.num_tokens == 5


def test_logprobs_may_name_tokens_by_their_ids() -> None:
    choice = ChoiceOutput(ByteTokenizer(), logprobs=1, names_ids=True, echo=(0xC3,))
    delta = choice.add(output(0xA9, logprobs=(TokenLogprobs(0xA9, -1.0, 2, ((98, -0.5),)),)))
    assert delta.text == "é"
    assert delta.logprobs == [
        TokenScore(b"token_id:195", 0, None, ()),
        TokenScore(b"token_id:169", 0, -1.0, ((b"token_id:98", -0.5),)),
    ]


def test_the_naive_search_finds_what_ends_first() -> None:
    assert naive_cut("xabcd", ["abcd", "c"]) == ("xab", "c")
    assert naive_cut("xabc", ["bc", "abc", "c"]) == ("x", "abc")


@given(BYTES, st.lists(st.integers(0, 40), max_size=8), st.lists(st.sampled_from(["a", "é✓", "�", "😀a"]), max_size=3))
def test_a_choice_is_the_same_however_its_bytes_are_split_into_tokens(
    data: bytes, cuts: list[int], stops: list[str]
) -> None:
    pieces = split(data, cuts)
    choice = ChoiceOutput(PieceTokenizer(pieces), stop=StopAutomaton(stops))
    whole = join_deltas(feed_all(choice, range(len(pieces))))
    text, matched = naive_cut(data.decode(errors="replace"), stops)
    assert whole == Delta(text, None, "length" if matched is None else "stop", matched)


@pytest.mark.parametrize("num_per_output", [1, 2, 5])
def test_a_choice_is_the_same_however_its_tokens_are_split_into_outputs(num_per_output: int) -> None:
    choice = ChoiceOutput(ByteTokenizer(), stop=StopAutomaton(["ND"]), logprobs=20)
    ids = list(b"abENDxyz")
    deltas = []
    for i in range(0, len(ids), num_per_output):
        group = ids[i : i + num_per_output]
        deltas.append(choice.add(output(*group, logprobs=tuple(TokenLogprobs(t, -0.5, 1) for t in group))))
        if choice.finish_reason:
            break
    whole = join_deltas(deltas)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("abE", "stop", "ND")
    assert choice.num_tokens == 5
    assert whole.logprobs is not None
    assert [score.data for score in whole.logprobs] == [b"a", b"b", b"E", b"N", b"D"]


def test_a_choice_without_text_yet_is_an_empty_delta() -> None:
    choice = ChoiceOutput(ByteTokenizer())
    assert choice.add(output(0xC3)).is_empty
    assert choice.add(output(0xA9)) == Delta("é")


def test_scores_of_a_prompt_come_even_if_there_is_no_text_yet() -> None:
    choice = ChoiceOutput(ByteTokenizer(), prompt_logprobs=0)
    assert not choice.add(replace(output(0xC3), prompt_logprobs=(None,))).is_empty


def test_the_end_of_text_has_no_text_but_counts() -> None:
    choice = ChoiceOutput(ByteTokenizer(), logprobs=20)
    entries = (TokenLogprobs(97, -1.0, 2), TokenLogprobs(EOS, -2.0, 3))
    delta = choice.add(
        output(97, EOS, finish_reason=FinishReason.STOP, stop_token_id=EOS, logprobs=entries),
    )
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", None)
    assert choice.num_tokens == 2
    assert delta.logprobs is not None
    assert [(score.data, score.offset) for score in delta.logprobs] == [(b"a", 0), (b"<|endoftext|>", 1)]


def test_a_requested_stop_token_is_named_and_has_no_text() -> None:
    choice = ChoiceOutput(ByteTokenizer(), stop_token_ids=(98,))
    delta = choice.add(output(97, 98, finish_reason=FinishReason.STOP, stop_token_id=98))
    assert delta == Delta("a", None, "stop", 98)


def test_what_was_held_back_comes_out_at_the_end() -> None:
    choice = ChoiceOutput(ByteTokenizer(), stop=StopAutomaton(["END"]))
    assert choice.add(output(*b"aE")) == Delta("a")
    assert choice.add(output(*b"N", finish_reason=FinishReason.LENGTH)) == Delta("EN", None, "length")


def test_an_unfinished_character_becomes_a_replacement_character_only_at_the_end() -> None:
    choice = ChoiceOutput(ByteTokenizer())
    assert choice.add(output(0xE2, 0x9C)).text == ""
    assert choice.add(output(0x93, 0xE2, finish_reason=FinishReason.LENGTH)).text == "✓�"


def test_stop_strings_are_not_looked_for_in_the_echo() -> None:
    choice = ChoiceOutput(ByteTokenizer(), stop=StopAutomaton(["ab"]), echo=tuple(b"xaby"))
    assert choice.add(output(*b"zab")) == Delta("xabyz", None, "stop", "ab")


def test_a_character_may_begin_in_the_echoed_prompt_and_end_in_the_completion() -> None:
    choice = ChoiceOutput(ByteTokenizer(), logprobs=20, echo=(97, 0xC3))
    delta = choice.add(
        output(
            0xA9,
            finish_reason=FinishReason.LENGTH,
            logprobs=(TokenLogprobs(0xA9, -1.0, 2),),
            prompt_logprobs=(None, TokenLogprobs(0xC3, -2.0, 3)),
        )
    )
    assert delta.text == "aé"
    assert delta.logprobs is not None
    assert delta.logprobs == [
        TokenScore(b"a", 0, None, ()),
        TokenScore(b"\xc3", 1, -2.0, ()),
        TokenScore(b"\xa9", 1, -1.0, ()),
    ]


def test_logprobs_have_no_infinity() -> None:
    choice = ChoiceOutput(ByteTokenizer(), logprobs=20)
    infinity = float("inf")
    entry = TokenLogprobs(97, -infinity, 9, ((98, -0.25), (99, -infinity)))
    delta = choice.add(output(97, logprobs=(entry,)))
    assert delta.logprobs == [TokenScore(b"a", 0, -9999.0, ((b"b", -0.25), (b"c", -9999.0)))]


def test_a_prompts_tokens_are_ranked_equals_alike() -> None:
    choice = ChoiceOutput(ByteTokenizer(), prompt_logprobs=3)
    infinity = float("inf")
    entries = (
        None,
        TokenLogprobs(97, -1.0, 2, ((98, -0.5), (97, -1.0), (99, -1.0), (100, -2.0))),
        TokenLogprobs(101, -infinity, 257, ((98, -0.5), (99, -infinity))),
    )
    delta = choice.add(output(97, prompt_logprobs=entries))
    assert delta.prompt_logprobs is not None
    assert list(delta.prompt_logprobs.ranked()) == [
        None,
        [RankedToken(97, b"a", -1.0, 2), RankedToken(98, b"b", -0.5, 1), RankedToken(99, b"c", -1.0, 2)],
        [RankedToken(101, b"e", -9999.0, 257), RankedToken(98, b"b", -0.5, 1), RankedToken(99, b"c", -9999.0, 2)],
    ]
    assert choice.add(output(98)).prompt_logprobs is None


@pytest.mark.parametrize("num_with_the_token", [0, 2])
def test_the_scores_of_a_prompt_may_come_in_pieces_before_its_first_token(num_with_the_token: int) -> None:
    prompt = (97, 0xC3, 0xA9, 98)
    entries = (None, *(TokenLogprobs(token_id, -1.0, 1, ((token_id, -1.0),)) for token_id in prompt[1:]))
    params: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 1, "echo": prompt}
    pieces = ChoiceOutput(ByteTokenizer(), **params)
    early, late = entries[: len(entries) - num_with_the_token], entries[len(entries) - num_with_the_token :]
    for entry in early:
        assert pieces.add(output(prompt_logprobs=(entry,))) == Delta("")
    last = output(99, logprobs=(TokenLogprobs(99, -2.0, 1),))
    delta = pieces.add(replace(last, prompt_logprobs=late) if late else last)
    at_once = ChoiceOutput(ByteTokenizer(), **params).add(replace(last, prompt_logprobs=entries))
    assert (delta.text, delta.logprobs) == (at_once.text, at_once.logprobs) == ("aébc", delta.logprobs)
    assert delta.prompt_logprobs is not None
    assert at_once.prompt_logprobs is not None
    assert list(delta.prompt_logprobs.ranked()) == list(at_once.prompt_logprobs.ranked())
    assert delta.num_entries == 2 * len(prompt) + 1


def test_an_echo_alone_leaves_out_what_was_generated() -> None:
    choice = ChoiceOutput(ByteTokenizer(), logprobs=0, echo=(97, 0xC3), generates=False)
    entry = TokenLogprobs(0xA9, -1.0, 2)
    scored = (None, TokenLogprobs(0xC3, -2.0, 3))
    delta = choice.add(output(0xA9, logprobs=(entry,), prompt_logprobs=scored, stop_token_id=0xA9))
    assert (delta.text, delta.finish_reason, delta.stop_reason, choice.num_tokens) == ("a\ufffd", "length", None, 0)
    assert delta.logprobs == [TokenScore(b"a", 0, None, ()), TokenScore(b"\xc3", 1, -2.0, ())]


def test_an_echo_alone_whose_time_is_up_says_so() -> None:
    choice = ChoiceOutput(ByteTokenizer(), logprobs=0, echo=(97,), generates=False)
    delta = choice.add(output(finish_reason=FinishReason.TIMEOUT))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "length", "timeout"), (
        "its prompt has no scores, as nothing was computed"
    )


def in_channels(token_id: int, _data: bytes) -> Channel | None:
    """Put capitals into the reasoning, digits nowhere and the rest into the text."""
    char = chr(token_id)
    return "reasoning" if char.isupper() else None if char.isdigit() else "text"


@pytest.mark.parametrize("num_per_output", [1, 2, 20])
def test_reasoning_and_text_are_told_apart_however_the_tokens_are_split(num_per_output: int) -> None:
    choice = ChoiceOutput(ByteTokenizer(), stop=StopAutomaton(["cd", "AB"]), channel_of=in_channels)
    ids = list(b"1AB2a3C4bcXYdef")
    deltas = []
    for i in range(0, len(ids), num_per_output):
        deltas.append(choice.add(output(*ids[i : i + num_per_output])))
        if choice.finish_reason:
            break
    whole = join_deltas(deltas)
    assert whole == Delta("ab", None, "stop", "cd", "ABCXY"), "stop strings are looked for in the text alone"
    assert choice.num_tokens == 13


def test_no_character_goes_across_channels() -> None:
    channels: dict[int, Channel | None] = {0xE2: "reasoning", 0x9C: None, 0x93: "text"}
    choice = ChoiceOutput(ByteTokenizer(), channel_of=lambda token_id, _: channels[token_id])
    delta = choice.add(output(0xE2, 0x9C, 0x93, finish_reason=FinishReason.LENGTH))
    assert (delta.reasoning, delta.text) == ("\ufffd", "\ufffd")


@pytest.mark.parametrize(
    ("data", "name"),
    [(b" the", " the"), ("✓".encode(), "✓"), (b"\xe2\x9c", "bytes:\\xe2\\x9c"), (b" \xf0\x9f", "bytes: \\xf0\\x9f")],
)
def test_tokens_that_are_not_whole_utf8_are_named_by_their_bytes(data: bytes, name: str) -> None:
    assert token_name(data) == name


def test_out_of_time_a_choice_ends_with_all_that_was_held_back() -> None:
    choice = ChoiceOutput(ByteTokenizer(), stop=StopAutomaton(["END"]))
    assert choice.add(output(*b"aEN", 0xE2)) == Delta("a")
    assert choice.add(output(finish_reason=FinishReason.TIMEOUT)) == Delta("EN�", None, "length", "timeout")

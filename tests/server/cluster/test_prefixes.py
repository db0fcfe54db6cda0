"""A prompt goes to the replica that had its beginning, as long as that one is not much busier than others."""

from __future__ import annotations

from gptserve.engine.request import Request, SamplingParams
from gptserve.server.cluster.prefixes import NUM_TOKENS, SLACK, beginning, ranked

NAMES = ["a", "b", "c", "d"]
IDLE = [0] * len(NAMES)


def head(*tokens: int, salt: str = "") -> bytes:
    return beginning(("client", [Request("id", tokens, SamplingParams(max_tokens=1), 0, cache_salt=salt)]))


def test_prompts_that_begin_alike_go_to_one_replica_and_others_to_all() -> None:
    same = tuple(range(NUM_TOKENS))
    assert head(*same, 1) == head(*same, 2) != head(*same, salt="other")
    assert {ranked(head(i), NAMES, IDLE)[0] for i in range(64)} == set(range(len(NAMES)))


def test_a_replica_that_goes_moves_only_its_own_prompts() -> None:
    heads = [head(i) for i in range(64)]
    before = [NAMES[ranked(each, NAMES, IDLE)[0]] for each in heads]
    after = [NAMES[ranked(each, NAMES[:-1], IDLE[:-1])[0]] for each in heads]
    assert {old for old, new in zip(before, after, strict=True) if old != new} == {NAMES[-1]}


def test_a_replica_that_is_much_busier_comes_last_and_calls_without_a_prompt_go_to_the_idlest() -> None:
    first, *others = ranked(head(1), NAMES, IDLE)
    busy = [SLACK + (i == first) for i in range(len(NAMES))]
    assert ranked(head(1), NAMES, busy)[0] == first
    busy = [(SLACK + 1) * (i == first) for i in range(len(NAMES))]
    assert ranked(head(1), NAMES, busy) == [*others, first]
    assert ranked(beginning(()), NAMES, [3, 1, 2, 5]) == [1, 2, 0, 3]
    assert ranked(beginning(()), [], []) == []

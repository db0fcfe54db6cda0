"""What may come next by a grammar: the matcher of one sequence.

A matcher has seen tokens of the completion. It is brought up to the known ones before each step, so it needs no word of
preemption, rejected drafts or replay. Torch-free. runner/masks.py asks all matchers of a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.uint32]
"""A bit for each token id, the lowest id in the lowest bit."""

MAX_REASON = 500  # characters
_EXCERPT = re.compile(r"^ *\d+ \|", re.MULTILINE)  # of the Lark that the compiler has made
_SPECIAL = re.compile(rb"\xff(?:\[(\d+)\])?")  # llguidance writes a special token as these bytes
_MAX_TOKEN_BYTES = 32  # a guess: of a forced text so much a token is cut into tokens


class Matcher:
    """Follows one completion. `forced` is for the thread that schedules, `masks` for the thread of masks.

    `fault` is llguidance's reason once it has given up, as it does at its limits; then nothing is allowed any more.

    Copies of an LLMatcher share one lexer, and with it the limit of its states and what a panic breaks. A matcher that
    fails goes on once with a lexer of its own, which `renew` makes: the fault may be another sequence's.

    `forcing` has the same grammar. Only it computes forced texts: afterwards a matcher expects them, and its masks
    leave out special tokens. In some grammars it panics. So it must be compiled apart from `matcher`, not copied.

    Without `rolls_back` a draft is followed by a copy: llguidance takes no token back where a grammar in Lark counts
    the tokens of a text (`max_tokens`) or ends it at another (`stop`).
    """

    def __init__(
        self,
        matcher: LLMatcher,
        forcing: LLMatcher,
        renew: Callable[[], LLMatcher],
        tokenizer: LLTokenizer,
        eos_token_ids: Sequence[int],
        *,
        rolls_back: bool,
    ) -> None:
        self._matcher = matcher
        self._forcing = forcing
        self._renew = renew
        self._rolls_back = rolls_back
        self._is_alone = False  # has a lexer of its own
        self._tokenizer = tokenizer
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._eos_token_ids = tuple(eos_token_ids)
        self._eos: Mask = np.zeros(self._num_words, np.uint32)
        for token_id in eos_token_ids:
            self._eos[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        self._num_seen = 0
        self._num_forcing_seen = 0

    @property
    def fault(self) -> str:
        """Why nothing is allowed any more; "" while it works."""
        return reason_of(self._matcher)

    def copy(self) -> Matcher:
        """Return a matcher that has seen no token; this one must not have seen any, either."""
        assert self._num_seen == self._num_forcing_seen == 0
        copies = self._matcher.deep_copy(), self._forcing.deep_copy()
        return Matcher(*copies, self._renew, self._tokenizer, self._eos_token_ids, rolls_back=self._rolls_back)

    def works(self) -> bool:
        """Whether copies can begin: whether no sequence has broken the lexer that they would share."""
        probe = self._matcher.deep_copy()
        probe.compute_bitmask()
        return not probe.is_error()

    def forced(self, known: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to max_tokens of the only text that may come after the `known` tokens, in its longest tokens.

        Nothing if llguidance cannot tell.
        """
        self._forcing.consume_tokens(list(known[self._num_forcing_seen :]))
        self._num_forcing_seen = len(known)
        text = self._forcing.compute_ff_bytes()[: max_tokens * _MAX_TOKEN_BYTES]
        token_ids: list[int] = []
        while text and len(token_ids) < max_tokens:
            special = _SPECIAL.search(text)
            plain = text if special is None else text[: special.start()]
            token_ids += self._tokenizer.greedy_tokenize(plain.decode(errors="ignore"))
            if special is None or special[1] is None:
                break
            token_ids.append(int(special[1]))
            text = text[special.end() :]
        return token_ids[:max_tokens]

    def masks(self, known: Sequence[int], draft: Sequence[int], num_before_end: int) -> list[Mask]:
        """Return what may come after the `known` tokens of the completion, then what after each token of the draft.

        Among the first num_before_end tokens there is no end of text where the grammar allows anything else. After a
        token of the draft that may not come, nothing may.
        """
        rows = self._masks(known, draft, num_before_end)
        if self._matcher.is_error() and not self._is_alone:
            self._matcher, self._num_seen, self._is_alone = self._renew(), 0, True
            rows = self._masks(known, draft, num_before_end)
        return list(rows)

    def _masks(self, known: Sequence[int], draft: Sequence[int], num_before_end: int) -> NDArray[np.uint32]:
        rows: NDArray[np.uint32] = np.zeros((1 + len(draft), self._num_words), np.uint32)
        self._matcher.consume_tokens(list(known[self._num_seen :]))
        self._num_seen = len(known)
        follower = self._matcher if self._rolls_back or not draft else self._matcher.deep_copy()
        num_drafted = 0
        for row, drafted in zip(rows, (*draft, None), strict=True):
            self._fill(follower, row, may_end=self._num_seen + num_drafted >= num_before_end)
            if drafted is None or drafted in self._eos_token_ids or not row[drafted >> 5] >> (drafted & 31) & 1:
                break
            follower.consume_token(drafted)
            num_drafted += 1
        if follower.is_error():
            self._matcher = follower
        elif num_drafted and self._rolls_back:
            self._matcher.rollback(num_drafted)
        return rows

    def _fill(self, follower: LLMatcher, row: Mask, *, may_end: bool) -> None:
        follower.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if follower.is_error():
            row[:] = 0
        elif not may_end and (row & ~self._eos).any():
            row &= ~self._eos


def reason_of(matcher: LLMatcher) -> str:
    """Return why a matcher has failed, in one line; "" if it has not."""
    told = _EXCERPT.split(matcher.get_error())[0].replace("<non-verbose/>", "")
    return " ".join(told.split())[:MAX_REASON]

"""What enters and leaves the engine: requests in, token outputs out.

Everything here is torch-free and made of numbers, so that it can be pickled between processes; all but TokenOutput is
frozen. There is no text. The server builds a Request; the engine answers with TokenOutputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from types import NoneType

from gptserve.engine.blame import NO_BLAME, Blame
from gptserve.engine.checks import as_token_ids, check_biases, check_length, check_number, check_range, check_type
from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.info import EngineInfo

MAX_LOGPROBS = 20  # vLLM's default; each costs a top-k over the vocabulary, and the output takes ten times the bytes
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128  # these are gone through for every token
MASKS = ("allowed_token_ids", "bad_words", "grammar", "min_tokens")  # the fields of SamplingParams that rule tokens out
MAX_SCORES_PER_OUTPUT = 64  # prompt tokens; with 20 alternatives each the server needs some milliseconds to render them
MAX_CHOICE_INDEX = 2**31 - 1
_MIN_TEMPERATURE = 1e-6
SEED_LIMIT = 2**64  # the noise takes 64 bits; the server maps the negative seeds of its clients to the upper half
DRAWN_SEED_LIMIT = 2**53  # a drawn seed stays exact in JavaScript
RANGES: Mapping[str, tuple[float, float | None]] = {
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "temperature": (0.0, 2.0),
    "top_k": (0, None),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
"""The least and the greatest value of sampling parameters; top_p must be greater than its least one."""
_WHOLE = frozenset({"max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs"})
_OPTIONAL = frozenset({"logprobs", "prompt_logprobs"})


class FinishReason(StrEnum):
    """Why a request ended. Each request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"  # its client's deadline passed
    QUEUE_TIMEOUT = "queue_timeout"  # it waited too long to be admitted


def too_long(num_tokens: int, fault: str = "The prompt") -> str:
    """Return the beginning of a message about a context of num_tokens; client libraries look for these words."""
    return f"{fault} is too long. This model's maximum context length is {num_tokens} tokens"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. A value of a wrong type or out of range raises InvalidRequestError, which names the field.

    Lists of token ids become tuples.

    temperature 0 is argmax; the lowest id wins a tie. top_k 0, top_p 1 and min_p 0 turn these filters off. logprobs is
    the number of alternatives to report for each generated token (None: no logprobs; 0: only the token's own).
    prompt_logprobs is the same for the prompt's tokens. Of min_tokens tokens none ends the text, nor is in
    stop_token_ids. Of allowed_token_ids every token is one (None: of all). Each of bad_words is tokens that never come
    one after another in the completion. The completion matches the grammar, as far as it goes; min_tokens and
    ignore_eos hold off its end only where the grammar lets it go on.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in RANGES:
            check_number(name, getattr(self, name), whole=name in _WHOLE, optional=name in _OPTIONAL)
        check_type("ignore_eos", self.ignore_eos, bool, "True or False")
        check_type("grammar", self.grammar, (Grammar, NoneType), "a Grammar or None")
        check_biases("logit_bias", self.logit_bias)
        object.__setattr__(self, "stop_token_ids", as_token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", as_token_ids("allowed_token_ids", self.allowed_token_ids))
        check_type("bad_words", self.bad_words, (list, tuple), "a sequence of sequences of token ids")
        object.__setattr__(self, "bad_words", tuple(as_token_ids("bad_words", word) for word in self.bad_words))
        for name, (low, high) in RANGES.items():
            if (value := getattr(self, name)) is not None:
                check_range(name, value, low, high, open_low=name == "top_p")
        if self.min_tokens > self.max_tokens:
            rule = f"at most max_tokens, which is {self.max_tokens}"
            raise InvalidRequestError(f"min_tokens must be {rule}, got {self.min_tokens}", param="min_tokens")
        check_length("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS_ENTRIES)
        check_length("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        check_length("allowed_token_ids", len(self.allowed_token_ids or ()), MAX_ALLOWED_TOKEN_IDS)
        check_length("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        if self.allowed_token_ids == ():
            raise InvalidRequestError("allowed_token_ids must hold a token id, got []", param="allowed_token_ids")
        if () in self.bad_words:
            raise InvalidRequestError("bad_words must each have a token, got one without", param="bad_words")
        for token_id, bias in self.logit_bias.items():
            check_range(f"logit_bias.{token_id}", bias, -100.0, 100.0, param="logit_bias")

    @property
    def is_greedy(self) -> bool:
        """Whether each token is argmax of the adjusted logits, without a draw."""
        return self.temperature < _MIN_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties is on."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def num_before_end(self) -> int:
        """Of how many tokens none is an end of text."""
        return self.max_tokens if self.ignore_eos else self.min_tokens

    def stops_at(self, token_id: int, eos_token_ids: Collection[int]) -> bool:
        """Whether a token ends the completion whose newest token it is."""
        is_eos = token_id in eos_token_ids and (not self.ignore_eos or self.grammar is not None)
        return is_eos or token_id in self.stop_token_ids


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to compute: a function of the weights and these fields.

    Of these, request_id, priority, is_filler, blame and num_given_tokens do not change it.

    - priority: lower values run sooner; within one priority, first come, first served.
    - is_filler: it waits behind all that are none, and gives up its slot and blocks to them.
    - cache_salt: only requests with the same salt share blocks of the prefix cache.
    - generated_token_ids: the tokens that an engine generated before it died. Outputs continue after them, with the
      same tokens as that engine would have given. None of them ends the completion.
    - num_given_tokens: how many of them came with the request: no engine here has begun it for those.
    - num_scored_tokens: how many entries of prompt_logprobs that engine sent.
    - blame: the part of this request in the deaths of such engines.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    choice_index: int = 0
    priority: int = 0
    cache_salt: str = ""
    generated_token_ids: tuple[int, ...] = ()
    num_scored_tokens: int = 0
    blame: Blame = NO_BLAME
    is_filler: bool = False
    num_given_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "choice_index", "priority"):
            check_number(name, getattr(self, name), whole=True, optional=False)
        check_type("cache_salt", self.cache_salt, str, "text")
        if not 0 <= self.seed < SEED_LIMIT:
            raise InvalidRequestError(f"seed must be in [0, 2**64), got {self.seed}", param="seed")
        check_range("choice_index", self.choice_index, 0, MAX_CHOICE_INDEX)
        check_range("priority", self.priority, -(2**31), 2**31 - 1)

    @property
    def may_have_run(self) -> bool:
        """Whether an engine that died may have begun it."""
        return len(self.generated_token_ids) > self.num_given_tokens or self.blame.num_failures > 0

    def resumed(self, token_ids: Sequence[int], num_scored_tokens: int, blame: Blame) -> Request:
        """Return the request that goes on after these tokens and scores, which another engine gave."""
        return replace(
            self,
            generated_token_ids=(*self.generated_token_ids, *token_ids),
            num_scored_tokens=self.num_scored_tokens + num_scored_tokens,
            blame=blame,
        )

    def check(self, info: EngineInfo) -> None:
        """Raise InvalidRequestError unless an engine with this `info` can compute this request."""
        num_prompt, max_tokens, limit = len(self.prompt_token_ids), self.params.max_tokens, info.max_model_len
        if info.task != "generate":
            raise InvalidRequestError(f"an engine with the task {info.task} completes no prompt", param="prompt")
        if num_prompt == 0:
            raise InvalidRequestError("prompt must hold at least one token, got an empty one", param="prompt")
        if num_prompt >= limit:
            message = f"{too_long(limit)}, with a new one; the prompt has {num_prompt}"
            raise InvalidRequestError(message, param="prompt", code="context_length_exceeded")
        together = num_prompt + max_tokens
        if together > limit:
            lengths = f"the prompt has {num_prompt} and max_tokens is {max_tokens}, together {together}"
            message = f"{too_long(limit, 'max_tokens or the prompt')}; {lengths}"
            raise InvalidRequestError(message, param="max_tokens", code="context_length_exceeded")
        if len(self.generated_token_ids) >= max_tokens:
            rule = f"generated_token_ids must be fewer than max_tokens, which is {max_tokens}"
            message = f"{rule}, got {len(self.generated_token_ids)}"
            raise InvalidRequestError(message, param="generated_token_ids")
        for name, ids in (
            ("prompt", self.prompt_token_ids),
            ("generated_token_ids", self.generated_token_ids),
            ("logit_bias", self.params.logit_bias),
            ("stop_token_ids", self.params.stop_token_ids),
            ("allowed_token_ids", self.params.allowed_token_ids),
            ("bad_words", tuple(chain.from_iterable(self.params.bad_words))),
        ):
            if ids and (min(ids) < 0 or max(ids) >= info.vocab_size):
                worst = min(ids) if min(ids) < 0 else max(ids)
                message = f"{name}: token ids must be in [0, {info.vocab_size}), got {worst}"
                raise InvalidRequestError(message, param=name)
        self._check_choice(info)

    def _check_choice(self, info: EngineInfo) -> None:
        """Raise InvalidRequestError if no token may come at all, or none that ends a grammar."""
        params = self.params
        if params.grammar is not None and not info.eos_token_ids:
            message = "grammar may not be given: this model has no end of text, by which it would end"
            raise InvalidRequestError(message, param="grammar")
        if params.allowed_token_ids is None:
            return
        banned = {word[0] for word in params.bad_words if len(word) == 1}
        if params.min_tokens:
            banned.update(info.eos_token_ids, params.stop_token_ids)
        if banned.issuperset(params.allowed_token_ids):
            message = "allowed_token_ids must hold a token that bad_words and min_tokens leave"
            raise InvalidRequestError(f"{message}, got {list(params.allowed_token_ids[:8])}", param="allowed_token_ids")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability (natural; fp32 log-softmax of the raw logits) of one token and of the likeliest ones.

    `rank` is 1 plus the number of likelier tokens. `top` holds (token id, logprob), the likeliest first; among equals
    the lowest id comes first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenOutput:
    """What one step added to one request. An output with a finish_reason is the request's last.

    Nobody changes one. It is not frozen, as engine and server make one for each token: that would take five times as
    long.

    If the request asks for logprobs, there is one entry for each token id. If it asks for prompt_logprobs, they come
    before the first token, in outputs of at most MAX_SCORES_PER_OUTPUT entries: one for each prompt token, None for the
    first one. With the first token come `waits`: the seconds in the queue, and those from there to this token. They are
    of this run, not of the answer, so they are not compared. A PoolingRequest gets one output, with its vector of fp32.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    waits: tuple[float, float] | None = field(default=None, compare=False)
    vector: array[float] | None = None

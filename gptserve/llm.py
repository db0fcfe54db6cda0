"""Generation without a server: `LLM("folder or hub id").generate(["Once upon a time"], SamplingParams(max_tokens=64))`.

It resolves the model, tokenizes, steps an Engine in the calling thread and returns text. Scripts, benchmarks and
`gptserve complete --local` use it; the server does not. It stands beside the packages, as engines know no text.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any

from gptserve.engine.checks import check_number
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.errors import EngineError, InvalidRequestError
from gptserve.engine.process.loading_bar import LoadingBar
from gptserve.engine.request import DRAWN_SEED_LIMIT, FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from gptserve.scoring import Score, Windows
from gptserve.weights.chat.arguments import read_arguments
from gptserve.weights.chat.template import ChatTemplate, load_chat_template
from gptserve.weights.errors import ChatTemplateError
from gptserve.weights.generation import MAX_NEW_TOKENS, load_sampling_defaults
from gptserve.weights.source import resolve_model
from gptserve.weights.tokenizers.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages as in OpenAI's chats, each with a role and a content."""

OWN_VARIABLES = frozenset({"messages", "documents"})


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to a prompt. A stop token is in token_ids but not in text.

    `seed` and `choice_index` give the same tokens again. `error` says why a completion ended with the reason ERROR or
    QUEUE_TIMEOUT; its tokens so far are there.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    seed: int
    choice_index: int = 0
    error: str | None = None


class LLM:
    """A loaded model with its tokenizer. `options` are the fields of EngineConfig.

    Raises WeightsError or EngineError if the model cannot be loaded.
    """

    def __init__(self, model: str | Path | None = None, *, revision: str | None = None, **options: Any) -> None:
        self._folder = resolve_model(None if model is None else str(model), revision)
        self.tokenizer = Tokenizer.of_model(self._folder)
        with LoadingBar() as bar:
            self.engine = Engine(EngineConfig(model_dir=self._folder, **options), bar.show)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
    ) -> list[Completion]:
        """Return n completions of each prompt: those of the first prompt, then those of the next one, and so on.

        `params` are of all prompts, or one for each; None: the model's own defaults. Prompt i has the seed `seed + i`,
        None: one that is drawn for it. The choices of a prompt share its seed. A completion that fails has an `error`,
        and the others are whole. Raises InvalidRequestError for an invalid prompt or parameter, before anything is
        computed.
        """
        ids = [self._encode(prompt) for prompt in _listed(prompts)]
        return self._complete(ids, SamplingParams(**self._defaults) if params is None else params, n, seed)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> list[Completion]:
        """Return n answers to each conversation, as `generate` does for the prompts that the chat template makes.

        The template sees `tools` and `variables`, such as enable_thinking. With continue_final_message, which asks for
        add_generation_prompt False, the answer goes on where the last message ends. A text is as the model wrote it,
        with its calls of tools and its reasoning. Without `params` an answer may be as long as the context and the
        model's max_new_tokens allow. Raises ChatTemplateError, too.
        """
        if taken := OWN_VARIABLES & variables.keys():
            raise InvalidRequestError(f"the template's variables must not hold {min(taken)}", param=min(taken))
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message must not be true together with add_generation_prompt"
            raise InvalidRequestError(message, param="continue_final_message")
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        listed: Any = [conversations] if is_one else conversations
        texts = [
            self._chat_template.render(
                [_for_template(message) for message in messages],
                variables,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for messages in listed
        ]
        ids = [tuple(self.tokenizer.encode_with_special(text)) for text in texts]
        return self._complete(ids, [self._chat_params(len(p)) for p in ids] if params is None else params, n, seed)

    def score(
        self, texts: Prompt | Sequence[Prompt], *, window: int | None = None, stride: int | None = None
    ) -> list[Score]:
        """Return how likely each text is to the model. Text of any length is cut into windows.

        A window has at most `window` tokens (default: the most that the model takes), and the next one begins `stride`
        tokens after it (default: half a window). Raises InvalidRequestError; EngineError if a window fails.
        """
        for name, value in (("window", window), ("stride", stride)):
            check_number(name, value, whole=True, optional=True)
        limit = self.engine.info.max_model_len - 1  # the engine computes at least one token behind a prompt
        size = limit if window is None else window
        if size > limit:
            raise InvalidRequestError(f"window must be at most {limit}, got {size}", param="window")
        windows = Windows(size, max(1, size // 2) if stride is None else stride)
        parts = [list(windows.over(self._encode(text))) for text in _listed(texts)]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        requests = [Request(f"llm-{i}", ids, params, 0) for i, (ids, _) in enumerate(chain.from_iterable(parts))]
        outputs = iter(self._outputs(requests))
        return [self._score([(ids[first:], first, next(outputs)) for ids, first in cut]) for cut in parts]

    def stream(self, requests: Sequence[Request]) -> Iterator[TokenOutput]:
        """Yield the outputs of the requests as they are made. Closing the iterator aborts the requests.

        A request that `engine.abort` ends has no last output. Only one stream at a time: a second one raises
        EngineError until the first has ended.
        """
        if self.engine.has_requests:
            raise EngineError("this LLM is computing another stream: exhaust or close that first")
        live = {request.request_id for request in requests}
        try:
            for request in requests:
                self.engine.add(request)
            while self.engine.has_requests:
                for output in self.engine.step():
                    if output.finish_reason is not None:
                        live.discard(output.request_id)
                    yield output
        finally:
            for request_id in live:
                self.engine.abort(request_id)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        template = load_chat_template(self._folder)
        if template is None:
            raise ChatTemplateError("this model has no chat template: it continues text, as `generate` does")
        return template

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        """The model's own parameters of sampling."""
        return {name: value for name, value in self._of_model.items() if name != MAX_NEW_TOKENS}

    @cached_property
    def _of_model(self) -> dict[str, float]:
        return load_sampling_defaults(self._folder)

    def _chat_params(self, num_prompt_tokens: int) -> SamplingParams:
        left = max(1, self.engine.info.max_model_len - num_prompt_tokens)
        most = int(self._of_model.get(MAX_NEW_TOKENS, left))
        return SamplingParams(**self._defaults, max_tokens=min(left, most))

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt. Raises InvalidRequestError if it is neither text nor token ids."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode_with_special(prompt, template=True))
        try:
            return tuple(map(operator.index, prompt))
        except TypeError as error:
            message = f"a prompt must be text or a sequence of token ids: {error}"
            raise InvalidRequestError(message, param="prompt", code="invalid_type") from None

    def _complete(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams | Sequence[SamplingParams],
        n: int,
        seed: int | None,
    ) -> list[Completion]:
        """Compute n choices of each prompt."""
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            message = f"params must be one, or one for each of {len(prompts)} prompts, got {len(params)}"
            raise InvalidRequestError(message, param="params")
        check_number("n", n, whole=True, optional=False)
        check_number("seed", seed, whole=True, optional=True)
        if n < 1:
            raise InvalidRequestError(f"n must be at least 1, got {n}", param="n")
        requests = []
        for number, (ids, its) in enumerate(zip(prompts, params, strict=True)):
            own = secrets.randbelow(DRAWN_SEED_LIMIT) if seed is None else seed + number
            requests += [Request(f"llm-{number}-{index}", ids, its, own, index) for index in range(n)]
        outputs = self._outputs(requests)
        return [self._completion(request, its) for request, its in zip(requests, outputs, strict=True)]

    def _outputs(self, requests: Sequence[Request]) -> list[list[TokenOutput]]:
        """Return the outputs of each request. Raises InvalidRequestError before anything is computed."""
        for request in requests:
            request.check(self.engine.info)
        outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
        for output in self.stream(requests):
            outputs[output.request_id].append(output)
        return list(outputs.values())

    def _completion(self, request: Request, outputs: list[TokenOutput]) -> Completion:
        last = outputs[-1]
        assert last.finish_reason is not None, "the stream yields all outputs"
        token_ids = tuple(token for output in outputs for token in output.token_ids)
        text_ids = token_ids[:-1] if last.stop_token_id is not None else token_ids
        scores = tuple(entry for output in outputs for entry in output.prompt_logprobs or ())
        return Completion(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            text=self.tokenizer.decode(token for token in text_ids if token not in self.tokenizer.special_ids),
            finish_reason=last.finish_reason,
            logprobs=tuple(entry for output in outputs for entry in output.logprobs),
            prompt_logprobs=None if request.params.prompt_logprobs is None else scores,
            seed=request.seed,
            choice_index=request.choice_index,
            error=last.error,
        )

    def _score(self, scored: Sequence[tuple[tuple[int, ...], int, list[TokenOutput]]]) -> Score:
        """Return the score of a text from the tokens that each window scores, the index of the first, its outputs."""
        logprobs: list[float] = []
        for _, first, outputs in scored:
            if outputs[-1].error is not None:
                raise EngineError(outputs[-1].error)
            entries = [entry for output in outputs for entry in output.prompt_logprobs or ()]
            logprobs += [entry.logprob for entry in entries[first:] if entry is not None]
        num_bytes = sum(len(self.tokenizer.token_bytes(token)) for ids, _, _ in scored for token in ids)
        return Score(len(logprobs), num_bytes, math.fsum(logprobs))


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return several prompts, also where one is given."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return [prompts] if is_one else prompts  # type: ignore[list-item, return-value]


def _for_template(message: Any) -> dict[str, Any]:
    """Return a message of OpenAI's shape as chat templates want it. Raises InvalidRequestError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _wrong_message("an object with a role", message)
    given = {name: value for name, value in message.items() if value is not None}
    content = given.setdefault("content", "")
    is_parts = isinstance(content, list | tuple) and all(_is_text_part(part) for part in content)
    if not isinstance(content, str) and not is_parts:
        raise _wrong_message("one whose content is text or a list of text parts", message)
    if "tool_calls" in given:
        given["tool_calls"] = [_call_for_template(call) for call in given["tool_calls"]]
    return given


def _call_for_template(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong_message("one whose tool_calls have a function with a name", call)
    arguments = function.get("arguments")
    read = read_arguments(arguments) if isinstance(arguments, str) else arguments or {}
    return {**call, "function": {**function, "arguments": read}}


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _wrong_message(rule: str, got: object) -> InvalidRequestError:
    message = f"a message must be {rule}, got {repr(got)[:80]}"
    return InvalidRequestError(message, param="messages", code="invalid_type")

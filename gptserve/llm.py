"""Generation without a server: `LLM("folder or hub id").generate(["Once upon a time"], SamplingParams(max_tokens=64))`.

It resolves the model, tokenizes, steps an Engine in the calling thread and returns text. Scripts, benchmarks and
`gptserve complete --local` use it; the server does not. It stands beside the packages, as engines know no text.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.errors import EngineError
from gptserve.engine.model.loading_bar import LoadingBar
from gptserve.engine.request import DRAWN_SEED_LIMIT, FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from gptserve.weights.source import resolve_model
from gptserve.weights.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt. A stop token is in token_ids but not in text. The same `seed` gives the same tokens."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    seed: int


class LLM:
    """A loaded model with its tokenizer. `options` are the fields of EngineConfig.

    Raises WeightsError or EngineError if the model cannot be loaded.
    """

    def __init__(self, model: str | Path | None = None, *, revision: str | None = None, **options: Any) -> None:
        folder = resolve_model(None if model is None else str(model), revision)
        self.tokenizer = Tokenizer.of_model(folder)
        with LoadingBar() as bar:
            self.engine = Engine(EngineConfig(model_dir=folder, **options), bar.show)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
    ) -> list[Completion]:
        """Return one completion for each prompt (text or token ids), in order. All prompts share the seed.

        Raises InvalidRequestError for an invalid prompt or parameter, before anything is computed.
        """
        seed = secrets.randbelow(DRAWN_SEED_LIMIT) if seed is None else seed
        prompts = [prompts] if isinstance(prompts, str) else prompts
        ids = [tuple(self.tokenizer.encode_prompt(p) if isinstance(p, str) else p) for p in prompts]
        params = params or SamplingParams()
        requests = [Request(f"llm-{i}", prompt_ids, params, seed) for i, prompt_ids in enumerate(ids)]
        outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
        for output in self.stream(requests):
            outputs[output.request_id].append(output)
        return [self._completion(request, outputs[request.request_id]) for request in requests]

    def stream(self, requests: Sequence[Request]) -> Iterator[TokenOutput]:
        """Yield the outputs of the requests as they are made. Closing the iterator aborts the requests.

        Only one stream at a time: a second one raises EngineError until the first has ended.
        """
        if self.engine.has_requests:
            raise EngineError("this LLM is computing another stream: exhaust or close that first")
        live = {request.request_id for request in requests}
        try:
            for request in requests:
                self.engine.add(request)
            while live:
                for output in self.engine.step():
                    if output.finish_reason is not None:
                        live.discard(output.request_id)
                    yield output
        finally:
            for request_id in live:
                self.engine.abort(request_id)

    def _completion(self, request: Request, outputs: list[TokenOutput]) -> Completion:
        last = outputs[-1]
        if last.finish_reason is None or last.finish_reason is FinishReason.ERROR:
            raise EngineError(last.error or "the request ended without a reason")
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
        )

"""`gptserve complete`: the text of a completion as it is made, by a running server or in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gptserve.server.cli.errors import CommandError
from gptserve.server.cli.remote import Remote
from gptserve.server.cli.replicas import Replicas
from gptserve.server.cli.terminal import ctrl_c_kills


def ask_server(remote: Remote | Replicas, prompt: str, asked: Mapping[str, Any]) -> Iterator[str]:
    """Return the text of a completion, as it comes, from a running server; `asked` are fields of the request."""
    return (piece.text for piece in remote.stream("/v1/completions", {"prompt": prompt, **asked}))


def compute_here(model: str, prompt: str, asked: Mapping[str, Any]) -> Iterator[str]:
    """Load a model, "" for the embedded one, and yield the text of its completion; a server would give the same."""
    with ctrl_c_kills():
        from gptserve.llm import LLM
    from gptserve.engine.request import Request, SamplingParams
    from gptserve.server.schemas.seed import choose_seed, engine_seed
    from gptserve.server.text.output import ChoiceOutput
    from gptserve.server.text.stop import StopAutomaton
    from gptserve.weights.generation import load_sampling_defaults
    from gptserve.weights.source import resolve_model

    folder = resolve_model(model or None)
    sampling: dict[str, Any] = {**load_sampling_defaults(folder), **asked}
    sampling.pop("max_new_tokens", None)  # it limits answers in a chat
    stop = StopAutomaton(sampling.pop("stop", ()))
    seed = engine_seed(choose_seed(sampling.pop("seed", None)))
    params = SamplingParams(**sampling)
    llm = LLM(folder)
    choice = ChoiceOutput(llm.tokenizer, stop=stop, skip=llm.tokenizer.special_ids)
    token_ids = tuple(llm.tokenizer.encode_with_special(prompt, template=True))
    for output in llm.stream([Request("local", token_ids, params, seed)]):
        if output.error is not None:
            raise CommandError(output.error)
        yield choice.add(output).text
        if choice.finish_reason is not None:
            return

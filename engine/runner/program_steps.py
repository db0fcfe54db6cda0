"""Steps on a CPU that a program computes: all of engine/backends/cpu, from token ids to tokens.

The weights of a step evict all else from a CPU's caches. So what the host does between two steps comes from memory, and
costs by how much code and data it touches: the first call of a function of torch or numpy takes 10 to 60 us. This file
and what it calls use none of them, but where buffers grow, for masks, soft caps, logprobs and vectors of prompts; the
integers of a step are arrays of Python. ModelRunner calls it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from torch import Tensor

from gptserve.engine.backends.cpu.decoder import NativeDecoder
from gptserve.engine.backends.cpu.draw import draw
from gptserve.engine.info import EngineInfo
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.request import TokenLogprobs
from gptserve.engine.runner.kv_cache import KVCache
from gptserve.engine.runner.logprobs import reported_logprobs_at
from gptserve.engine.runner.pooling import pool_all
from gptserve.engine.runner.prompt_logprobs import prompt_logprobs
from gptserve.engine.runner.sampler import SampledTokens, sampled_tokens
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.sampling.choice import choice_at
from gptserve.weights.torch_threads import torch_threads


def program_steps(decoder: Decoder, cache: KVCache) -> ProgramSteps | None:
    """Return what computes the steps of a decoder by its program, None if it has none."""
    program = decoder.program
    return ProgramSteps(program, cache, decoder.states) if isinstance(program, NativeDecoder) else None


class ProgramSteps:
    """Computes the steps of one model; for one thread at a time."""

    def __init__(self, program: NativeDecoder, cache: KVCache, states: Callable[[Tensor], Tensor]) -> None:
        self._program, self._cache, self._states = program, cache, states

    def compute(
        self, step: StepInput, info: EngineInfo, chosen_before: Callable[[], Sequence[int]]
    ) -> tuple[array[int], SampledTokens, dict[int, list[tuple[int, TokenLogprobs]]], dict[int, array[float]]]:
        """Return the chosen ids, -1 for a row that is not finite, and the fields of a StepResult.

        Foreseen tokens are those of chosen_before.
        """
        arrays = step.arrays if min(step.arrays.token_ids) >= 0 else _known(step.arrays, chosen_before())
        logits = self._program.run(arrays, self._cache)
        positions = step.positions if step.masks is None else step.masked_positions()
        vocab_size, eos_token_ids = info.vocab_size, info.eos_token_ids
        assert len(positions) == len(arrays.sampled)
        chosen = draw(logits, [choice_at(position, vocab_size, eos_token_ids) for position in positions])
        sampled = sampled_tokens(chosen, reported_logprobs_at(logits, chosen, positions))
        scores: dict[int, list[tuple[int, TokenLogprobs]]] = {}
        for prompt in step.prompts:
            scores[prompt.sequence] = prompt_logprobs(self._program.logits, prompt)
        return chosen, sampled, scores, self._pool(step) if step.pooled else {}

    def _pool(self, step: StepInput) -> dict[int, array[float]]:
        """Return the vectors, by one thread: those of torch's pool would spin in the way of the library's team."""
        with torch_threads(1):
            hidden = self._program.hidden_states(len(step.arrays.token_ids))
            return pool_all(lambda rows: self._states(hidden[rows]), step.pooled)

    def logits(
        self, arrays: StepArrays, chosen_before: Callable[[], Sequence[int]]
    ) -> tuple[Tensor | None, Callable[[slice], Tensor], Callable[[slice], Tensor]]:
        """Compute a step; return the logits of its sampled rows, None without any, and what gives those of others.

        The last of the three gives the states of any rows.

        All are valid until the next step.
        """
        if min(arrays.token_ids) < 0:
            arrays = _known(arrays, chosen_before())
        self._program.run(arrays, self._cache)
        num_sampled = len(arrays.sampled)
        logits = self._program.sampled_logits(num_sampled) if num_sampled else None
        hidden = self._program.hidden_states(len(arrays.token_ids))
        return logits, self._program.logits, lambda rows: self._states(hidden[rows])


def _known(arrays: StepArrays, chosen: Sequence[int]) -> StepArrays:
    """Return the arrays with the ids that the step before chose.

    A row that chose none, -1, gives the id 0: what follows is void.
    """
    token_ids = [token_id if token_id >= 0 else max(0, chosen[~token_id]) for token_id in arrays.token_ids]
    return arrays._replace(token_ids=array("q", token_ids))

"""Steps on a CPU that torch has no part in: a program of engine/backends/cpu from token ids to logits, and a draw.

The weights of a step evict all else from a CPU's caches. So what the host does between two steps comes from memory, and
costs by how much code and data it touches: the first call of a function of torch or numpy takes 10 to 60 us. This file
and what it calls use none of them, but where buffers grow and for masks; the integers of a step are arrays of Python.
ModelRunner asks it first, and computes with tensors what it leaves.
"""

from __future__ import annotations

from array import array

from gptserve.engine.backends.cpu.decoder import NativeDecoder
from gptserve.engine.backends.cpu.draw import draw
from gptserve.engine.info import EngineInfo
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.runner.kv_cache import KVCache
from gptserve.engine.runner.logprobs import reported_logprobs_at
from gptserve.engine.runner.sampler import SampledTokens, sampled_tokens
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.sampling.choice import choice_at


def program_steps(decoder: Decoder, cache: KVCache, info: EngineInfo) -> ProgramSteps | None:
    """Return what computes the steps of a decoder by its program, None if it has none."""
    program = decoder.program
    return ProgramSteps(program, cache, info) if isinstance(program, NativeDecoder) else None


class ProgramSteps:
    """Computes the steps of one model; for one thread at a time."""

    def __init__(self, program: NativeDecoder, cache: KVCache, info: EngineInfo) -> None:
        self._program, self._cache, self._info = program, cache, info

    def compute(self, step: StepInput) -> tuple[array[int], SampledTokens] | None:
        """Return the chosen ids, -1 for a row that is not finite, and the `sampled` of a StepResult.

        None if the step has a foreseen token, or a prompt whose logprobs are asked for.
        """
        arrays = step.arrays
        if step.prompts or min(arrays.token_ids) < 0:
            return None
        logits = self._program.run(arrays, self._cache)
        positions = step.masked_positions()
        vocab_size, eos_token_ids = self._info.vocab_size, self._info.eos_token_ids
        assert len(positions) == len(arrays.sampled)
        chosen = draw(logits, [choice_at(position, vocab_size, eos_token_ids) for position in positions])
        return chosen, sampled_tokens(chosen, reported_logprobs_at(logits, chosen, positions))

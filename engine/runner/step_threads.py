"""How many threads each step uses: few for little work.

The team of csrc/team.cpp waits for no thread that cannot run, so CPUs that other processes keep busy are no reason for
fewer. Without a C++ compiler torch's pool computes the step, whose threads do wait for each other. Torch-free; it sets
nothing. ModelRunner asks it before every step.
"""

from __future__ import annotations

from gptserve.engine.runner.memory import feed_forward_counts, parameter_counts
from gptserve.engine.runner.step_input import StepInput
from gptserve.weights.config import Experts, ModelConfig

WORK_PER_THREAD = 150_000_000
"""Units of `StepWork` for each thread, some 1.2 ms on one. So storyteller decodes up to 32 sequences on one thread,
where a second one gained 3 to 9 % and kept another core busy. GPT-2 124M decoding one token, 3.2 billion units, may use
21 threads."""

_ROWS_OF_A_READ = 24
"""Reading a weight from memory takes as long as multiplying it with this many rows (measured: 14 to 35)."""
_ATTENTION_COST = 8
"""A multiplication in attention takes as long as 8 in packed linears."""
_DRAW_COST = 2000
"""Drawing a token takes as long as this many multiplications for each vocabulary entry, by torch: 0.6 to 1 ms for
50,257. Compiled code takes a tenth of that."""


class StepWork:
    """Estimates a step's work in multiplications of the linears, to within a factor of two."""

    def __init__(self, model: ModelConfig) -> None:
        counts = parameter_counts(model)
        self._head = counts["head"]
        if model.tied_head:
            self._head += model.vocab_size * (model.embed_size or model.hidden_size)
        self._attention_weights = counts["attention"]
        ffns = ((experts or Experts(1, 1), count) for experts, count in feed_forward_counts(model).items())
        self._ffns = [(experts.num_all, experts.num_per_row, count // experts.num_all) for experts, count in ffns]
        """How many experts, how many of them a row has, and the parameters of one, over all such layers."""
        self._attention = _ATTENTION_COST * 2 * sum(layer.q_size for layer in model.layers)
        self._draw = _DRAW_COST * model.vocab_size

    def of(self, step: StepInput) -> int:
        """Return the work of this step."""
        starts, lengths, num_tokens = step.arrays.query_starts, step.arrays.kv_lens, len(step.arrays.token_ids)
        num_logits = len(step.positions)
        if step.prompts:
            num_logits += sum([len(prompt.token_ids) for prompt in step.prompts])
        num_draws = sum([position[0].params.temperature > 0 for position in step.positions])
        if num_tokens == len(lengths):
            num_pairs = sum(lengths)
        else:
            num_pairs = sum([(starts[i + 1] - starts[i]) * length for i, length in enumerate(lengths)])
        head = self._head * (_ROWS_OF_A_READ + num_logits) if num_logits else 0
        blocks = self._attention_weights * (_ROWS_OF_A_READ + num_tokens)
        for num, num_active, size in self._ffns:
            num_read = min(num, num_active * num_tokens)  # if each row chooses others
            blocks += size * (_ROWS_OF_A_READ * num_read + num_tokens * num_active)
        return blocks + head + self._attention * num_pairs + self._draw * num_draws


def num_step_threads(work: int, max_threads: int) -> int:
    """Return how many threads, 1 to `max_threads`, a step with this work (in units of StepWork) uses."""
    return max(1, min(max_threads, work // WORK_PER_THREAD))

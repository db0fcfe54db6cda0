"""Decoding steps on a GPU as CUDA graphs: one call starts all kernels from the embedding to the logits, one those from
the logits to the tokens.

recorded_steps.py says how steps are recorded. Between the two graphs comes what depends on the requests: penalties,
bias, bans and masks. Steps with prompts or drafts are computed without graphs. Of several ranks only the first one
draws; the others replay their part of the first graph with it.

step_memory.py makes the graphs, ModelRunner asks them for logits and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from gptserve.engine.backends.fallback import warn_of_fallback
from gptserve.engine.backends.gpu.recorded_steps import (
    Capture,
    RecordedStep,
    RecordedSteps,
    Replay,
    capture_of,
    failure,
    obstacle,
)
from gptserve.engine.backends.gpu.sampler import KINDS, Kind, TritonSampler
from gptserve.engine.backends.reference.draw import Choose
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import EngineError
from gptserve.engine.model.attention import AttentionBackend, AttentionMetadata, Cache
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.group import OtherRanks
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.sampling.choice import Choice
from gptserve.weights.config import ModelConfig


class DecodeGraphs:
    """The logits and draws of decoding steps. `record` comes before all else; with ranks, they record, too."""

    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        config: EngineConfig,
        max_model_len: int,
        device: torch.device,
        sampler: TritonSampler | None = None,
        ranks: OtherRanks | None = None,
    ) -> None:
        self._sampler, self._ranks = sampler, ranks

        def compute(token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata) -> Tensor:
            return decoder.logits(decoder.hidden_states(token_ids_T, positions_T, cache, metadata))

        self._recorded = RecordedSteps(compute, cache, config, max_model_len, device)
        self._latest = self._recorded.steps[0]
        self._draws: dict[tuple[int, Kind], Replay] = {}  # by the size of the step

    def agree(self, found: str | None) -> str | None:
        """Agree on what keeps a rank from graphs."""
        return found if self._ranks is None else self._ranks.agree(found)

    def record(self, capture: Capture) -> str | None:
        """Record all; return what kept a rank from it, or None."""
        found = self._recorded.record(capture, self.agree)
        return found or self.agree(None if self._sampler is None else self._record_draws(self._sampler, capture))

    def disagreement(self, vocab_size: int) -> str | None:
        """Return in which size a graph gives other numbers or tokens than a step without it, or None.

        Call it before any sequence owns a block.
        """
        return self._recorded.disagreement(vocab_size, self.agree, self._other_draws)

    @property
    def choose(self) -> Choose | None:
        """Chooses from the logits that `logits` returned last; None without a sampler whose draws can be recorded.

        It is no attribute, as an object that holds its own method is freed only when garbage is collected.
        """
        return None if self._sampler is None else self._choose

    def logits(self, arrays: StepArrays, chosen_R: Tensor | None = None) -> Tensor:
        """Return fp32 logits of a step that decodes, a row for each sequence and then padding.

        They are valid until the next call. Foreseen tokens are taken from chosen_R, the ids of the step before.
        """
        step = self._latest = self._recorded.of(len(arrays.kv_lens))
        on_host = arrays.as_numpy()
        with nullcontext() if self._ranks is None else self._ranks.step(on_host, step.size):
            step.fill(on_host, chosen_R)
            return step.replay()

    def _choose(self, logits: Tensor, choices: Sequence[Choice]) -> Tensor:
        assert self._sampler is not None
        return self._sampler.choose(self._latest.out, choices, self._draw, self._latest.size)

    def _draw(self, logits: Tensor, kind: Kind) -> Tensor:
        """Draw for the logits of the last replay."""
        return self._draws[self._latest.size, kind]()

    def _record_draws(self, sampler: TritonSampler, capture: Capture) -> str | None:
        """Record a draw of each kind for each size; return why that failed, or None."""
        try:
            for step in self._recorded.steps:
                for kind in KINDS:
                    sampler.draw(step.out, kind)  # compiles kernels
                    self._draws[step.size, kind] = capture(partial(_drawn, sampler, step, kind))
        except Exception as error:
            return failure(error)
        return None

    def _other_draws(self, step: RecordedStep, num_rows: int) -> str | None:
        """Return in which size the recorded draws choose other tokens than the sampler, or None.

        They are compared at a heat where each noise has its own token.
        """
        if self._sampler is None:
            return None
        self._latest = step
        filters: dict[Kind, Choice] = {
            "plain": Choice(),
            "top_p": Choice(top_p=0.9),
            "all": Choice(top_k=50, top_p=0.9),
        }
        for noise in (0.1, 0.5, 0.9):
            for kind in KINDS:
                choices = [filters[kind]._replace(noise=noise, temperature=1e3)] * num_rows
                expected = self._sampler.choose(step.out, choices, num_rows=step.size)
                if not torch.equal(self._choose(step.out, choices), expected):
                    return f"they give other tokens for a batch of {step.size}"
        return None


def _drawn(sampler: TritonSampler, step: RecordedStep, kind: Kind) -> Tensor:
    return sampler.draw(step.out, kind)


def capture_decoding(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    backend: AttentionBackend,
    cache: Cache,
    max_model_len: int,
    device: torch.device,
    capture: Capture | None = None,
    sampler: TritonSampler | None = None,
    ranks: OtherRanks | None = None,
) -> DecodeGraphs | None:
    """Return the graphs, or None with a warning where a rank cannot make them or they give other bits.

    None without a word on a CPU, and where the configuration wants none. The other ranks wait to record, too.
    """
    capture = capture or capture_of(device)
    if config.enforce_eager or capture is None:
        return None
    graphs = DecodeGraphs(decoder, cache, config, max_model_len, device, sampler, ranks)
    with nullcontext() if ranks is None else ranks.together():
        try:
            found = graphs.agree(obstacle(backend, host_starts_experts=decoder.host_starts_experts))
            found = found or graphs.record(capture) or graphs.disagreement(model.vocab_size)
        except Exception as error:
            if ranks is not None or isinstance(error, EngineError):
                raise  # other ranks may wait for the rest of a step
            found = failure(error)
    if found is None:
        return graphs
    warn_of_fallback("decoding", "kernels started one by one, which is slower, are", "CUDA graphs", found)
    return None

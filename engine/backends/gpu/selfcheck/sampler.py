"""Whether the Triton kernels choose a GPU's tokens, and why torch does.

They are compared with torch on the model's own vocabulary before the weights are loaded: they are compiled on the spot,
for a device that no test has seen. That also compiles what steps need later. ModelRunner calls `choose_sampler`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from gptserve.engine.backends.fallback import warn_of_fallback
from gptserve.engine.backends.gpu.device_loss import WITHOUT_TRITON, end_if_lost
from gptserve.engine.backends.gpu.sampler import KINDS, Kind, TritonSampler, kind_of
from gptserve.engine.backends.gpu.selfcheck.proofs import NO_PROOFS, Proofs, proofs_of
from gptserve.engine.backends.reference.draw import choose_by_torch
from gptserve.engine.sampling.adjustments import Adjustment
from gptserve.engine.sampling.choice import Choice
from gptserve.engine.sampling.token_counts import TokenCounts, TokensBefore

NUM_PROBES = 12
_SPREAD = 20.0
"""Of the probes' logits. Few tokens are likely then, so the noise is not as near to a border as rounding moves it."""
_DRAWS = (
    *(Choice(), Choice(0.3, temperature=1.0), Choice(0.8, 0.9, 3.0), Choice(0.6, temperature=3.0, top_k=5)),
    *(Choice(0.7, 0.8, 3.0, 0.001, 9), Choice(0.9, temperature=3.0, min_p=0.01)),
    *(Choice(2**-0.5, temperature=1.0), Choice(0.5, temperature=1.0)),  # all equal, so that all matter; not finite
)


def choose_sampler(vocab_size: int, max_rows: int, device: torch.device) -> TritonSampler | None:
    """Return the sampler of a GPU; None on a CPU, and with a warning where kernels fail, differ or are missing."""
    if device.type != "cuda":
        return None
    make = partial(TritonSampler, vocab_size, max_rows, device)
    return agreeing_sampler(make, vocab_size, device, proofs_of(device))


def agreeing_sampler(
    make: Callable[[], TritonSampler], vocab_size: int, device: torch.device, proofs: Proofs = NO_PROOFS
) -> TritonSampler | None:
    """Return the sampler if it chooses the tokens that torch does. It has room for NUM_PROBES rows."""
    try:
        sampler = make()
        found = proofs.disagreement("sampling", (vocab_size,), lambda: disagreement(sampler, vocab_size, device))
        sampler.counts.release()  # or its memory would count as that of weights when steps are measured
        if found is None:
            return sampler
    except Exception as error:  # of a compiler, a driver or a GPU that Triton does not know: torch needs none
        end_if_lost("a Triton kernel of sampling", error, WITHOUT_TRITON)
        found = f"they failed with {type(error).__name__}: {error}"
    warn_of_fallback("sampling", "torch, which is slower, is", "Triton kernels", found)
    return None


def disagreement(sampler: TritonSampler, vocab_size: int, device: torch.device) -> str | None:
    """Return how the tokens of a few steps differ from torch's, or None: one of each kind, with growing sequences."""
    generator = torch.Generator(device).manual_seed(0)
    sequences = [TokensBefore(TokenCounts(2), [0, 1, 0]) for _ in range(2)]
    for kind in reversed(KINDS):
        logits = _SPREAD * torch.randn(NUM_PROBES, vocab_size, generator=generator, device=device)
        logits[6], logits[7, vocab_size // 2] = 0.0, torch.nan
        best = logits[len(_DRAWS) :].argmax(-1).tolist()
        choices = [_restricted(choice, kind) for choice in (*_DRAWS, *_adjusted(sequences, best, vocab_size))]
        assert kind_of(choices) == kind
        expected = choose_by_torch(logits, choices)
        if not torch.equal(sampler.choose(logits, choices), expected):
            return "they choose other tokens"
        for before, token in zip(sequences, expected[-3:-1].tolist(), strict=True):
            before.known.append(token)
    return None


def _restricted(choice: Choice, kind: Kind) -> Choice:
    """Return the choice without the filters that the kind lacks."""
    if kind == "all":
        return choice
    return choice._replace(top_k=0) if kind == "top_p" else choice._replace(top_k=0, top_p=1.0, min_p=0.0)


def _adjusted(sequences: Sequence[TokensBefore], best: Sequence[int], vocab_size: int) -> tuple[Choice, ...]:
    """Return the choices of four rows, one for each adjustment and one behind a draft. `best` are their argmax."""
    allowed = np.zeros(-(-vocab_size // 32), np.uint32) + np.uint32(0x55555555)
    first, second = sequences
    biased, banned = array("q", [(best[1] + 1) % vocab_size]), array("q", [best[1]])
    drafted = second._replace(draft=(best[3], best[3]))
    nothing = array("q"), array("f"), array("q")
    return (
        Choice(0.4, temperature=9.0, allowed=allowed),
        Choice(adjustment=Adjustment(1.3, 5.0, 0.5, first, biased, array("f", [60.0]), banned)),
        Choice(0.6, temperature=9.0, adjustment=Adjustment(1.1, 20.0, 0.0, second, *nothing)),
        Choice(0.5, temperature=9.0, adjustment=Adjustment(1.1, 20.0, 0.0, drafted, *nothing)),
    )

"""How large the inputs of a model's linears are, which decides where the errors of its codes may lie.

A model that is to become such codes is loaded twice. The first one has the nearest codes and computes a few token ids
that are drawn at random, the same ones each time: what text they are matters little, as the channels that are large
for one are so for all. ModelRunner calls it; backends/cpu/int8.py and int4.py take what it finds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptserve.engine.config import EngineConfig, Quantization
from gptserve.engine.model.batch import model_input
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.layout import Span, lay_out
from gptserve.engine.model.linear import Affine, Linear
from gptserve.engine.runner.kv_cache import KVCache
from gptserve.engine.runner.memory_ahead import take_populated
from gptserve.engine.runner.products import Linears
from gptserve.engine.runner.seeded import seeded
from gptserve.engine.runner.setup import Setup
from gptserve.weights.huge_pages import HugePages

Progress = Callable[[int, int], None]
NUM_SEQUENCES, MAX_TOKENS = 2, 64
"""Of the tokens that are drawn, and how many each has at most."""
_BLOCK_SIZE = 16


class _Recorded:
    """A Linear that adds up the squares of its inputs."""

    def __init__(self, linear: Linear, num_in: int) -> None:
        self._linear, self.num_rows = linear, 0
        self.sums = torch.zeros(num_in, dtype=torch.float64)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        self.sums += x.double().square_().sum(0)
        self.num_rows += len(x)
        return self._linear(x, residual)


class _RecordedLinears(Linears):
    """Linears that add up the squares of the inputs of those in layers. A LinearMaker."""

    def __init__(self, quantization: Quantization, memory: HugePages, num_layers: int) -> None:
        super().__init__(quantization, memory, num_layers=num_layers)
        self.recorded: dict[str, _Recorded] = {}

    def make(self, name: str, affine: Affine) -> Linear:
        linear = super().make(name, affine)
        if not name.startswith("blocks."):
            return linear
        return self.recorded.setdefault(name, _Recorded(linear, affine.weight.shape[1]))


def linears_of(config: EngineConfig, setup: Setup, progress: Progress | None) -> tuple[Linears, Progress | None]:
    """Return what makes the linears of a model, and what its weights' bytes are to be told.

    For codes this reads the weights once before, which counts as the first half of all bytes.
    """
    memory, squares = take_populated(), dict[str, Tensor]()
    if config.requantization is not None:
        squares = input_squares(config, setup, memory, progress and _half_of(progress, 0))
        progress = progress and _half_of(progress, 1)
    options = HugePages(memory), setup.products.call_rows, squares, setup.model.num_layers
    return Linears(config.requantization, *options), progress


def _half_of(progress: Progress, half: int) -> Progress:
    """Return what tells of one of two times that the weights are read."""

    def tell(num_bytes: int, total: int) -> None:
        progress(half * total + num_bytes, 2 * total)

    return tell


def input_squares(
    config: EngineConfig, setup: Setup, memory: memoryview | None = None, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Return the means of the squares of the inputs of each linear in a layer and of the head, fp32 [in], by its name.

    They are those in layers, and the head, if there is one. An expert that no token chose has zeros. `memory` may be
    used again for the same weights, in the same order.
    """
    assert config.requantization is not None
    model = setup.model
    linears = _RecordedLinears(config.requantization, HugePages(memory), model.num_layers)
    decoder = Decoder(model, setup.stream(progress), setup.backend, linears, operations=setup.operations)
    num_tokens = min(MAX_TOKENS, config.max_model_len or model.max_position)
    decoder.set_max_model_len(num_tokens)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    cache = KVCache(model, NUM_SEQUENCES * num_blocks, _BLOCK_SIZE, setup.dtype, setup.device)
    with seeded(torch.device("cpu")) as generator:
        drawn = torch.randint(model.vocab_size, (NUM_SEQUENCES, num_tokens), generator=generator)
    spans = [Span(ids, 0, range(i * num_blocks, (i + 1) * num_blocks)) for i, ids in enumerate(drawn.tolist())]
    step = model_input(lay_out(spans, _BLOCK_SIZE).as_numpy(), setup.device)
    hidden = decoder.hidden_states(step.token_ids_T, step.positions_T, cache, step.metadata)
    found = {name: (its.sums / max(1, its.num_rows)).float() for name, its in linears.recorded.items()}
    if model.classifier is None:  # else there is no head
        found["head"] = decoder.states(hidden).double().square_().mean(0).float()
    return found

"""How large the inputs of a model's linears are, which decides where the errors of its codes may lie.

A model that is to become such codes computes a few token ids while it loads: each layer as soon as it is built, and a
weight is packed when its first rows come. The ids are drawn at random, the same ones each time: what text they are
matters little, as the channels that are large for one are so for all. ModelRunner calls it; backends/cpu/int8.py and
int4.py take what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat

import torch
from torch import Tensor

from gptserve.engine.config import EngineConfig
from gptserve.engine.model.batch import model_input
from gptserve.engine.model.layout import Span, lay_out
from gptserve.engine.model.linear import Affine, Linear
from gptserve.engine.model.rotary import Rotation, rotary_table
from gptserve.engine.model.trial import ALayer, AwaitedLinear, Inputs, Trial
from gptserve.engine.runner.kv_cache import KVCache
from gptserve.engine.runner.memory import weight_type_of
from gptserve.engine.runner.memory_ahead import take_populated
from gptserve.engine.runner.products import Linears
from gptserve.engine.runner.seeded import seeded
from gptserve.engine.runner.setup import Setup
from gptserve.weights.config import Rotary
from gptserve.weights.huge_pages import HugePages

NUM_SEQUENCES, MAX_TOKENS = 2, 64
"""Of the tokens that are drawn, and how many each has at most."""
_BLOCK_SIZE = 16


class AwaitingLinears(Linears):
    """Linears whose weights are packed when their first rows come, by the squares of these. A LinearMaker.

    `squares` has the means of those that are not yet packed, fp32 [in], by the names of the linears: that of the head,
    which comes last, is set before. An expert that no token chose has zeros.
    """

    def __init__(self, config: EngineConfig, setup: Setup, memory: HugePages) -> None:
        self.squares = dict[str, Tensor]()
        options = setup.products.call_rows, self.squares, setup.model.num_layers
        super().__init__(config.requantization, memory, *options)
        self._awaited = list[AwaitedLinear]()

    def make(self, name: str, affine: Affine) -> Linear:
        if name == "head" or weight_type_of(name, self._quantization, self._num_layers) is None:
            return self._make(name, affine)

        def make(x: Tensor | None) -> Linear:
            self.squares[name] = torch.zeros(affine.weight.shape[1]) if x is None else mean_squares(x)
            return self._make(name, affine)

        self._awaited.append(AwaitedLinear(make))
        return self._awaited[-1]

    def _make(self, name: str, affine: Affine) -> Linear:
        linear = super().make(name, affine)
        self.squares.pop(name, None)
        return linear

    def make_rest(self) -> None:
        """Pack the weights of which no rows came."""
        for linear in self._awaited:
            linear.made()
        self._awaited.clear()


class InputTrial(Trial):
    """The tokens that are drawn, as they pass the layers of a model that loads."""

    def __init__(self, config: EngineConfig, setup: Setup, linears: AwaitingLinears) -> None:
        model = setup.model
        self._linears, self._has_head = linears, model.classifier is None
        self._num_tokens = min(MAX_TOKENS, config.max_model_len or model.max_position)
        num_blocks = -(-self._num_tokens // _BLOCK_SIZE)
        cache = KVCache(model, NUM_SEQUENCES * num_blocks, _BLOCK_SIZE, setup.dtype, setup.device, NUM_SEQUENCES)
        self._caches = zip(cache.layers, cache.states, strict=True)
        self._rotations = dict[Rotary | None, Rotation | None]({None: None})
        with seeded(torch.device("cpu")) as generator:
            drawn = torch.randint(model.vocab_size, (NUM_SEQUENCES, self._num_tokens), generator=generator)
        spans = [Span(ids, 0, range(i * num_blocks, (i + 1) * num_blocks)) for i, ids in enumerate(drawn.tolist())]
        self._step = model_input(lay_out(spans, _BLOCK_SIZE).as_numpy(), setup.device)
        self._x = torch.empty(0)
        self._term: Tensor | None = None
        self._inputs: Iterator[Tensor | None] = repeat(None)

    def begin(self, embed: Callable[[Tensor, Tensor], Tensor], inputs: Inputs | None) -> None:
        self._x = embed(self._step.token_ids_T, self._step.positions_T)
        self._inputs = repeat(None) if inputs is None else iter(inputs(self._step.token_ids_T, self._x))

    def computed(self, layer: ALayer, rotary: Rotary | None) -> ALayer:
        positions_T, metadata = self._step.positions_T, self._step.metadata
        if rotary is not None and rotary not in self._rotations:
            table = rotary_table(rotary, self._num_tokens, positions_T.device)
            self._rotations[rotary] = table[positions_T].unbind(1)
        of_layer = self._rotations[rotary], *next(self._caches), metadata, next(self._inputs)
        self._x, self._term = layer(self._x, self._term, *of_layer)
        self._linears.make_rest()
        return layer

    def end(self, states: Callable[[Tensor], Tensor]) -> None:
        x = states(self._x if self._term is None else self._x + self._term)
        if self._has_head:
            self._linears.squares["head"] = mean_squares(x)
        self._linears.make_rest()


def linears_of(config: EngineConfig, setup: Setup) -> tuple[Linears, InputTrial | None]:
    """Return what makes the linears of a model and, if they are to become codes, the trial that shows their inputs."""
    memory = HugePages(take_populated())
    if config.requantization is None:
        return Linears(memory=memory, call_rows=setup.products.call_rows), None
    linears = AwaitingLinears(config, setup, memory)
    return linears, InputTrial(config, setup, linears)


def mean_squares(x: Tensor) -> Tensor:
    """Return the means of the squares of the columns of rows x [rows, in], fp32 [in]."""
    return x.double().square_().mean(0).float()

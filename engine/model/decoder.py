"""The only model: embedding and position, N blocks, final norm, head; every choice is a field of ModelConfig.

It turns a step's tokens into hidden states, and hidden states into logits. It knows no requests, sampling, owners of
blocks or model families. ModelRunner calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptserve.engine.model.activation import soft_cap
from gptserve.engine.model.attention import AttentionBackend, AttentionMetadata, Cache
from gptserve.engine.model.classifier import Classifier
from gptserve.engine.model.group import Group
from gptserve.engine.model.layer_inputs import LayerInputs
from gptserve.engine.model.linear import LinearMaker, Rows
from gptserve.engine.model.loading import (
    Stream,
    StreamedTensors,
    rows_of,
    take_classifier,
    take_head,
    take_linear,
    take_norm,
)
from gptserve.engine.model.norm import Norm, normalize_by_torch
from gptserve.engine.model.operations import TORCH, Operations
from gptserve.engine.model.program import CompileProgram, Program
from gptserve.engine.model.rotary import rotary_table, sinusoids
from gptserve.engine.model.streams import block_type
from gptserve.engine.model.trial import Trial
from gptserve.weights.config import ModelConfig
from gptserve.weights.unread import UnreadWeight


class Layers:
    """All layers, from the embedded tokens to the last hidden states; a rank beyond the first has only these.

    Call `set_max_model_len` before computing.
    """

    def __init__(
        self, config: ModelConfig, source: StreamedTensors, backend: AttentionBackend, device: torch.device
    ) -> None:
        of_layers, trial = [layer.rotary for layer in config.layers], source.trial
        self._blocks = [
            trial.computed(block_type(config)(config, layer, source, backend, device), rotary)
            for layer, rotary in enumerate(of_layers)
        ]
        rotaries = self._distinct_rotaries = list(dict.fromkeys(rotary for rotary in of_layers if rotary))
        self._table_of = [rotaries.index(rotary) if rotary else None for rotary in of_layers]
        self._tables: list[Tensor] = []

    def set_max_model_len(self, max_model_len: int, device: torch.device) -> list[Tensor | None]:
        """Compute the rotary tables of positions [0, max_model_len); return that of each layer."""
        self._tables = [rotary_table(rotary, max_model_len, device) for rotary in self._distinct_rotaries]
        return [None if index is None else self._tables[index] for index in self._table_of]

    def __call__(
        self,
        x: Tensor,
        positions_T: Tensor,
        cache: Cache,
        metadata: AttentionMetadata,
        inputs: Sequence[Tensor | None] = (),
    ) -> Tensor:
        term: Tensor | None = None
        rotations = [table[positions_T].unbind(1) for table in self._tables]
        rotation_of = [None if table is None else rotations[table] for table in self._table_of]
        caches, inputs = zip(cache.layers, cache.states, strict=True), inputs or [None] * len(self._blocks)
        for block, its, (kv, state), input_TI in zip(self._blocks, rotation_of, caches, inputs, strict=True):
            x, term = block(x, term, its, kv, state, metadata, input_TI)
        return x if term is None else x + term


class Decoder:
    """A decoder-only transformer on one device.

    `tensors` yields (canonical name, tensor) in the order in which they are taken, so that at most one waits.
    `maker` makes linears of the weights; None: torch's. An embedding keeps its dtype. `compile_program`, if given, may
    make a `program` of the whole, with the same weights, which is faster. With a group this is the first rank, and the
    other ranks compute with it. A `trial` computes each layer as soon as it is built.
    Call `set_max_model_len` before computing tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Stream,
        backend: AttentionBackend,
        maker: LinearMaker | None = None,
        group: Group | None = None,
        operations: Operations = TORCH,
        compile_program: CompileProgram | None = None,
        trial: Trial | None = None,
    ) -> None:
        self._config, self._backend, self._group, self._compile = config, backend, group, compile_program
        self.host_starts_experts = operations.host_starts_experts(config)
        source = self._source = StreamedTensors(tensors, maker, group, operations, trial)
        embedding = source.take_weight("embed.weight")
        self._positions = source.take("position.weight") if config.position == "learned" else None
        # Here a tied head may take the place of the table before the layers take memory. A bias comes after them, and
        # files are read once a trial has seen what the head reads.
        is_early = config.tied_head and not config.head_bias and not isinstance(embedding, UnreadWeight)
        early = take_head(config, source, embedding) if is_early else None
        self._embedding: Rows = rows_of(embedding) if early is None else early[1]
        if early is not None:
            del embedding
        dtype, device = self._embedding.dtype, self._embedding.device
        scale = config.embed_scale  # in the model's dtype, as it was trained with
        self._embed_scale = None if scale == 1 else torch.tensor(scale, dtype=dtype, device=device)
        self._embed_norm = take_norm(config, source, "embed_norm") if config.embed_norm else None
        self._embed_in = take_linear(source, "embed_in", bias=False) if config.embed_size else None
        self._inputs = LayerInputs(config, source) if config.layer_input_size else None
        source.trial.begin(self._embed, self._inputs)
        self._layers = Layers(config, source, backend, device)
        self.program: Program | None = None
        """What computes whole steps, to the logits; None where only this decoder can."""
        has_final_norm = config.norm_placement != "sum"
        self._final_norm = take_norm(config, source, "final_norm", config.logit_scale) if has_final_norm else None
        self._embed_out = take_linear(source, "embed_out", bias=False) if config.embed_size else None
        self._classifier: Classifier | None = None
        source.trial.end(self.states)
        self._head, self._embedding = early or take_head(config, source, embedding, self._embedding)
        self._classifier = take_classifier(config, source)
        source.end()

    def set_max_model_len(self, max_model_len: int) -> None:
        """Compute the tables of positions [0, max_model_len)."""
        config = self._config
        tables = self._layers.set_max_model_len(max_model_len, self._embedding.device)
        if config.position == "sinusoidal":
            table = sinusoids(max_model_len, config.position_offset, config.hidden_size)
            self._positions = table.to(self._embedding.device, self._embedding.dtype)
        if self._compile is not None:
            self.program = self._compile(config, self._source, self._embedding, self._positions, tables, self._backend)

    def hidden_states(
        self, token_ids_T: Tensor, positions_T: Tensor, cache: Cache, metadata: AttentionMetadata
    ) -> Tensor:
        """Return the last block's output [T, hidden], in the model's dtype; store keys and values in the cache.

        token_ids and positions are int64 on the model's device, in [0, vocab_size) and [0, max_model_len).
        """
        x = self._embed(token_ids_T, positions_T)
        if self._group is not None:
            self._group.broadcast_(x)
        inputs = () if self._inputs is None else self._inputs(token_ids_T, x)
        return self._layers(x, positions_T, cache, metadata, inputs)

    def step(
        self, token_ids_T: Tensor, positions_T: Tensor, cache: Cache, metadata: AttentionMetadata, rows_R: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden_states and the logits of these rows of them, int64 [R], ascending; None if there are none."""
        hidden = self.hidden_states(token_ids_T, positions_T, cache, metadata)
        rows = hidden if len(rows_R) == len(hidden) else hidden[rows_R]
        return hidden, self.logits(rows) if len(rows_R) else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [rows, vocab_size] for rows of the hidden states."""
        x = hidden if self._final_norm is None else self._final_norm(hidden)
        x = x if self._embed_out is None else self._embed_out(x)
        return soft_cap(self._head(x).to(torch.float32), self._config.logit_softcap)

    def states(self, hidden: Tensor) -> Tensor:
        """Return rows of the hidden states after the final norm, fp32 [rows, width], as the head reads them.

        The norm is computed in fp32. Its weights have the factor of the logits, which is taken out again. Of a model
        with a classifier these are the logits of its labels, [rows, labels].
        """
        x, norm = hidden.to(torch.float32), self._final_norm
        if norm is not None:
            weight, bias = (None if its is None else its.float() for its in (norm.weight, norm.bias))
            x = normalize_by_torch(x, Norm(norm.kind, weight, bias, norm.eps)) / self._config.logit_scale
        x = x if self._embed_out is None else self._embed_out(x.to(hidden.dtype)).to(torch.float32)
        return x if self._classifier is None else self._classifier(x)

    def _embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        x = self._embedding[token_ids_T]
        if self._embed_scale is not None:
            x = x * self._embed_scale
        if self._embed_norm is not None:
            x = self._embed_norm(x)
        if self._embed_in is not None:
            x = self._embed_in(x)
        return x if self._positions is None else x + self._positions[positions_T]

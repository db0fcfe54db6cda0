"""The tensors that one forward pass reads, from the arrays of layout.py.

Rows are the scheduled tokens of all sequences, one sequence after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptserve.engine.model.attention import AttentionMetadata
from gptserve.engine.staging import Array, to_device


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tensors of one step: T rows."""

    token_ids_T: Tensor
    """int64 [T], negative where a token is foreseen"""
    positions_T: Tensor
    """int64 [T]"""
    sampled_R: Tensor
    """int64, the rows after which tokens are sampled, those of an item together"""
    metadata: AttentionMetadata


def model_input(arrays: tuple[Array, ...], device: torch.device, states: Sequence[int] = ()) -> ModelInput:
    """Return the arrays of StepArrays.as_numpy as tensors on `device`."""
    token_ids_T, positions_T, rows_R, starts, lens, tables, slots = to_device(device, *arrays)
    of_host = tuple(arrays[3].tolist()), tuple(arrays[4].tolist())
    metadata = AttentionMetadata(*of_host, starts, lens, tables, slots, tuple(states))
    return ModelInput(token_ids_T, positions_T, rows_R, metadata)


def known_token_ids(token_ids_T: Tensor, chosen_R: Tensor) -> Tensor:
    """Return the token ids, int64 [T], with those that the step before chose, int64 [R], for the foreseen ones.

    A row that chose none, -1, gives the id 0: what follows is void.
    """
    rows_T = (~token_ids_T).clamp(min=0)
    return torch.where(token_ids_T < 0, chosen_R[rows_T].clamp(min=0), token_ids_T)

"""From the states of a step's rows to the vectors of PoolingRequests. ModelRunner and program_steps.py call it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.runner.step_input import PooledPrompt

_ROWS = 256
"""Rows of states computed at once: of a model 4096 wide they take 4 MB."""


@torch.inference_mode()
def pool_all(states_of: Callable[[slice], Tensor], prompts: Iterable[PooledPrompt]) -> dict[int, array[float]]:
    """Return what has come of each prompt, by the index of its sequence."""
    vectors = {prompt.sequence: _pool(states_of, prompt) for prompt in prompts}
    return {index: vector for index, vector in vectors.items() if vector is not None}


def _pool(states_of: Callable[[slice], Tensor], prompt: PooledPrompt) -> array[float] | None:
    """Return the vector of a prompt, fp32, or the sum that its mean goes on with, fp64; None if neither has come.

    `states_of` gives the states of rows of the step, fp32 [rows, width]. A mean does not depend on how the steps split
    the prompt: rows are added one after the other.
    """
    if prompt.pooling == "mean":
        return _mean(states_of, prompt)
    if not (prompt.is_last if prompt.pooling == "last" else prompt.first_position == 0):
        return prompt.before
    row = prompt.first_row + (prompt.num_rows - 1 if prompt.pooling == "last" else 0)
    return array("f", states_of(slice(row, row + 1)).cpu().numpy().tobytes())


def _mean(states_of: Callable[[slice], Tensor], prompt: PooledPrompt) -> array[float]:
    total = None if prompt.first_position == 0 or prompt.before is None else np.array(prompt.before)
    end = prompt.first_row + prompt.num_rows
    for start in range(prompt.first_row, end, _ROWS):
        states = states_of(slice(start, min(start + _ROWS, end))).cpu().numpy()
        total = np.zeros(states.shape[1]) if total is None else total
        for state in states:
            total += state
    assert total is not None
    if not prompt.is_last:
        return array("d", total.tobytes())
    num_tokens = prompt.first_position + prompt.num_rows
    return array("f", (total / num_tokens).astype(np.float32).tobytes())

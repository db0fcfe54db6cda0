"""The logprobs of a prompt's tokens, from the hidden states of a step. ModelRunner calls it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.model.decoder import Decoder
from gptserve.engine.request import TokenLogprobs
from gptserve.engine.runner.logprobs import top_logprobs
from gptserve.engine.runner.step_memory import LOGIT_ROWS
from gptserve.engine.scheduling.sequence import ScheduledSequence
from gptserve.engine.staging import to_device


@torch.inference_mode()
def prompt_logprobs(decoder: Decoder, hidden: Tensor, item: ScheduledSequence) -> list[tuple[int, TokenLogprobs]]:
    """Return (position, logprobs) of the prompt tokens that the item's rows predict, before the item is counted."""
    sequence, first = item.sequence, item.sequence.num_computed
    num_top = sequence.request.params.prompt_logprobs
    assert num_top is not None
    last = min(first + item.num_tokens, sequence.num_prompt_tokens - 1)
    entries: list[tuple[int, TokenLogprobs]] = []
    for start in range(first, last, LOGIT_ROWS):
        positions = range(start + 1, min(start + LOGIT_ROWS, last) + 1)
        logits = decoder.logits(hidden[positions[0] - 1 - first : positions[-1] - first])
        (targets,) = to_device(hidden.device, np.array(sequence.token_ids[positions[0] : positions[-1] + 1]))
        entries += zip(positions, top_logprobs(logits, targets, [num_top] * len(positions)), strict=True)
    return entries

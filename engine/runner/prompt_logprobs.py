"""The logprobs of a prompt's tokens, from the hidden states of a step. ModelRunner calls it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.model.decoder import Decoder
from gptserve.engine.request import TokenLogprobs
from gptserve.engine.runner.logprobs import top_logprobs
from gptserve.engine.runner.step_input import ScoredPrompt
from gptserve.engine.runner.step_memory import LOGIT_ROWS
from gptserve.engine.staging import to_device


@torch.inference_mode()
def prompt_logprobs(decoder: Decoder, hidden: Tensor, prompt: ScoredPrompt) -> list[tuple[int, TokenLogprobs]]:
    """Return (position, logprobs) of the prompt's tokens from the hidden states of its rows."""
    entries: list[tuple[int, TokenLogprobs]] = []
    for start in range(0, len(prompt.token_ids), LOGIT_ROWS):
        token_ids = prompt.token_ids[start : start + LOGIT_ROWS]
        logits = decoder.logits(hidden[start : start + len(token_ids)])
        (targets,) = to_device(hidden.device, np.array(token_ids))
        scores = top_logprobs(logits, targets, [prompt.num_top] * len(token_ids))
        entries += enumerate(scores, prompt.first_position + start)
    return entries

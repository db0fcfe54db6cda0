"""The logprobs of a prompt's tokens, from the logits of a step's rows. ModelRunner and program_steps.py call it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.request import TokenLogprobs
from gptserve.engine.runner.logprobs import top_logprobs
from gptserve.engine.runner.step_input import ScoredPrompt
from gptserve.engine.runner.step_memory import LOGIT_ROWS
from gptserve.engine.staging import to_device


@torch.inference_mode()
def prompt_logprobs(logits_of: Callable[[slice], Tensor], prompt: ScoredPrompt) -> list[tuple[int, TokenLogprobs]]:
    """Return (position, logprobs) of the prompt's tokens; `logits_of` gives the logits of rows of the step."""
    entries: list[tuple[int, TokenLogprobs]] = []
    for start in range(0, len(prompt.token_ids), LOGIT_ROWS):
        token_ids, first = prompt.token_ids[start : start + LOGIT_ROWS], prompt.first_row + start
        logits = logits_of(slice(first, first + len(token_ids)))
        (targets,) = to_device(logits.device, np.array(token_ids))
        scores = top_logprobs(logits, targets, [prompt.num_top] * len(token_ids))
        entries += enumerate(scores, prompt.first_position + start)
    return entries

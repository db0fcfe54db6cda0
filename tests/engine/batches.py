"""Steps of tests: a StepInput made of sequences, and one that remembers of which."""

from __future__ import annotations

import pytest

from gptserve.engine.model.layout import StepArrays
from gptserve.engine.runner import batch as batches
from gptserve.engine.runner import overlap
from gptserve.engine.runner.masks import MaskThread
from gptserve.engine.runner.step_input import StepInput
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence


class KnownStep(StepInput):
    """A StepInput that knows its batch, whose sequences go on changing."""

    batch: ScheduledBatch


def known_step(batch: ScheduledBatch, block_size: int, mask_thread: MaskThread) -> KnownStep:
    """Return what step_input does, and the batch with it."""
    step = KnownStep(*batches.step_input(batch, block_size, mask_thread))
    step.batch = batch
    return step


def know_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runners get each step as a KnownStep, but for those that the engine makes for its checks."""
    monkeypatch.setattr(overlap, "step_input", known_step)


def step_of(*items: ScheduledSequence, block_size: int = 16) -> StepInput:
    """Return a step that computes these."""
    return batches.step_input(ScheduledBatch(items), block_size, MaskThread())


def arrays_of(*items: ScheduledSequence, block_size: int = 16) -> StepArrays:
    """Return the arrays of a step that computes these."""
    return step_of(*items, block_size=block_size).arrays

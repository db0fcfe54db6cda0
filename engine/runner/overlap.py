"""Steps that overlap: while a GPU computes one, the host takes the results of the one before it and plans the next.

Without this the GPU waits whenever the host schedules, reads tokens and sends them. A step that is launched ahead may
have foreseen tokens: the device takes them from the step before (SequenceState.is_foreseen). Scheduler.foresee says
which steps may be planned so early. On a CPU the kernels are the host's work, so nothing overlaps. Engine uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from gptserve.engine.runner.batch import step_input
from gptserve.engine.runner.masks import MaskThread
from gptserve.engine.runner.runner import Collect, ModelRunner
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.engine.scheduling.sequence import ScheduledBatch, SequenceState


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step that was launched. `collect` raises what it has raised; has_failed: that is known already."""

    batch: ScheduledBatch
    collect: Collect
    has_failed: bool = False


class Steps:
    """The steps that run: at most one between calls, launched ahead."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, *, overlap: bool) -> None:
        self._runner, self._scheduler, self.overlap = runner, scheduler, overlap
        self._ahead: RunningStep | None = None
        self._masks = MaskThread()

    def due(self, schedule: Callable[[], ScheduledBatch]) -> Iterator[RunningStep]:
        """Yield the step to collect now, and launch the next one before, if they overlap and it can be planned.

        If the next one failed at its launch, it comes second. What `schedule` returns is launched unless it is empty.
        """
        step, self._ahead = self._ahead or self._launch(schedule()), None
        if step is None:
            return
        if self.overlap and not step.has_failed and self._foresee(step.batch):
            self._ahead = self._launch(schedule())
        yield step
        if self._ahead is not None and self._ahead.has_failed:
            step, self._ahead = self._ahead, None
            yield step

    def abandon(self, batch: ScheduledBatch) -> SequenceState | None:
        """Undo a failed step (Scheduler.abandon), and with it the next one, which reads what this one stored."""
        convicted = self._scheduler.abandon(batch)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._scheduler.abandon(ahead.batch, blames=False)
            with contextlib.suppress(Exception):
                ahead.collect()  # so that the device is done with it
        return convicted

    def _foresee(self, batch: ScheduledBatch) -> bool:
        return self._scheduler.foresee(batch, host_counts=self._runner.host_counts)

    def _launch(self, batch: ScheduledBatch) -> RunningStep | None:
        if not batch.items:
            return None
        try:
            step = step_input(batch, self._runner.info.block_size, self._masks)
            return RunningStep(batch, self._runner.launch(step))
        except BaseException as error:  # comes after the results of the step before
            return RunningStep(batch, _raises(error), has_failed=True)


def _raises(error: BaseException) -> Callable[[], NoReturn]:
    """Return a Collect that raises the error, once, and then holds it no more.

    Else the two would hold each other, and with them the tensors of the failed launch.
    """
    errors = [error]

    def collect() -> NoReturn:
        raise errors.pop()

    return collect

"""Whether a GPU still computes after something failed on it, so that something slower may take its place.

A kernel that reads a wrong address takes the CUDA context of its process along: every later call fails. The load checks
of attention, operations, sampling, CUDA graphs and overlap call this with what they caught.
"""

from __future__ import annotations

import torch

from gptserve.engine.errors import EngineStartError

WITHOUT_TRITON = "device 'cpu', or an environment without Triton,"
"""What avoids the kernels of operations and sampling: no setting turns them off."""
_TRIES = 2
"""A recording of a CUDA graph that failed may leave an error to the next call, and to no other."""


def end_if_lost(failed: str, error: Exception, remedy: str) -> None:
    """Raise EngineStartError, which names the remedy, if the GPU cannot go on after `error`."""
    is_there = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_there and not any(_computes() for _ in range(_TRIES)):
        first_line = str(error).partition("\n")[0]
        raise EngineStartError(
            f"the GPU cannot go on since {failed} failed with {type(error).__name__}: {first_line}; "
            f"{remedy} avoids that"
        ) from error


def _computes() -> bool:
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # torch before 2.13 cannot once the end of a recording has failed
    except RuntimeError:
        return False
    return True

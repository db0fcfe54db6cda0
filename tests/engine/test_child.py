"""What the end of a child process says."""

from __future__ import annotations

import pytest

from gptserve.engine.child import describe_exit
from gptserve.engine.errors import DeathKind


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (0, "it ended with exit code 0", DeathKind.EXITED),
        (64, "it ended with exit code 64", DeathKind.EXITED),
        (65, "it ended because its rank 1 died", DeathKind.EXITED),
        (127, "it ended because its rank 63 died", DeathKind.EXITED),
        (128, "it ended with exit code 128", DeathKind.EXITED),
        (255, "it ended with exit code 255", DeathKind.EXITED),
        (None, "it ended with exit code None", DeathKind.EXITED),
        (-11, "it was killed by signal 11 (Segmentation fault)", DeathKind.KILLED),
        (
            -9,
            "it was killed by signal 9 (Killed), as the system does when memory runs out",
            DeathKind.KILLED,
        ),
    ],
)
def test_an_exit_code_tells_a_rank_a_signal_or_itself(code: int | None, reason: str, kind: DeathKind) -> None:
    assert describe_exit("it", code) == (reason, kind)

"""The pauses between kernels, counted by hand."""

from __future__ import annotations

import pytest

from bench.idle import pauses


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(0.0, 3.0)], []),
        ([(0.0, 3.0), (5.0, 6.0), (7.0, 8.0)], [2.0, 1.0]),
        ([(5.0, 6.0), (0.0, 3.0)], [2.0]),
        ([(0.0, 3.0), (2.0, 5.0)], []),
        ([(0.0, 9.0), (2.0, 5.0), (6.0, 10.0), (10.5, 11.0)], [0.5]),
        ([(1.0, 1.0), (4.0, 4.0)], [3.0]),
    ],
)
def test_a_pause_is_what_no_kernel_covers(intervals: list[tuple[float, float]], expected: list[float]) -> None:
    assert pauses(intervals) == expected

"""The time that kernels cover, counted by hand."""

from __future__ import annotations

import pytest

from bench.idle import covered


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(0.0, 3.0)], 3.0),
        ([(0.0, 3.0), (5.0, 6.0)], 4.0),
        ([(5.0, 6.0), (0.0, 3.0)], 4.0),
        ([(0.0, 3.0), (2.0, 5.0)], 5.0),
        ([(0.0, 9.0), (2.0, 5.0), (6.0, 10.0)], 10.0),
        ([(1.0, 1.0)], 0.0),
    ],
)
def test_kernels_side_by_side_count_once(intervals: list[tuple[float, float]], expected: float) -> None:
    assert covered(intervals) == expected

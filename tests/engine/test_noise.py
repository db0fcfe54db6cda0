"""The noise: pinned values, and that it looks uniform and independent."""

from __future__ import annotations

from itertools import pairwise

from engine.noise import uniform


def test_values_never_change() -> None:
    assert [uniform(0, 0, 0), uniform(1, 0, 0), uniform(0, 1, 0), uniform(0, 0, 1), uniform(2**63 - 1, 127, 8191)] == [
        0.156742553465558,
        0.33776134126730917,
        0.4633667468151501,
        0.6269999134633438,
        0.8106955321210523,
    ]


def test_numbers_are_uniform_along_every_argument() -> None:
    for draw in (lambda i: uniform(i, 0, 0), lambda i: uniform(7, i, 0), lambda i: uniform(7, 0, i)):
        bins = [0] * 20
        for i in range(20_000):
            u = draw(i)
            assert 0.0 <= u < 1.0
            bins[int(u * 20)] += 1
        # chi-square with 19 degrees of freedom: 43.8 is exceeded once in a thousand; the arguments are fixed.
        assert sum((count - 1000) ** 2 / 1000 for count in bins) < 43.8


def test_neighbouring_positions_are_uncorrelated() -> None:
    values = [uniform(3, 0, position) - 0.5 for position in range(20_001)]
    correlation = sum(a * b for a, b in pairwise(values)) / 20_000 * 12
    assert abs(correlation) < 4 / 20_000**0.5

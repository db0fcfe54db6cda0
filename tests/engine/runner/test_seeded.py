"""The generator of what is tried at a start: that of the seed 0, and nobody's numbers change by it."""

from __future__ import annotations

import torch

from gptserve.engine.runner.seeded import seeded


def test_numbers_are_those_of_the_seed_0_and_those_that_follow_are_as_before() -> None:
    torch.manual_seed(5)
    expected = [torch.randn(3), torch.randn(3)]
    torch.manual_seed(5)
    assert torch.equal(torch.randn(3), expected[0])
    for _ in range(2):
        with seeded(torch.device("cpu")) as generator:
            drawn = torch.randint(1000, (40,), generator=generator)
        assert torch.equal(drawn, torch.randint(1000, (40,), generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.randn(3), expected[1])

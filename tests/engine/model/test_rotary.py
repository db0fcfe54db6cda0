"""Rotary tables whose queries grow behind the original context, as turned by torch and by the waves of programs."""

from __future__ import annotations

import math

import torch

from gptserve.engine.model.rotary import grow_, rotary_table, rotate_, rotations_of
from gptserve.weights.config import Rotary

PLAIN = Rotary((1.0, 0.1))
GROWING = Rotary((1.0, 0.1), growth=(0.1, 4))


def test_queries_grow_with_each_whole_original_context_before_them() -> None:
    table = rotary_table(GROWING, 12, torch.device("cpu"))
    assert table.shape == (12, 3, 1, 2)
    expected = [1 + 0.1 * math.log(1 + position // 4) for position in range(12)]
    assert torch.allclose(table[:, 2, 0, 0], torch.tensor(expected))
    queries = torch.ones(12, 3, 4)
    grow_(queries, table.unbind(1))
    assert torch.equal(queries, table[:, 2, :, :1].expand(12, 3, 4))


def test_the_waves_of_programs_turn_as_the_table_does_and_are_shared_by_layers() -> None:
    plain, growing = (rotary_table(rotary, 12, torch.device("cpu")) for rotary in (PLAIN, GROWING))
    (alone,), (waves, factors), none, again = rotations_of([plain, growing, None, growing])
    assert alone.data_ptr() == plain.data_ptr()
    assert none == ()
    assert again[0] is waves
    assert again[1] is factors
    heads = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(0))
    by_torch, by_waves = heads.clone(), heads.clone()
    rotate_(by_torch, growing.unbind(1))
    grow_(by_torch, growing.unbind(1))
    rotate_(by_waves, waves.unbind(1))
    rotate_(by_waves, factors.unbind(1))
    assert torch.equal(by_waves, by_torch)

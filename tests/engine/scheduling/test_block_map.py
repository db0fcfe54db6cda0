"""The picture of the KV cache: its marks, and how many blocks share one."""

from __future__ import annotations

from array import array

import pytest

from gptserve.engine.scheduling.block_map import MAX_CELLS, BlockMap, draw_block_map
from gptserve.engine.scheduling.block_pool import BlockPool


def test_each_state_of_a_block_has_a_mark() -> None:
    drawn = draw_block_map(array("i", [0, 0, 1, 2, 9, 10, 1000]), bytearray([0, 1, 1, 0, 1, 1, 0]))
    assert drawn == BlockMap(1, ".c12999")


@pytest.mark.parametrize("num_blocks", [1, MAX_CELLS, MAX_CELLS + 1, 100_000])
def test_neighbours_share_a_cell_where_there_are_many(num_blocks: int) -> None:
    references, findable = array("i", [0]) * num_blocks, bytearray(num_blocks)
    references[-1] = 3
    drawn = draw_block_map(references, findable)
    assert len(drawn.cells) <= MAX_CELLS
    assert drawn.cells == "." * (len(drawn.cells) - 1) + "3"
    assert (len(drawn.cells) - 1) * drawn.blocks_per_cell < num_blocks <= len(drawn.cells) * drawn.blocks_per_cell


def test_a_cell_shows_the_highest_of_its_blocks() -> None:
    references, findable = array("i", [0]) * (2 * MAX_CELLS), bytearray(2 * MAX_CELLS)
    references[0], references[1] = 1, 2
    findable[2] = findable[5] = 1
    assert draw_block_map(references, findable) == BlockMap(2, "2cc".ljust(MAX_CELLS, "."))


def test_a_pool_can_be_drawn_at_any_time() -> None:
    pool = BlockPool(4, 2, enable_prefix_caching=True)
    held = pool.allocate(2)
    assert held is not None
    pool.register(held, 0, [1, 2, 3], "")
    assert sorted(draw_block_map(pool.num_references, pool.findable).cells) == sorted("11..")
    assert pool.allocate(0, held[:1]) == held[:1]
    assert sorted(draw_block_map(pool.num_references, pool.findable).cells) == sorted("21..")
    pool.free(held)
    pool.free(held[:1])
    assert sorted(draw_block_map(pool.num_references, pool.findable).cells) == sorted("c...")
    pool.forget(held)
    assert draw_block_map(pool.num_references, pool.findable).cells == "...."

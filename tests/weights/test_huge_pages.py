"""Pieces of mappings: where they lie, and when they are given back."""

from __future__ import annotations

import mmap
import re
import weakref
from pathlib import Path
from typing import Any

import pytest

from gptserve.weights.huge_pages import MAPPING, HugePages
from gptserve.weights.mappings import HUGE_PAGE


def mapping_at(address: int) -> str | None:
    """Return what smaps says of the mapping around this address; None if there is none."""
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", smaps)[1:]:
        start, end = (int(number, 16) for number in entry.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return entry
    return None


def test_pieces_are_zeros_that_do_not_overlap() -> None:
    memory = HugePages()
    sizes = [1, 64, 1000, 2**20, MAPPING // 4 + 5, MAPPING // 4, 7]
    pieces = [memory.take(size) for size in sizes]

    assert [len(piece) for piece in pieces] == sizes
    assert not any(piece.any() for piece in pieces)
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    for i, piece in enumerate(pieces):
        piece.fill_(i + 1)
    assert all((piece == i + 1).all() for i, piece in enumerate(pieces))


def test_small_pieces_follow_each_other_from_the_first_byte_of_a_huge_page() -> None:
    memory = HugePages()
    first, second = memory.take(100), memory.take(100)

    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 128


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_huge_pages_are_asked_for() -> None:
    piece = HugePages().take(HUGE_PAGE)
    found = mapping_at(piece.data_ptr())

    assert found is not None
    assert " hg" in re.search(r"^VmFlags:.*$", found, re.M)[0]


def test_a_mapping_is_given_back_with_its_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    mappings: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __new__(cls, *args: Any, **options: Any) -> Watched:
            mapping = super().__new__(cls, *args, **options)
            mappings.append(weakref.ref(mapping))
            return mapping

    monkeypatch.setattr(mmap, "mmap", Watched)
    memory = HugePages()
    first, second = memory.take(100), memory.take(100)
    for _ in range(4):
        memory.take(MAPPING // 4)  # the last one lies in the next mapping

    assert len(mappings) == 2
    del first
    assert mappings[0]() is not None
    del second
    assert mappings[0]() is None
    assert mappings[1]() is not None

"""The recipe on a miniature, both stages. Its tests are slow ones: only a change to the recipe can break them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptserve.weights.storyteller.recipe.train import train, train_chat
from tests.weights.storyteller.recipe.miniature import MINIATURE


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """What the first stage wrote, and its losses."""
    folder = tmp_path_factory.mktemp("miniature")
    return folder, train(MINIATURE, folder)


@pytest.fixture(scope="session")
def chat_miniature(miniature: tuple[Path, list[float]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    train_chat(MINIATURE, miniature[0], folder)
    return folder

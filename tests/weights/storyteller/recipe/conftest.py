"""The recipe on a miniature, both stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptserve.weights.storyteller.recipe.train import train, train_chat
from tests.weights.storyteller.recipe.miniature import MINIATURE


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

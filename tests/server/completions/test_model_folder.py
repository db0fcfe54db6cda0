"""The model of a folder: what of sentence-transformers' files is told and not done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gptserve.engine.config import EngineConfig
from gptserve.server.completions.model_folder import load_model
from gptserve.server.core.settings import ServerSettings
from tests.server.fake_engine import FakeEngineClient

STORYTELLER = Path(__file__).parents[3] / "weights" / "storyteller"


@pytest.mark.parametrize("task", ["embed", "generate"])
def test_a_default_prompt_that_is_not_added_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, task: str
) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(STORYTELLER / name, tmp_path)
    config = {"prompts": {"query": "Query: "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    settings = ServerSettings(engine=EngineConfig(tmp_path, task=task))  # type: ignore[arg-type]
    load_model(tmp_path, FakeEngineClient(), ["tiny"], settings, {}, None).close()

    says = "texts are embedded without the folder's default prompt 'Query: ': clients add it"
    assert caplog.messages == ([says] if task == "embed" else [])

"""guidance's client of vLLM: a text of some tokens, one of some texts, and a regex amid a text."""

from __future__ import annotations

import re

import pytest

from tests.clients.environments import Environment

CLIENT = "guidance"
pytestmark = pytest.mark.clients


def compose(url: str) -> list[str]:
    from guidance import assistant, gen, select, user
    from guidance.models.experimental import VLLMModel

    found = []
    for part in (gen(max_tokens=10), select(["cat", "dog"]), "I say " + gen(regex="[ab]{3}") + "!"):
        model = VLLMModel("storyteller", base_url=url, api_key="none", echo=False)
        with user():
            model += "A fox"
        with assistant():
            model += part
        found.append(str(model).rpartition("<|im_start|>assistant\n")[2].removesuffix("\n<|im_end|>\n"))
    return found


def test_parts_keep_to_their_grammars(client: Environment, tools: str) -> None:
    text, animal, letters = client.call(compose, tools)

    assert text
    assert animal in ("cat", "dog")
    assert re.fullmatch("I say [ab]{3}!", letters)

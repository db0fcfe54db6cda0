"""instructor without tools: JSON in the text. A bias makes the tiny model write it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.clients.environments import Environment
from tests.clients.servers import PERSON

CLIENT = "instructor"
pytestmark = pytest.mark.clients


def extract(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    import instructor
    import openai
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    plain = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.MD_JSON)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Who is it?"}], **fields}
    person = client.chat.completions.create(response_model=Person, max_retries=0, **asked)
    return person.model_dump()


def test_json_in_the_text(client: Environment, chats: str, chat_model: Any) -> None:
    token = Tokenizer.from_file(str(chat_model / "tokenizer.json")).token_to_id(PERSON)

    found = client.call(extract, chats, {"logit_bias": {str(token): 100}, "temperature": 0, "stop": ["\n"]})

    assert found == {"name": "Theo", "age": 5}

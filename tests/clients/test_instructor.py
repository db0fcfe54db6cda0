"""instructor: JSON in the text, which a bias makes the tiny model write, by tools and by a JSON Schema."""

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


def extract_by(url: str, way: str) -> dict[str, Any]:
    import instructor
    import openai
    from pydantic import BaseModel, Field

    class Person(BaseModel, extra="forbid"):
        name: str = Field(max_length=8)
        age: int = Field(ge=0, le=99)

    plain = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[way])
    asked = {"model": "storyteller", "messages": [{"role": "user", "content": "Who is it?"}]}
    fields = {"max_tokens": 200, "temperature": 0}
    person = client.chat.completions.create(response_model=Person, max_retries=0, **asked, **fields)
    return person.model_dump()


@pytest.mark.parametrize("way", ["TOOLS", "JSON_SCHEMA"])
def test_a_model_has_its_fields(client: Environment, tools: str, way: str) -> None:
    assert set(client.call(extract_by, tools, way)) == {"name", "age"}

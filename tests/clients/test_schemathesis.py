"""schemathesis: what it makes of our /openapi.json, and chains of calls, find no fault that the document denies."""

from __future__ import annotations

import pytest

from tests.clients.environments import Environment

CLIENT = "schemathesis"
pytestmark = pytest.mark.clients


def test_the_document_is_true(client: Environment, chats: str) -> None:
    client.run(
        "st",
        "run",
        f"{chats.removesuffix('/v1')}/openapi.json",
        *("--phases", "examples,coverage,fuzzing,stateful"),
        *("--max-examples", "20"),
        *("--seed", "1"),
        "--generation-deterministic",
    )

"""schemathesis: what it makes of our /openapi.json, and chains of calls, find no fault that the document denies."""

from __future__ import annotations

import pytest

from tests.clients.environments import LIMIT_S, Environment

CLIENT = "schemathesis"
pytestmark = pytest.mark.clients


def test_the_document_is_true(client: Environment, chats: str) -> None:
    client.run(
        "st",
        "run",
        f"{chats.removesuffix('/v1')}/openapi.json",
        *("--phases", "coverage,fuzzing,stateful"),
        *("--max-examples", "25"),
        "--generation-deterministic",
        *("--exclude-checks", "positive_data_acceptance"),  # no schema can say that a prompt must fit the context
        *("--request-timeout", str(LIMIT_S)),
        "--no-color",
    )

"""schemathesis: what it makes of our /openapi.json, and chains of calls, find no fault that the document denies."""

from __future__ import annotations

import re

import pytest

from tests.clients.environments import HERE, LIMIT_S, Environment

CLIENT = "schemathesis"
pytestmark = pytest.mark.clients


def faults_of(url: str) -> list[str]:
    import json
    import urllib.request

    from openapi_spec_validator import OpenAPIV31SpecValidator

    with urllib.request.urlopen(url) as response:
        document = json.load(response)
    return [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()]


def run(client: Environment, url: str, phases: str, max_examples: int = 25, **variables: str) -> str:
    return client.run(
        "st",
        "run",
        f"{url.removesuffix('/v1')}/openapi.json",
        *("--phases", phases),
        *("--max-examples", str(max_examples)),
        "--generation-deterministic",
        *("--exclude-checks", "positive_data_acceptance"),  # no schema can say that a prompt must fit the context
        *("--request-timeout", str(LIMIT_S)),
        "--no-color",
        **variables,
    )


def test_the_document_is_openapi(client: Environment, chats: str) -> None:
    assert client.call(faults_of, f"{chats.removesuffix('/v1')}/openapi.json") == []


def test_the_document_is_true(client: Environment, chats: str) -> None:
    run(client, chats, "coverage,fuzzing")


def test_links_lead_from_call_to_call(client: Environment, chats: str) -> None:
    said = run(client, chats, "stateful", 150, PYTHONPATH=str(HERE), SCHEMATHESIS_HOOKS="schemathesis_hooks")

    found = re.search(r"API Links: +(\d+) covered", said)
    assert found is not None
    assert int(found[1]) > 6, "those from the three routes that begin a completion"

"""The playground in headless Chromium: type, stream, reload, stop, branch, follow a link; axe-core looks on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.server.tools.harmony import MARKS
from tests.clients.environments import Environment
from tests.clients.servers import served
from tests.engine.held_engine import VARIABLE, EngineGate
from tests.server.conftest import LiveServer
from tests.server.fake_engine import EOS, INFO, ByteTokenizer, FakeEngineClient, say
from tests.server.serving import LIMIT_S, MORTAL, Process

CLIENT = "browser"
KEY = "secret"
pytestmark = pytest.mark.clients
HARMONY = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
ANSWER = "<|channel|>analysis<|message|>Hm, é.<|end|><|start|>assistant<|channel|>final<|message|>Four ✓"
FIELDS = {"max_tokens": 24, "temperature": 1, "top_p": 1, "top_k": 0, "seed": 1}


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> EngineGate:
    return EngineGate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def url(chat_model: Path, gate: EngineGate) -> Iterator[str]:
    flags = ("--model", str(chat_model), "--served-model-name", "tiny", "--api-key", KEY)
    with served(*flags, main=MORTAL, **{VARIABLE: str(gate.folder)}) as url:
        yield url.removesuffix("/v1")


@pytest.fixture
def shut(gate: EngineGate) -> Iterator[EngineGate]:
    gate.shut()
    yield gate
    gate.open()


def play(client: Environment, chromium: str, function: str, url: str, *arguments: object) -> dict[str, Any]:
    """Run a function of playground.mjs; its page must not have complained."""
    found: dict[str, Any] = client.call_js("playground.mjs", function, chromium, url, KEY, *arguments)
    assert found.pop("complaints") == []
    return found


def ask(url: str, path: str, **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEY}"}
    response = httpx.post(f"{url}{path}", json={**FIELDS, **body}, headers=headers, timeout=LIMIT_S)
    assert response.is_success, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_a_reload_in_mid_stream_goes_on(client: Environment, chromium: str, url: str, shut: EngineGate) -> None:
    found = play(client, chromium, "reloadMidStream", url, str(shut.folder / "steps"), 1)
    assert found["before"] == found["after"]
    assert found["wasRunning"]
    assert len(found["after"]) < len(found["whole"])
    assert found["whole"] == ask(url, "/v1/completions", prompt="The cat")["text"]
    assert found["keys"] == 0, "the key is in sessionStorage only"


def test_a_text_goes_on_at_the_server_that_takes_the_place_of_a_dead_one(
    client: Environment, chromium: str, chat_model: Path, url: str, tmp_path: Path
) -> None:
    flags = ("--model", str(chat_model), "--served-model-name", "tiny", "--api-key", KEY)
    gate = EngineGate(tmp_path)
    gate.shut()
    dead = Process(*flags, main=MORTAL, **{VARIABLE: str(tmp_path)})
    try:
        with dead.wait_until_ready() as http:
            base = http.base_url
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(play, client, chromium, "loseServer", str(base), dead.popen.pid)
            assert dead.popen.wait(LIMIT_S) == -signal.SIGKILL
            with served(*flags, "--port", str(base.port)):
                page = found.result()
    finally:
        dead.kill()
    assert 0 < len(page["before"]) < len(page["whole"])
    assert page["whole"] == ask(url, "/v1/completions", prompt="The cat")["text"]
    assert page["status"].startswith("max tokens reached · 24 tokens")


def test_it_opens_on_chat(client: Environment, chromium: str, url: str) -> None:
    found = play(client, chromium, "opensOnChat", url)
    answer = ask(url, "/v1/chat/completions", messages=[{"role": "user", "content": "The cat"}])["message"]["content"]
    assert found == {"opened": ["", "Send"], "text": answer, "said": "The cat"}


def test_stop_ends_it(client: Environment, chromium: str, url: str, shut: EngineGate) -> None:
    assert play(client, chromium, "stopMidStream", url)["status"].startswith("stopped · 1 token ·")


def test_an_alternative_goes_on_with_the_same_seed_and_links_repeat_both(
    client: Environment, chromium: str, url: str
) -> None:
    found = play(client, chromium, "branchAndLink", url)
    plain = ask(url, "/v1/completions", prompt="The cat", logprobs=8, return_token_ids=True)
    assert "".join(found["first"]).removesuffix(" ∎") == plain["text"]
    assert found["branch"][:2] == found["first"][:2]
    assert found["branch"][2] != found["first"][2]
    assert [repeat["text"] for repeat in found["repeated"]] == [plain["text"], found["text"]]
    assert all("token for token" in repeat["notice"] for repeat in found["repeated"])
    assert "made with gptserve-other" in found["foreign"]
    assert "the text may be another one" in found["foreign"]


def test_light_or_dark_wide_or_narrow_axe_finds_nothing(client: Environment, chromium: str, url: str) -> None:
    light, dark = play(client, chromium, "lookAround", url)["found"]
    messages = [{"role": "user", "content": "Who are you?"}]
    said = ask(url, "/v1/chat/completions", messages=messages)["message"]["content"]
    for found in (light, dark):
        assert found["violations"] == []
        assert not found["scrolls"]
        assert (found["said"], found["text"]) == ("Who are you?", said)
        assert found["map"].startswith("Map of the KV cache: ")
    assert light["paper"] != dark["paper"]


def test_the_reasoning_of_a_chat_is_apart_from_its_text_and_no_part_of_the_next_turn(
    client: Environment, chromium: str
) -> None:
    tokenizer = ByteTokenizer(*MARKS)
    reply = say(tokenizer.encode_with_special(ANSWER), then_eos=True)
    engine = FakeEngineClient(reply, info=replace(INFO, vocab_size=EOS + 1 + len(MARKS), max_model_len=4096))
    server = LiveServer(engine, tokenizer=tokenizer, template=HARMONY, api_keys=(KEY,))
    with server.running():
        found = play(client, chromium, "chatInChannels", server.url)

    assert (found["first"]["reasoning"], found["first"]["text"]) == ("Hm, é.", "Four ✓ ∎")
    assert found["first"]["seen"] == "Hm, é.Four ✓ ∎", "the frame is not shown"
    assert found["linked"]["reasoning"] == "Hm, é."
    assert found["linked"]["text"].startswith("Four ")
    question, answer, next_question = found["turns"]
    assert (question, next_question) == ("Two and two?", "And three?")
    assert answer.startswith("Four ")
    assert answer.endswith("Four ✓")

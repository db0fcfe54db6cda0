"""GET / and what the page loads: who gets it, with which headers, and that nothing in it leads elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import gptserve.server.playground.router as router
from gptserve.engine.stats import EngineStats
from gptserve.server.tools.harmony import MARKS
from tests.server.conftest import MODEL, Api
from tests.server.fake_engine import EOS, ByteTokenizer, FakeEngineClient

FOLDER = Path(router.__file__).parent
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".css", ".html", ".js", ".svg"))
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MakeApi = Callable[..., Api]


def get(api: Api, path: str, key: str | None = None) -> httpx.Response:
    return api.get(path, headers=BROWSER | ({"authorization": f"Bearer {key}"} if key else {}))


def test_a_browser_gets_the_page_and_all_that_it_loads(api: Api) -> None:
    page = get(api, "/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    sources = [page.text, *(get(api, f"/playground/{name}").text for name in FILES if name.endswith(".js"))]
    loaded = {path for source in sources for path in re.findall(r'(?:src|href|from|import)[= ]"([^"]+)"', source)}
    assert {path.rpartition("/")[2] for path in loaded} == {*FILES} - {"index.html"}
    for name in {*FILES} - {"index.html"}:
        sent = get(api, f"/playground/{name}")
        assert (sent.status_code, sent.content) == (200, (FOLDER / name).read_bytes())
        assert sent.headers["x-content-type-options"] == "nosniff"
        assert sent.headers["content-type"].startswith(TYPES[Path(name).suffix])


def test_the_policy_lets_nothing_in_but_this_servers_files(api: Api) -> None:
    policy = dict(part.split(" ", 1) for part in get(api, "/").headers["content-security-policy"].split("; "))
    allowed = {name: value for name, value in policy.items() if value != "'none'"}
    assert allowed == {
        **dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'"),
        "require-trusted-types-for": "'script'",
    }
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} <= policy.keys()


@pytest.mark.parametrize("name", FILES)
def test_no_file_leads_elsewhere_and_none_has_anything_inline(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://[^\s\"']*", text)) <= {"http://www.w3.org/2000/svg"}, "a namespace"
    assert re.findall(r"<(?:script|style)>| style=| on\w+=\"|url\(|innerHTML|\beval\b", text) == []


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
def test_another_client_gets_the_error_of_an_unknown_route(api: Api, accept: str) -> None:
    response = api.get("/", headers={"accept": accept})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "there is no route GET /; /openapi.json lists the routes"


@pytest.mark.parametrize("playground", [True, False])
def test_a_head_request_for_the_root_is_told_that_there_is_a_server(make_api: MakeApi, *, playground: bool) -> None:
    api = make_api(FakeEngineClient(), playground=playground)
    response = api.request("HEAD", "/")
    assert (response.status_code, response.content) == (200, b"")


def test_without_the_playground_there_is_neither_page_nor_route(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), playground=False)
    for path in ("/", "/playground/playground.js", "/playground/engine"):
        assert get(api, path).status_code == 404
    assert "/playground/engine" not in api.get("/openapi.json").json()["paths"]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["index.html", "router.py", "__init__.py", "..%2Frouter.py", ""])
def test_nothing_else_of_the_folder_is_served(api: Api, name: str) -> None:
    assert get(api, f"/playground/{name}").status_code == 404


def test_the_page_is_open_and_the_engine_needs_a_key(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), api_keys=("secret",))
    for path in router.PAGE_PATHS:
        assert get(api, path).status_code == 200
    assert get(api, "/playground/engine").status_code == 401
    assert get(api, "/playground/engine", "secret").status_code == 200
    assert get(make_api(FakeEngineClient(), api_keys=("secret",), playground=False), "/").status_code == 401


def test_the_engine_is_described(api: Api) -> None:
    api.engine.stats = EngineStats(num_running=2, num_waiting=1)
    assert get(api, "/playground/engine").json() == {
        "model": MODEL,
        "system_fingerprint": "fake-1",
        "batch_invariant": True,
        "max_model_len": 256,
        "has_chat_template": True,
        "marks": None,
        "block_size": 16,
        "num_blocks": 64,
        "num_running": 2,
        "num_waiting": 1,
        "blocks": {"blocks_per_cell": 1, "cells": "21c."},
    }


def test_the_marks_of_reasoning_are_those_of_the_vocabulary(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), ByteTokenizer(*MARKS))
    marks = {str(EOS + 1 + i): mark for i, mark in enumerate(MARKS)}
    assert get(api, "/playground/engine").json()["marks"] == marks


def test_an_engine_that_restarts_has_no_blocks_to_show(api: Api) -> None:
    api.engine.is_restarting = True
    assert get(api, "/playground/engine").json()["blocks"] is None
    assert api.engine.num_looks == 0


def test_an_engine_that_died_is_an_error(api: Api) -> None:
    api.engine.is_alive = False
    response = get(api, "/playground/engine")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")

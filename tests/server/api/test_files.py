"""The routes of files: OpenAI's client, the shapes on the wire, hostile uploads, two keys against each other."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.api.test_openai_client import sync_client
from tests.server.conftest import Api, LiveServer
from tests.server.fake_engine import FakeEngineClient

Serve = Callable[..., LiveServer]
MakeApi = Callable[..., Api]
DATA = b'{"custom_id": "a"}\n' * 3


def post(api: Api, content: bytes = DATA, name: str = "in.jsonl", headers: Any = None, **form: str) -> httpx.Response:
    data = {"purpose": "batch", **form}
    return api.request("POST", "/v1/files", files={"file": (name, content)}, data=data, headers=headers)


def refusal(response: httpx.Response) -> tuple[int, str, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"], error["message"]


def test_openais_client_uploads_lists_reads_and_deletes(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    with sync_client(server) as client:
        made = client.files.create(file=("in.jsonl", DATA), purpose="batch")
        again = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
        assert (made.bytes, made.filename, made.purpose, made.status) == (len(DATA), "in.jsonl", "batch", "processed")
        assert again.expires_at == again.created_at + 3600
        assert client.files.retrieve(made.id) == made
        assert [file.id for file in client.files.list()] == [again.id, made.id]
        assert [file.id for file in client.files.list(limit=1, order="asc")] == [made.id, again.id], "page by page"
        assert client.files.list(purpose="batch_output").data == []
        assert client.files.list(purpose="fine-tune").data == []  # OpenAI's, which no file here has
        assert client.files.content(made.id).read() == DATA
        assert server.metric("gptserve_files_bytes") == len(DATA) + 1
        assert client.files.delete(made.id).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match=f"file '{made.id}' does not exist"):
                call(made.id)


def test_a_file_has_openais_shape(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient())
    answer = post(api).json()
    file_id, created = answer["id"], answer["created_at"]
    assert answer == {
        "id": file_id,
        "object": "file",
        "bytes": len(DATA),
        "created_at": created,
        "expires_at": created + 30 * 24 * 3600,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    listed = {"object": "list", "data": [answer], "first_id": file_id, "last_id": file_id, "has_more": False}
    assert api.get("/v1/files").json() == listed
    assert api.get(f"/v1/files?after={file_id}").json() == {**listed, "data": [], "first_id": None, "last_id": None}
    content = api.get(f"/v1/files/{file_id}/content")
    assert (content.content, content.headers["content-type"]) == (DATA, "application/octet-stream")
    assert content.headers["content-length"] == str(len(DATA))
    deleted = api.request("DELETE", f"/v1/files/{file_id}").json()
    assert deleted == {"id": file_id, "object": "file", "deleted": True}


@pytest.mark.parametrize(
    ("form", "param", "says"),
    [
        ({"purpose": "fine-tune"}, "purpose", "purpose must be batch, got 'fine-tune'"),
        ({"expires_after[seconds]": "3600"}, "expires_after", "expires_after.anchor must be created_at, got null"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "10"},
            "expires_after",
            "expires_after.seconds must be a whole number from 3600 to 2592000, got '10'",
        ),
    ],
)
def test_a_form_is_checked(make_api: MakeApi, form: dict[str, str], param: str, says: str) -> None:
    api = make_api(FakeEngineClient())
    assert refusal(post(api, **form)) == (400, "invalid_value", param, says)
    assert api.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=file-0", "after")]
)
def test_a_page_is_checked(refusing_api: Api, query: str, param: str) -> None:
    assert refusal(refusing_api.get(f"/v1/files?{query}"))[:3] == (400, "invalid_value", param)


def test_only_openais_purposes_are_listed(refusing_api: Api) -> None:
    says = (
        "purpose must be one of batch, batch_output, assistants, assistants_output, evals, fine-tune, "
        "fine-tune-results, user_data, vision, got 'null'"
    )
    assert refusal(refusing_api.get("/v1/files?purpose=null&purpose=null")) == (400, "invalid_value", "purpose", says)


def test_other_bodies_and_pages_of_others_are_refused(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), allowed_origins="https://good.example")
    answer = api.request("POST", "/v1/files", json={})
    assert refusal(answer)[:2] == (415, "unsupported_media_type")
    answer = post(api, headers={"origin": "https://bad.example"})
    assert refusal(answer)[:2] == (403, "host_not_allowed")
    assert post(api, headers={"origin": "https://good.example"}).status_code == 200


def test_a_file_beyond_the_limit_is_refused_and_leaves_nothing(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(FakeEngineClient(), state_dir=tmp_path, max_file_bytes=2**17)
    says = "a file may have at most 131072 bytes"
    assert refusal(post(api, b"x" * (2**17 + 1))) == (413, "body_too_large", "file", says)
    told = refusal(post(api, b"x" * 2**20))
    assert (told[0], told[3].startswith(f"{says}, got a body of 10")) == (413, True)
    assert post(api, b"x" * 2**17).status_code == 200
    assert len([*(tmp_path / "files").glob("*.bytes")]) == 1


def test_a_client_that_hangs_up_leaves_nothing(serve: Serve, tmp_path: Path) -> None:
    server = serve(FakeEngineClient(), state_dir=tmp_path)
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n"
        "content-type: multipart/form-data; boundary=b\r\n\r\n"
        '--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"x" * 2**20)
        while server.metric("gptserve_files_bytes") < 2**19:
            pass
    server.wait_until_idle()
    assert server.metric("gptserve_files_bytes") == 0
    assert [*(tmp_path / "files").glob("file-*")] == []


def test_two_keys_meet_nothing_of_each_other(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a: key-of-a\nb: key-of-b\n")
    server = serve(FakeEngineClient(), api_key_file=tmp_path / "keys")
    a, b = (openai.OpenAI(base_url=server.url + "/v1", api_key=f"key-of-{name}", max_retries=0) for name in "ab")
    file_id = a.files.create(file=DATA, purpose="batch").id
    for call in (b.files.retrieve, b.files.content, b.files.delete):
        with pytest.raises(openai.NotFoundError, match=f"file '{file_id}' does not exist"):
            call(file_id)
    assert b.files.list().data == []
    assert a.files.content(file_id).read() == DATA
    assert httpx.get(f"{server.url}/v1/files").status_code == 401
    a.close()
    b.close()


def test_files_are_there_after_a_restart(serve: Serve, tmp_path: Path) -> None:
    with LiveServer(FakeEngineClient(), state_dir=tmp_path).running() as first, sync_client(first) as client:
        file_id = client.files.create(file=DATA, purpose="batch").id
    with sync_client(serve(FakeEngineClient(), state_dir=tmp_path)) as client:
        assert client.files.content(file_id).read() == DATA

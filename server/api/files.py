"""The routes of files, in the shapes of OpenAI's API: uploads for batches, and what batches have written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, BinaryIO, get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gptserve.server.api.background import owner_of
from gptserve.server.api.pages import page_json, page_of, page_parameters
from gptserve.server.completions.service import Service
from gptserve.server.core.errors import ServiceError, show, shutting_down
from gptserve.server.files.files import MAX_FILES, PIECE_BYTES, Files
from gptserve.server.files.store import FileRecord, Purpose
from gptserve.server.files.upload import read_upload
from gptserve.server.http.envelope import log_fields
from gptserve.server.schemas.files import DeletedFile, FileList, FileObject
from gptserve.server.schemas.openapi import ID, error_responses

_PATH = "/v1/files"
_PURPOSES = (
    *get_args(Purpose),
    *("assistants", "assistants_output", "evals", "fine-tune", "fine-tune-results", "user_data", "vision"),
)  # OpenAI's; there are files of the first two
_PURPOSE = {"name": "purpose", "in": "query", "schema": {"enum": list(_PURPOSES)}}
_MIN_KEPT_S, _MAX_KEPT_S = 3600, 30 * 24 * 3600
_MAX_FORM_BYTES = 2**16  # beside the file: more parts and headers are refused as they come
_FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": _MIN_KEPT_S, "maximum": _MAX_KEPT_S},
    },
    "required": ["file", "purpose"],
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def files_router(service: Service, files: Files) -> APIRouter:
    """Return the routes."""
    router, routes = APIRouter(tags=["files"]), _Routes(service, files)
    router.post(
        _PATH,
        summary="Keep a file for a batch",
        openapi_extra=_UPLOAD,
        responses={200: {"model": FileObject}, **error_responses(400, 401, 408, 413, 415, 429, 500, 503)},
    )(routes.create_file)
    router.get(
        _PATH,
        summary="List your files, newest first",
        openapi_extra={"parameters": [_PURPOSE, *page_parameters(MAX_FILES, MAX_FILES)]},
        responses={200: {"model": FileList}, **error_responses(400, 401)},
    )(routes.list_files)
    router.get(
        f"{_PATH}/{{id}}",
        summary="Describe a file",
        openapi_extra={"parameters": [ID]},
        responses={200: {"model": FileObject}, **error_responses(401, 404)},
    )(routes.retrieve_file)
    router.get(
        f"{_PATH}/{{id}}/content",
        summary="Return the bytes of a file",
        openapi_extra={"parameters": [ID]},
        response_class=Response,
        responses={200: {"content": _BYTES}, **error_responses(401, 404, 500)},
    )(routes.download_file)
    router.delete(
        f"{_PATH}/{{id}}",
        summary="Delete a file that no batch needs",
        openapi_extra={"parameters": [ID]},
        responses={200: {"model": DeletedFile}, **error_responses(401, 404, 409, 500)},
    )(routes.delete_file)
    return router


class _Routes:
    """The functions of the routes."""

    def __init__(self, service: Service, files: Files) -> None:
        self._service = service
        self._files = files

    async def create_file(self, request: Request) -> Response:
        """Keep a file."""
        service, owner = self._service, owner_of(request)
        if service.lifecycle.is_draining:
            raise shutting_down()
        service.check_shared("a file")
        self._check_head(request)
        with service.lifecycle.active():
            async with self._files.upload(owner) as upload:
                content_type = request.headers.get("content-type", "")
                form = await read_upload(content_type, request.stream(), upload, service.options.body_limit_s)
                keep_s = _check_form(form.fields)
                assert form.filename is not None
                record = await upload.keep(form.filename, "batch", keep_s)
        log_fields(request.scope)["file_id"] = record.file_id
        return JSONResponse(to_file_object(record).model_dump())

    async def list_files(self, request: Request) -> Response:
        """List the files of a key."""
        purpose = request.query_params.get("purpose")
        if purpose not in (None, *_PURPOSES):
            message = f"purpose must be one of {', '.join(_PURPOSES)}, got {show(purpose)}"
            raise ServiceError("invalid_value", message, param="purpose")
        listed = await self._files.list_files(owner_of(request), purpose)
        page, has_more = page_of(request, listed, lambda record: record.file_id, most=MAX_FILES, default=MAX_FILES)
        return await self._service.in_thread(_list_response, page, has_more)

    async def retrieve_file(self, request: Request) -> Response:
        """Describe a file."""
        return JSONResponse(to_file_object(await self._found(request)).model_dump())

    async def download_file(self, request: Request) -> Response:
        """Return the bytes of a file."""
        record = await self._found(request)
        file = await self._files.open(record)
        headers = {"content-length": str(record.num_bytes), "x-content-type-options": "nosniff"}
        return _Content(file, headers)

    async def delete_file(self, request: Request) -> Response:
        """Delete a file."""
        record = await self._found(request)
        await self._files.delete(record)
        return JSONResponse(DeletedFile(id=record.file_id).model_dump())

    async def _found(self, request: Request) -> FileRecord:
        return await self._files.find(request.path_params["id"], owner_of(request))

    def _check_head(self, request: Request) -> None:
        """Raise ServiceError if the headers announce too much, or a page sends a form that no browser asks about."""
        settings, origin = self._service.options.settings, request.headers.get("origin")
        if origin is not None and not {"*", origin} & set(settings.origins):
            message = f"a page of {show(origin)} may not upload files: --allowed-origins names those that may"
            raise ServiceError("host_not_allowed", message)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > settings.max_file_bytes + _MAX_FORM_BYTES:
            rule = f"a file may have at most {settings.max_file_bytes} bytes"
            raise ServiceError("body_too_large", f"{rule}, got a body of {declared}", param="file")


def to_file_object(record: FileRecord) -> FileObject:
    """Return a file as clients see it."""
    return FileObject(
        id=record.file_id,
        bytes=record.num_bytes,
        created_at=record.created,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )


def _list_response(page: list[FileRecord], has_more: bool) -> Response:
    return JSONResponse(page_json([to_file_object(record).model_dump() for record in page], has_more=has_more))


def _check_form(fields: Mapping[str, str]) -> int | None:
    """Return how many seconds to keep a file; None if it is not said. Raises ServiceError."""
    purpose = fields.get("purpose")
    if purpose is None:
        raise ServiceError("missing_required_parameter", "purpose is required", param="purpose")
    if purpose != "batch":
        raise ServiceError("invalid_value", f"purpose must be batch, got {show(purpose)}", param="purpose")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    return None if anchor is None and seconds is None else check_expiry("expires_after", anchor, seconds)


def check_expiry(name: str, anchor: Any, seconds: Any) -> int:
    """Return the seconds after which a file expires. Raises ServiceError."""
    if anchor != "created_at":
        raise ServiceError("invalid_value", f"{name}.anchor must be created_at, got {show(anchor)}", param=name)
    if re.fullmatch("[0-9]{1,9}", str(seconds)) is None or not _MIN_KEPT_S <= int(seconds) <= _MAX_KEPT_S:
        rule = f"{name}.seconds must be a whole number from {_MIN_KEPT_S} to {_MAX_KEPT_S}"
        raise ServiceError("invalid_value", f"{rule}, got {show(seconds)}", param=name)
    return int(seconds)


class _Content(StreamingResponse):
    """Answers with the bytes of a file, piece by piece as the client takes them."""

    def __init__(self, file: BinaryIO, headers: Mapping[str, str]) -> None:
        super().__init__(self._pieces(), headers=headers, media_type="application/octet-stream")
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the file ends or the client hangs up."""
        with self._file:
            await super().__call__(scope, receive, send)

    async def _pieces(self) -> AsyncIterator[bytes]:
        while data := await asyncio.to_thread(self._file.read, PIECE_BYTES):
            yield data

"""The shapes of the routes of files: a file, a list of files, the form of an upload."""

from __future__ import annotations

from typing import Literal

from gptserve.server.schemas.base import _Model, _Page


class FileObject(_Model):
    """A file without its bytes."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    """seconds since the epoch, as of all times"""
    expires_at: int | None
    """when it is deleted"""
    filename: str
    purpose: Literal["batch", "batch_output"]
    """batch_output is of files that batches write"""
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(_Page):
    """A page of the files of a key."""

    data: list[FileObject]


class DeletedFile(_Model):
    """The answer to DELETE."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True

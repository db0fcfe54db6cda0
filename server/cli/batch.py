"""`gptserve batch`: answers the lines of a file in this process, without a server, and goes on where it stopped.

The output file is the state: each line of it is a result, whose id says of which line, input and model it is. `main.py`
calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from gptserve.server.cli.errors import CommandError
from gptserve.server.cli.flags import add_flags
from gptserve.server.cli.terminal import is_terminal
from gptserve.server.core.settings import ServerSettings

if TYPE_CHECKING:  # they import the web framework
    from tqdm import tqdm

    from gptserve.engine.process.client import EngineClient
    from gptserve.server.batches.lines import RawLine
    from gptserve.server.batches.work import Batch
    from gptserve.server.completions.service import Service

_READ_BYTES = 2**20


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gptserve batch`, and those of `serve`."""
    parser.add_argument("-i", "--input-file", type=Path, required=True, help="requests, one JSON object a line")
    parser.add_argument("-o", "--output-file", type=Path, required=True, help="file to add the results to")
    parser.add_argument("MODEL", nargs="?", help="folder, GGUF file or hub id (default: the embedded storyteller)")
    add_flags(parser)


def run_batch(settings: ServerSettings, source: Path, target: Path) -> tuple[int, int]:
    """Answer the lines of `source` that have no result in `target` yet; return how many lines there are, and failed.

    Raises CommandError, WeightsError or EngineError.
    """
    try:
        with source.open("rb") as lines, _locked(target) as results:
            return asyncio.run(_run(settings, lines, results))
    except OSError as error:
        raise CommandError(f"cannot answer {source} in {target}: {error.strerror}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open the output file for this process alone, which others may read. Raises CommandError or OSError."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"another process writes to {path}") from None
        yield file


async def _run(settings: ServerSettings, lines: BinaryIO, results: BinaryIO) -> tuple[int, int]:
    from gptserve.server.parts import make_engine, sampling_defaults
    from gptserve.weights.source import model_name, resolve_model

    folder = resolve_model(settings.model, settings.revision)
    engine = make_engine(settings, folder)
    try:
        starting = asyncio.create_task(engine.start())
        from gptserve.server.completions.model_folder import load_model

        names = settings.own_names or (model_name(settings.model),)
        await starting
        model = load_model(folder, engine, names, settings, *sampling_defaults(settings, folder))
        try:
            service = _service(settings, engine, model)
            digest = await asyncio.to_thread(_digest, lines, engine.info.fingerprint)
            return await _Run(service, digest, lines, results).run()
        finally:
            model.close()
    finally:
        await engine.close()


def _service(settings: ServerSettings, engine: EngineClient, model: object) -> Service:
    from gptserve.server.completions.app_options import AppOptions
    from gptserve.server.completions.model import Model, ModelRegistry
    from gptserve.server.completions.service import Service
    from gptserve.server.core.lifecycle import Lifecycle
    from gptserve.server.core.metrics import Metrics

    assert isinstance(model, Model)
    return Service(ModelRegistry(model), AppOptions(settings), Lifecycle(), Metrics(engine, model.name))


def _digest(lines: BinaryIO, fingerprint: str) -> str:
    """Return a digest of the input file and the model: the id of the batch."""
    digest = hashlib.sha256(f"{fingerprint}\n".encode())
    while part := lines.read(_READ_BYTES):
        digest.update(part)
    return digest.hexdigest()


class _Run:
    """One run over the lines. Results are added as they come, each by one write."""

    def __init__(self, service: Service, digest: str, lines: BinaryIO, results: BinaryIO) -> None:
        from gptserve.server.batches.work import Batch

        self._service = service
        self._batch: Batch = Batch(digest, int(time.time()))
        self._lines = lines
        self._results = results
        self._num_failed = 0
        self._repeated: set[int] = set()
        self._ended = asyncio.Event()
        # So many lines are in memory at once: the engine's slots are full, and no more are read.
        self._room = asyncio.Semaphore(service.model.engine.info.max_num_seqs)

    async def run(self) -> tuple[int, int]:
        """Compute what is missing; return how many lines there are, and how many of them failed."""
        from tqdm import tqdm

        from gptserve.server.batches.lines import read_lines, repeated_lines
        from gptserve.server.batches.work import result_id

        max_bytes = self._service.options.settings.max_body_bytes
        done = await asyncio.to_thread(self._read_results)
        self._lines.seek(0)
        numbers, self._repeated = await asyncio.to_thread(repeated_lines, read_lines(self._lines, max_bytes))
        if not done.keys() <= {result_id(self._batch, n) for n in numbers}:
            raise CommandError("the output file has results of another input file or another model; name a new file")
        self._batch = replace(self._batch, created=next(iter(done.values()), None) or self._batch.created)
        self._lines.seek(0)
        unread = read_lines(self._lines, max_bytes)
        try:
            hidden = not is_terminal(sys.stderr)
            bar: tqdm[NoReturn] = tqdm(total=len(numbers), initial=len(done), unit="line", disable=hidden)
            with bar:
                async with asyncio.TaskGroup() as group:
                    while (raw := await asyncio.to_thread(next, unread, None)) is not None:
                        if result_id(self._batch, raw.n) not in done:
                            await self._room.acquire()
                            group.create_task(self._answer(raw, bar))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return len(numbers), self._num_failed

    def _read_results(self) -> dict[str, int | None]:
        """Return the ids of the results so far, with the time in their answers; cut off what is half written.

        Raises CommandError.
        """
        from gptserve.server.batches.work import has_failed

        done: dict[str, int | None] = {}
        end = 0
        self._results.seek(0)
        with open(self._results.fileno(), "rb", closefd=False) as file:
            for data in file:
                if not data.endswith(b"\n"):
                    break  # its writer was killed
                end += len(data)
                try:
                    result = json.loads(data)
                    body = (result["response"] or {}).get("body", {})
                    done[result["id"]] = body.get("created")
                    self._num_failed += has_failed(result)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise CommandError("the output file holds something other than results; name a new file") from None
        self._results.truncate(end)
        self._results.seek(end)
        return done

    async def _answer(self, raw: RawLine, bar: tqdm[NoReturn]) -> None:
        from gptserve.server.batches.work import compute_line

        try:
            is_repeated = raw.n in self._repeated
            text, failed = await compute_line(
                self._service, self._batch, raw, self._wait_for_an_end, is_repeated=is_repeated
            )
            data = text.encode() + b"\n"
            if self._results.write(data) != len(data):  # the next run cuts it off
                raise CommandError("the output file cannot grow: the disk is full")
        finally:
            self._room.release()
            self._ended.set()
        self._num_failed += failed
        bar.update()

    async def _wait_for_an_end(self, _wait_s: float) -> None:
        """Return when a line has ended after this call: nothing else is in the queue."""
        self._ended.clear()
        await self._ended.wait()

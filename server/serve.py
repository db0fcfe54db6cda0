"""The life of a serving process: bind, load, serve, drain, end.

Joins the engine's client, the app and uvicorn, and decides when the process ends and with which status. Knows nothing
of routes or of the engine's work. `cli` calls `serve`; the web framework is imported while the engine loads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from gptserve.engine.process.client import EngineClient
from gptserve.engine.process.garbage import without_collections
from gptserve.server.batches.store import BatchStoreError
from gptserve.server.core.keys import KeyFileError
from gptserve.server.core.lifecycle import Lifecycle
from gptserve.server.core.settings import ServerSettings
from gptserve.server.files.store import FileStoreError
from gptserve.server.jobs.store import JobStoreError
from gptserve.server.parts import StartError as StartError
from gptserve.server.parts import make_app, make_engine
from gptserve.server.stores import make_stores, open_store, place_of, start_kept
from gptserve.weights.source import Download, fetch_model, local_model

if TYPE_CHECKING:  # they import the web framework
    from fastapi import FastAPI

    from gptserve.server.batches.batches import Batches
    from gptserve.server.completions.model import Model
    from gptserve.server.http.loading import LoadingApp, Progress
    from gptserve.server.http.server import HttpServer
    from gptserve.server.jobs.background import BackgroundJobs
    from gptserve.server.operations.tracing import Tracing

EXIT_OK = 0
EXIT_FAILED = 1  # not 0, so that an orchestrator restarts the server
LAST_EVENTS_LIMIT_S = 5  # for clients to read the last events after the engine has closed
HUNG_UP_LIMIT_S = 5  # for requests that wait for the journal although their client has gone
CLOSING_LIMIT_S = 20  # for all that follows draining: the two above, the engine's 5 s, the journal's last writes
HURRIED_LIMIT_S = 5  # the same after a second signal; only a hung disk or thread takes longer

logger = logging.getLogger(__name__)


def serve(settings: ServerSettings) -> int:
    """Serve until a signal or the engine's death; return the exit status.

    Before this, SIGTERM must raise KeyboardInterrupt, as SIGINT does.
    Raises StartError, WeightsError or EngineError when the server cannot start.
    """
    with _bind(settings.host, settings.port) as listener:
        process = ServingProcess(settings, local_model(settings.model, settings.revision), listener)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                status = runner.run(process.run())
            except Exception as error:
                if not process.hangs:
                    raise
                logger.critical("ending: %s", error)
                status = EXIT_FAILED
            if process.hangs:
                sys.stderr.flush()
                os._exit(status)  # any other exit waits for these threads
            return status


class ServingProcess:
    """One server from loading to its end. The first SIGINT or SIGTERM drains it, the second ends it at once.

    Without a folder it downloads the model first. After `run`, `hangs` says whether a thread goes on, such as one that
    downloads or waits for a hung disk.
    """

    def __init__(self, settings: ServerSettings, folder: Path | None, listener: socket.socket) -> None:
        self._settings = settings
        self._folder = folder
        self._listener = listener
        self._download = Download()
        self._told_to_stop = asyncio.Event()
        self._told_twice = asyncio.Event()
        self._out_of_time = asyncio.Event()
        self.hangs = False
        self._stores = self._store, self._file_store, self._batch_store = make_stores(settings)
        self._batches: Batches | None = None
        self._starting: asyncio.Task[None] | None = None  # while the database is away
        self._http: HttpServer | None = None
        self._loading_app: LoadingApp | None = None
        self._serving: asyncio.Task[None] | None = None
        self._model: Model | None = None
        self._tracing: Tracing | None = None
        self._engine: EngineClient | None = None

    async def run(self) -> int:
        """Load, then serve; return the exit status. In every case the engine ends, too."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._receive_signal)
        try:
            loading = asyncio.create_task(self._load())
            await _first(self._told_to_stop.wait(), loading)
            if not loading.done():
                loading.cancel()
                logger.info("shutting down, Ctrl-C again to quit")
                return EXIT_OK
            return await self._serve(*loading.result())
        finally:
            self._limit_closing(CLOSING_LIMIT_S)
            self._start_no_more()
            if self._loading_app is not None:
                self._loading_app.give_up()
            if self._engine is not None:
                await self._finish(self._engine.close(), "the engine")
            if self._http is not None and self._serving is not None:
                self._http.should_exit = True
                await self._finish(self._serving, "the HTTP server")
            if self._model is not None:
                self._model.close()
            if self._batches is not None:
                await self._finish(self._batches.suspend(), "batches")
            await self._finish(self._store.close(), "the journal")
            await self._finish(asyncio.gather(self._file_store.close(), self._batch_store.close()), "the files")
            if self._tracing is not None:
                await self._finish(asyncio.to_thread(self._tracing.close), "the traces")
            await self._finish(loop.shutdown_default_executor(), "a thread")

    async def _load(self) -> tuple[BackgroundJobs, Lifecycle]:
        """Start to listen, load the model, then pass requests on to the application."""
        try:
            await open_store(self._store)  # fails before the model is loaded
            opening = None
            if self._folder is None:
                opening = asyncio.create_task(self._start_listening())
                await opening
                self._folder = await self._fetch()
            engine = self._engine = make_engine(self._settings, self._folder)
            starting = asyncio.create_task(engine.start())  # first: imports in other threads would delay the spawn
            opening = opening or asyncio.create_task(self._start_listening())
            making_app = asyncio.to_thread(self._make_app, engine, self._folder)
            loading_app, (app, announce), _ = await asyncio.gather(opening, making_app, starting)
            kept = app.state.files, app.state.jobs, app.state.batches
            self._starting = await start_kept(self._store, kept)
            self._batches = app.state.batches
        except (JobStoreError, FileStoreError, BatchStoreError) as error:
            raise StartError(f"{place_of(self._settings)}: {error}") from error
        except KeyFileError as error:  # it was a good file when the settings were checked
            raise StartError(str(error)) from error
        assert self._http is not None
        app.state.metrics.connections = self._http.connections
        self._http.on_lag = app.state.metrics.event_loop_lag.observe
        loading_app.open(app)
        announce(self._http.url)
        return app.state.jobs, app.state.lifecycle

    async def _fetch(self) -> Path:
        """Download the model in a thread that the end of the process does not wait for."""
        thread, settings = ThreadPoolExecutor(1), self._settings
        try:
            return await asyncio.get_running_loop().run_in_executor(
                thread, fetch_model, str(settings.model), settings.revision, self._download
            )
        except asyncio.CancelledError:
            self.hangs = True
            raise
        finally:
            thread.shutdown(wait=False)

    async def _start_listening(self) -> LoadingApp:
        """Start to listen; requests wait or are refused until the application is open."""
        listens = asyncio.Event()
        server, loading_app = await asyncio.to_thread(self._make_server, listens.set)
        self._http, self._loading_app = server, loading_app
        self._serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        await _first(listens.wait(), self._serving)
        if self._serving.done():
            await self._serving
        logger.info("listening on %s; until the model is loaded, requests wait a moment and then get 503", server.url)
        return loading_app

    def _receive_signal(self) -> None:
        if self._told_to_stop.is_set():
            self._told_twice.set()
            self._limit_closing(HURRIED_LIMIT_S)
        self._told_to_stop.set()

    def _limit_closing(self, limit_s: float) -> None:
        """Let `_finish` wait for at most limit_s from now, or until an earlier limit."""
        asyncio.get_running_loop().call_later(limit_s, self._out_of_time.set)

    async def _finish(self, closing: Awaitable[object], name: str) -> None:
        """Wait for one step of the shutdown up to the time limit."""
        task = asyncio.ensure_future(closing)
        await _first(task, self._out_of_time.wait())
        if task.done():
            task.result()
        else:
            logger.warning("shutdown: gave up waiting for %s", name)
            self.hangs = True

    def _start_no_more(self) -> None:
        if self._starting is not None:
            self._starting.cancel()

    def _make_server(self, on_listening: Callable[[], object]) -> tuple[HttpServer, LoadingApp]:
        from gptserve.server.http.connections import Connections, affordable_connections
        from gptserve.server.http.loading import PATIENCE_S, LoadingApp
        from gptserve.server.http.server import HttpServer
        from gptserve.server.http.tls import Tls

        settings = self._settings
        try:
            connections = Connections(affordable_connections(settings.max_connections))
            files = settings.ssl_certfile, settings.ssl_keyfile
            tls = None if files[0] is None or files[1] is None else Tls(files[0], files[1])
        except ValueError as error:
            raise StartError(str(error)) from error
        loading_app = LoadingApp(self._progress, PATIENCE_S)
        write_limit_s, stop_limit_s = settings.write_timeout_s, LAST_EVENTS_LIMIT_S + HUNG_UP_LIMIT_S
        server = HttpServer(
            loading_app, on_listening, connections, write_limit_s=write_limit_s, stop_limit_s=stop_limit_s, tls=tls
        )
        return server, loading_app

    def _progress(self) -> Progress:
        from gptserve.server.http.loading import Progress

        if self._engine is None:
            download = self._download
            done, total = download.num_files, download.num_files_total
            words = (
                f"{done} of {total} files, {download.num_bytes / 1e6:,.1f} MB" if total else "its files are looked up"
            )
            return Progress("downloading", done / total if total else 0.0, words)
        done, total = self._engine.load_progress
        share = done / total if total else 0.0
        return Progress("loading", share, f"{share:.0%} of the weights are read")

    def _make_app(self, engine: EngineClient, folder: Path) -> tuple[FastAPI, Callable[[str], None]]:
        """Return the application, and a function that logs the banner for a URL.

        Imports the web framework and opens the tokenizer, in a thread: this takes as long as to load a small model.
        """
        with without_collections():
            from gptserve.server.operations.banner import log_banner

        app, self._model, self._tracing = make_app(self._settings, engine, folder, *self._stores)
        return app, partial(log_banner, self._model, self._settings)

    async def _serve(self, jobs: BackgroundJobs, lifecycle: Lifecycle) -> int:
        server, serving, engine = self._http, self._serving, self._engine
        assert server is not None
        assert serving is not None
        assert engine is not None
        await _first(self._told_to_stop.wait(), engine.wait_until_dead(), serving)
        self._start_no_more()
        if self._told_to_stop.is_set():
            await self._drain(jobs, lifecycle, engine)
        self._limit_closing(CLOSING_LIMIT_S)
        status = EXIT_OK
        if not engine.is_alive:
            status = EXIT_FAILED
            logger.critical("ending: %s", await engine.wait_until_dead())
        await self._finish(engine.close(), "the engine")  # running streams end with an error event
        server.should_exit = True
        await _first(serving, self._told_twice.wait(), asyncio.sleep(LAST_EVENTS_LIMIT_S))
        if not serving.done():
            why = "told to stop again" if self._told_twice.is_set() else f"{LAST_EVENTS_LIMIT_S} s have passed"
            server.hang_up(why)
        await self._finish(serving, "requests that wait for the journal")
        await self._finish(jobs.settle(), "background completions")
        if self._batches is not None:
            await self._finish(self._batches.suspend(), "batches")
        await self._finish(jobs.leave(), "the database of stored completions")
        return status

    async def _drain(self, jobs: BackgroundJobs, lifecycle: Lifecycle, engine: EngineClient) -> None:
        """Refuse new requests, suspend durable background jobs, wait for other requests up to the time limit."""
        limit_s = self._settings.shutdown_timeout_s
        lifecycle.drain()
        waiting = f", waiting up to {limit_s:g} s for {_requests(lifecycle.num_active)}" if lifecycle.num_active else ""
        logger.info("shutting down%s, Ctrl-C again to quit", waiting)
        idle = asyncio.gather(jobs.suspend(), lifecycle.wait_idle())  # suspends even with a time limit of 0
        await _first(idle, self._told_twice.wait(), engine.wait_until_dead(), asyncio.sleep(limit_s))
        if lifecycle.num_active:
            logger.warning("cutting off %s", _requests(lifecycle.num_active))


def _bind(host: str, port: int) -> socket.socket:
    """Bind the address, so that a conflict is known before the model is loaded. Clients cannot connect yet."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def _requests(number: int) -> str:
    return f"{number} request{'' if number == 1 else 's'}"


async def _first(*awaitables: Awaitable[object]) -> None:
    """Return when one of these is done. Cancel the other coroutines, but not the other futures."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, awaitable in zip(futures, awaitables, strict=True):
            if future is not awaitable:
                future.cancel()

"""Keeps an engine running: if it dies, another one starts and every stream continues at its next token.

`Supervisor` is an EngineClient over one ProcessClient after another. Because a completion is a pure function, a live
request is submitted again as its prompt and its tokens so far. It knows neither text nor HTTP. Torch-free.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from gptserve.engine.blame import MAX_CONVICTIONS_IN_A_ROW
from gptserve.engine.errors import DeathKind, EngineDiedError, EngineStartError, ScarcityError
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.process.client import EngineClient, OutputSink
from gptserve.engine.process.live import LiveRequest
from gptserve.engine.process.process_client import ProcessClient
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap
from gptserve.engine.stats import EngineStats

_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 10.0
_STABLE_AFTER_S = 60.0  # the death of an idle engine that lived longer begins a new row of restarts

logger = logging.getLogger(__name__)


class Supervisor(EngineClient):
    """An EngineClient whose engine may die: by a signal or an exception, or if it makes no step for stall_limit_s.

    - A death costs clients only time. Requests that are submitted while no engine is ready wait for the next one.
    - A convicted request (engine/blame.py) alone fails, with FinishReason.ERROR. Scheduler computes suspects alone.
    - It gives up after max_restarts restarts in a row without a token, or MAX_CONVICTIONS_IN_A_ROW convictions without
      one. Then streams end with the cause of death. A conviction sets the restarts in a row to 0. The first restart in
      a row is immediate; each later one waits twice as long as the one before.
    - An engine that does not load within load_limit_s is killed: `start` fails, or the restart counts as a death.
    - If the system lacks descriptors, processes, threads or memory, a restart is tried for ever and counts once.
    - An engine with another fingerprint would compute other numbers, so it takes over no requests.

    Invariant: `_live` holds the live requests, in order of arrival; if an engine is ready, it has all of them.
    """

    def __init__(
        self, make_client: Callable[[], ProcessClient], *, max_restarts: int, stall_limit_s: float, load_limit_s: float
    ) -> None:
        super().__init__()
        self._make_client = make_client
        self._max_restarts = max_restarts
        self._stall_limit_s = stall_limit_s
        self._load_limit_s = load_limit_s
        self._client = make_client()
        self._earlier_stats = EngineStats()
        self._num_prompt_tokens = 0
        self._live: dict[str, LiveRequest] = {}
        self._is_ready = False
        self._num_restarts_in_a_row = 0
        self._num_convictions_in_a_row = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def stats(self) -> EngineStats:
        current = self._client.stats if self._is_ready else EngineStats(num_waiting=len(self._live))
        # Each engine counts the prompts that it gets, and requests that go on are given to several.
        return replace(current.after(self._earlier_stats), num_prompt_tokens=self._num_prompt_tokens)

    @property
    def load_progress(self) -> tuple[int, int]:
        return self._client.load_progress

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    async def start(self) -> None:
        """Load the model and decode one token. Raises EngineStartError; a first start is not tried again."""
        try:
            await self._load()
        except EngineStartError as error:
            self._end(EngineDiedError(str(error), DeathKind.LOAD))
            raise
        self._info, self._is_ready = self._client.info, True
        self._task = asyncio.create_task(self._supervise())

    def enqueue(self, requests: Sequence[AnyRequest], sink: OutputSink) -> None:
        self._live |= {request.request_id: LiveRequest(request, sink) for request in requests}
        self._num_prompt_tokens += sum(len(request.prompt_token_ids) for request in requests)
        if self._is_ready:
            self._client.enqueue(requests, self)

    def abort(self, request_ids: Sequence[str]) -> None:
        known = [request_id for request_id in request_ids if self._live.pop(request_id, None) is not None]
        if self._is_ready:
            self._client.abort(known)

    def look(self, show: Callable[[BlockMap], None]) -> None:
        if self._is_ready:
            self._client.look(show)

    async def close(self) -> None:
        self._end(EngineDiedError("the engine was closed", DeathKind.CLOSED))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._client.close()

    def push(self, output: TokenOutput) -> None:
        """Pass an output on to its stream."""
        live = self._live.get(output.request_id)
        if live is None:
            return  # closed meanwhile
        if live.take(output):
            self._num_restarts_in_a_row = self._num_convictions_in_a_row = 0
        if output.finish_reason is not None:
            del self._live[output.request_id]
        live.stream.push(output)

    def fail(self, error: EngineDiedError) -> None:
        """Do nothing: `_supervise` handles deaths."""

    async def _supervise(self) -> None:
        clock = asyncio.get_running_loop().time
        end = EngineDiedError("the supervisor failed", DeathKind.RAISED)
        try:
            while True:
                ready_at = clock()
                death = await self._until_dead()
                self._is_ready = False
                self._earlier_stats = self._client.stats.after(self._earlier_stats)
                if not self._live and clock() - ready_at > _STABLE_AFTER_S:
                    self._num_restarts_in_a_row = 0
                self._judge(death)
                await self._replace(death)
        except EngineDiedError as error:
            end = error
        finally:
            if self._death is None:  # it was not closed
                self._end(end)
                self._died.set()

    async def _until_dead(self) -> EngineDiedError:
        """Return how the engine died; kill it if it makes no step for too long."""
        clock = asyncio.get_running_loop().time
        death = asyncio.ensure_future(self._client.wait_until_dead())
        try:
            while not death.done():
                since = self._client.waiting_since
                left_s = self._stall_limit_s - (0.0 if since is None else clock() - since)
                if left_s <= 0:
                    self._client.kill(f"the engine made no step for {self._stall_limit_s:g} s", DeathKind.STALLED)
                    await death
                else:
                    await asyncio.wait([death], timeout=left_s)
            return death.result()
        finally:
            death.cancel()

    def _judge(self, death: EngineDiedError) -> None:
        """Blame the request on trial or, without one, all that may have been running."""
        in_order = sorted(
            self._live.values(), key=lambda live: (live.request.is_filler, live.request.priority)
        )  # stable: then by arrival
        on_trial = next((live for live in in_order if live.blame.is_suspect), None)
        # Scheduler serves in order: the requests after these were waiting for a running slot.
        computed = in_order[: self.info.max_num_seqs] if on_trial is None else [on_trial]
        for live in in_order:
            live.blame = live.blame.engine_died_elsewhere()
        for live in computed:
            live.blame = live.blame.engine_died(on_trial=live is on_trial)
        if on_trial is not None and on_trial.blame.is_convicted:
            self._num_restarts_in_a_row = 0
            self._num_convictions_in_a_row += 1
            request_id = on_trial.request.request_id
            logger.error("request %s fails: the engine died each time it computed this request", request_id)
            message = f"the engine died each time it computed this request; the last time: {death}"
            self.push(TokenOutput(request_id, (), finish_reason=FinishReason.ERROR, error=message))

    async def _replace(self, death: EngineDiedError) -> None:
        """Start engines until one is ready, and give it all live requests. Raises EngineDiedError on giving up."""
        clock = asyncio.get_running_loop().time
        died_at = clock()
        if self._num_convictions_in_a_row >= MAX_CONVICTIONS_IN_A_ROW:
            in_a_row = f"{MAX_CONVICTIONS_IN_A_ROW} requests in a row, each computed alone"
            raise EngineDiedError(f"{death}; engines died with {in_a_row}", death.kind)
        while self._num_restarts_in_a_row < self._max_restarts:
            self._num_restarts_in_a_row += 1
            self._restarts[death.kind] += 1
            logger.error("%s; restarting it; live requests: %d", death, len(self._live))
            if self._num_restarts_in_a_row > 1:
                await asyncio.sleep(_delay_s(self._num_restarts_in_a_row - 2))
            try:
                await self._load_another()
            except EngineStartError as error:
                death = EngineDiedError(str(error), DeathKind.LOAD)
                continue
            if self._client.info.fingerprint != self.info.fingerprint:
                await self._client.close()
                reason = "the engine restarted with other numbers: weights, libraries, gptserve or the hardware changed"
                raise EngineDiedError(reason, DeathKind.LOAD)
            self._is_ready = True
            # Its cache may have another size. The context may be longer now, but stays as clients were told.
            self._info = replace(self._client.info, max_model_len=self.info.max_model_len)
            self._client.enqueue([live.resumed() for live in self._live.values()], self)
            loading_s = clock() - died_at
            logger.warning("the engine is ready again after %.1f s; live requests: %d", loading_s, len(self._live))
            return
        tried = f"; {self._max_restarts} restarts in a row failed" if self._max_restarts else ""
        raise EngineDiedError(f"{death}{tried}", death.kind)

    async def _load_another(self) -> None:
        """Load a new engine, as soon as the system has the resources. Raises EngineStartError."""
        for num_attempts in itertools.count():
            self._client = self._make_client()
            try:
                await self._load()
                break
            except ScarcityError as error:
                if num_attempts == 0:
                    logger.error("%s; retrying until it works", error)
                await asyncio.sleep(_delay_s(num_attempts))
        context, before = self._client.info.max_model_len, self.info.max_model_len
        if context < before:  # less memory is free now, and a live request may be longer
            await self._client.close()
            raise EngineStartError(f"the engine restarted with a context of {context} tokens instead of {before}")

    async def _load(self) -> None:
        """Load the engine of `_client`. Raises EngineStartError; then nothing of it is left."""
        try:
            async with asyncio.timeout(self._load_limit_s):
                await self._client.start()
        except TimeoutError:
            await self._client.close()
            raise EngineStartError(f"the engine did not load within {self._load_limit_s:g} s") from None

    def _end(self, death: EngineDiedError) -> None:
        """End all streams and take no more requests; only the first cause is kept."""
        self._is_ready = False
        self._blame(str(death), death.kind, [live.stream for live in self._live.values()])
        self._live.clear()


def _delay_s(num_attempts: int) -> float:
    """Return how long to wait after num_attempts failures."""
    return min(_FIRST_DELAY_S * 2.0 ** min(num_attempts, 16), _MAX_DELAY_S)  # the power cannot overflow

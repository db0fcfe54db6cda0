"""An EngineClient over a fleet: if a replica is lost, its requests go on at another one at their next tokens.

It keeps each live request with its tokens (live.py), as Supervisor does for one engine after another. It knows neither
where replicas run nor how messages reach them. Torch-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace

from gptserve.engine.errors import DeathKind, EngineDiedError, EngineStartError
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.process.client import EngineClient, OutputSink
from gptserve.engine.process.fleet import Computed, Fleet, ReplicaLostError
from gptserve.engine.process.fleet_replica import TOUCHES_PER_LEASE
from gptserve.engine.process.live import LiveRequest
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap
from gptserve.engine.stats import EngineStats

_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 5.0
_REQUESTS, _BLOCKS = ("num_running", "num_waiting"), ("num_used_blocks", "num_cached_blocks")

logger = logging.getLogger(__name__)


class _Attempt:
    """Requests of one submit at one replica, under names of their own: a replica may still compute an earlier attempt.

    `ended` has a result once none is left, and an exception if the replica is lost.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self.left = names
        self.replica: str | None = None
        self.reader: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def discard(self, name: str) -> None:
        """Note that one of them has ended."""
        self.left.pop(name, None)
        if not self.left and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """Give up what is left."""
        if not self.ended.done():
            self.ended.set_exception(error)


class FleetClient(EngineClient):
    """An EngineClient whose requests are computed by replicas that may die at any time.

    - The requests of one submit go to one replica, where they share their prompt's blocks.
    - What a lost replica computed goes to another one. The requests share the blame of its death, as they do that of an
      engine (engine/blame.py): a convicted one ends with FinishReason.ERROR.
    - A replica with another fingerprint would compute other numbers, so streams that meet one end with that cause.
    - It admits as many requests as one engine does.

    Invariant: each live request has one name, in `left` of one attempt.
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet
        self._live: dict[str, LiveRequest] = {}
        self._names: dict[str, str] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._readers: dict[str, set[_Attempt]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._latest: dict[str, EngineStats] = {}
        self._heard: set[str] = set()
        """Replicas that sent a message since the latest round of `_watch`."""
        self._silent: Counter[str] = Counter()
        """For how many rounds others have not that still compute something."""
        self._totals = EngineStats()
        self._num_attempts = 0

    @property
    def stats(self) -> EngineStats:
        """What replicas do, each as of its latest message: the requests of all, and the blocks of one on the average.

        Totals are what they counted since their first messages. A request that no replica has yet is a waiting one.
        """
        latest = self._latest.values()
        gauges = {name: sum(getattr(stats, name) for stats in latest) for name in (*_REQUESTS, *_BLOCKS)}
        gauges |= {name: gauges[name] // max(len(latest), 1) for name in _BLOCKS}
        gauges["num_waiting"] += len(self._live) - sum(a.replica is not None for a in self._attempts.values())
        return replace(self._totals, **gauges)

    @property
    def is_ready(self) -> bool:
        """Whether a replica answers now; until one does, requests wait."""
        return self.is_alive and bool(self._latest)

    async def start(self) -> None:
        if self._death is not None:
            raise EngineStartError(str(self._death))
        try:
            info = await self._fleet.start()
        except EngineStartError as error:
            self._blame(str(self._death or error), DeathKind.LOAD)
            raise
        if self._death is not None:
            raise EngineStartError(str(self._death))
        self._info = info
        self._keep(self._watch())

    def enqueue(self, requests: Sequence[AnyRequest], sink: OutputSink) -> None:
        self._live |= {request.request_id: LiveRequest(request, sink) for request in requests}
        self._keep(self._run([request.request_id for request in requests]))

    def abort(self, request_ids: Sequence[str]) -> None:
        known = [request_id for request_id in request_ids if self._live.pop(request_id, None) is not None]
        self._give_up([self._names[request_id] for request_id in known if request_id in self._names])

    def look(self, show: Callable[[BlockMap], None]) -> None:
        async def look() -> None:
            with contextlib.suppress(ReplicaLostError):
                show(await self._fleet.look())

        self._keep(look())

    async def close(self) -> None:
        self._end(EngineDiedError("the engine was closed", DeathKind.CLOSED))
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._fleet.close()

    def _keep(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, EngineDiedError):
                logger.error("the fleet's client failed", exc_info=error)
                error = EngineDiedError(f"the fleet's client raised {type(error).__name__}", DeathKind.RAISED)
            self._die(error)

    async def _watch(self) -> None:
        """Learn what replicas do that compute nothing for this client, and which ones are gone."""
        async with aclosing(self._fleet.watch()) as rounds:
            async for replicas in rounds:
                for computed in replicas:
                    self._note(computed)
                self._latest = {replica: stats for replica, stats in self._latest.items() if replica in self._heard}
                self._silent = Counter({replica: self._silent[replica] + 1 for replica in self._readers})
                for replica in self._heard:
                    self._silent.pop(replica, None)
                self._heard.clear()
                for replica, num_rounds in self._silent.items():
                    if num_rounds == TOUCHES_PER_LEASE:
                        self._desert(replica)

    def _desert(self, replica: str) -> None:
        """Lose a replica whose calls may never end, as those to a machine without power."""
        for attempt in tuple(self._readers[replica]):
            self._lose(attempt, ReplicaLostError(f"replica {replica} has fallen silent"))
            if attempt.reader is not None:
                attempt.reader.cancel()

    async def _run(self, request_ids: Sequence[str]) -> None:
        """Have these requests computed to their ends, by one replica after another."""
        num_in_vain = 0
        while left := [request_id for request_id in request_ids if request_id in self._live]:
            num_before = self._count(left)
            attempt = self._begin(left)
            try:
                await attempt.ended
            except ReplicaLostError as error:
                if attempt.replica is not None:  # it had them
                    self._judge(left, error)
                alive = [request_id for request_id in left if request_id in self._live]
                num_in_vain = 0 if self._count(alive) > num_before else num_in_vain + 1
                logger.warning("%s; requests that go on at another one: %d", error, len(alive))
            if num_in_vain:
                await asyncio.sleep(min(_FIRST_DELAY_S * 2.0 ** min(num_in_vain - 1, 16), _MAX_DELAY_S))

    def _count(self, request_ids: Sequence[str]) -> int:
        """Return how many tokens these live requests have."""
        return sum(len(self._live[request_id].token_ids) for request_id in request_ids)

    def _begin(self, request_ids: Sequence[str]) -> _Attempt:
        """Give live requests to a replica, under new names."""
        self._num_attempts += 1
        names = {f"{request_id}~{self._num_attempts}": request_id for request_id in request_ids}
        attempt = _Attempt(names)
        requests = [replace(self._live[known].resumed(), request_id=name) for name, known in names.items()]
        self._names |= {known: name for name, known in names.items()}
        self._attempts |= dict.fromkeys(names, attempt)
        attempt.reader = self._keep(self._read(attempt, requests))
        return attempt

    def _give_up(self, names: Sequence[str]) -> None:
        """Forget names, and have no replica compute them."""
        for name in names:
            attempt = self._attempts.pop(name)
            del self._names[attempt.left[name]]
            attempt.discard(name)
        if names:
            self._fleet.abort(names)

    async def _read(self, attempt: _Attempt, requests: Sequence[AnyRequest]) -> None:
        """Take the messages of one stream, which may carry outputs of other attempts at its replica."""
        names = [request.request_id for request in requests]
        try:
            async with aclosing(self._fleet.compute(requests)) as stream:
                async for computed in stream:
                    if attempt.replica is None:
                        attempt.replica = computed.replica
                        self._readers.setdefault(computed.replica, set()).add(attempt)
                        if gone := [name for name in names if name not in self._attempts]:
                            self._fleet.abort(gone)  # they were aborted before a replica had them
                    self._take(computed)
        except ReplicaLostError as error:
            self._lose(attempt, error)
        else:
            if self._leave(attempt):  # the last one brought all that there was
                self._lose(attempt, ReplicaLostError("a replica ended its streams before the requests had ended"))

    def _lose(self, attempt: _Attempt, error: ReplicaLostError) -> None:
        """Give up all that a replica computes, or an attempt that has reached none."""
        replica = attempt.replica
        lost = {attempt} if replica is None else {a for a in self._attempts.values() if a.replica == replica}
        for each in lost:
            each.fail(error)
            self._give_up(list(each.left))
        if self._leave(attempt):
            self._latest.pop(replica or "", None)

    def _leave(self, attempt: _Attempt) -> bool:
        """Note that this stream is not read any more; return whether it was the last one of a replica, or of none."""
        readers = self._readers.get(attempt.replica or "", set())
        readers.discard(attempt)
        if not readers:
            self._readers.pop(attempt.replica or "", None)
        return not readers

    def _take(self, computed: Computed) -> None:
        if computed.fingerprint != self.info.fingerprint:
            reason = f"replica {computed.replica} computes other numbers: {computed.fingerprint}"
            raise EngineDiedError(f"{reason} instead of {self.info.fingerprint}", DeathKind.LOAD)
        self._note(computed)
        for output in computed.outputs:
            if (attempt := self._attempts.get(output.request_id)) is not None:
                name, request_id = output.request_id, attempt.left[output.request_id]
                self._push(replace(output, request_id=request_id))
                if request_id not in self._live:
                    del self._attempts[name], self._names[request_id]
                    attempt.discard(name)

    def _note(self, computed: Computed) -> None:
        """Count what a replica has done since its message before this one, unless that one was sent later."""
        self._heard.add(computed.replica)
        before = self._latest.get(computed.replica, computed.stats)
        if computed.stats.num_steps >= before.num_steps:
            self._totals = computed.stats.since(before).after(self._totals)
            self._latest[computed.replica] = computed.stats

    def _push(self, output: TokenOutput) -> None:
        live = self._live[output.request_id]
        live.take(output)
        if output.finish_reason is not None:
            del self._live[output.request_id]
        live.stream.push(output)

    def _judge(self, request_ids: Sequence[str], error: ReplicaLostError) -> None:
        """Blame the request on trial or, without one, all that the replica had of these."""
        lives = [(request_id, self._live[request_id]) for request_id in request_ids if request_id in self._live]
        on_trial = next((live for _, live in lives if live.blame.is_suspect), None)
        for request_id, live in lives:
            live.blame = live.blame.engine_died_elsewhere()
            if on_trial in (None, live):
                live.blame = live.blame.engine_died(on_trial=live is on_trial)
            if live.blame.is_convicted:
                message = f"replicas died each time they computed this request; the last time: {error}"
                self._push(TokenOutput(request_id, (), finish_reason=FinishReason.ERROR, error=message))

    def _die(self, death: EngineDiedError) -> None:
        is_first = self._death is None
        self._end(death)
        if is_first:
            self._died.set()

    def _end(self, death: EngineDiedError) -> None:
        self._blame(str(death), death.kind, [live.stream for live in self._live.values()])
        self._live.clear()
        self._give_up(list(self._attempts))

"""FakeEngineClient: the EngineClient contract kept by a script instead of a model, and a tokenizer of single bytes.

By default every step gives each live request the next byte of its reply. `auto=False` leaves the steps to the test.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gptserve.engine.errors import DeathKind, EngineDiedError, QueueFullError
from gptserve.engine.info import EngineInfo
from gptserve.engine.pooling import AnyRequest, PoolingRequest
from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import MAX_SCORES_PER_OUTPUT, FinishReason, Request, TokenLogprobs, TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap
from gptserve.engine.stats import EngineStats

EOS = 256
INFO = EngineInfo(
    vocab_size=257,
    max_model_len=256,
    eos_token_ids=(EOS,),
    device="cpu",
    dtype="float32",
    attention_backend="reference",
    product="torch",
    block_size=16,
    num_blocks=64,
    kv_cache_bytes=2**20,
    max_num_seqs=8,
    max_num_queued_reqs=4096,
    fingerprint="fake-1",
    batch_invariant=True,
)

Reply = Callable[[Any], Iterable[TokenOutput]]
"""Of a Request or, with `embed`, of a PoolingRequest."""


class ByteTokenizer:
    """Token i is byte i; EOS is the end of text, and after it come other special tokens.

    Prompts begin with `begin` and end with `end`.
    """

    max_token_bytes = 13
    fingerprint = "bytes"
    has_workers = False

    def __init__(self, *special: str, begin: Sequence[int] = (), end: Sequence[int] = ()) -> None:
        self._begin, self._end = begin, end
        self._special = {text: EOS + i for i, text in enumerate(("<|endoftext|>", *special))}
        self._texts = {token_id: text.encode() for text, token_id in self._special.items()}

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._texts)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return [*self._begin, *self.encode(text), *self._end]

    def encode_with_special(self, text: str, *, template: bool = False) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self._special)) + ")", text)
        ids = [id_ for part in parts for id_ in ([self._special[part]] if part in self._special else part.encode())]
        return [*self._begin, *ids, *self._end] if template else ids

    def close(self) -> None:
        pass

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts[token_id] if token_id >= EOS else bytes([token_id])


def say(text: str | bytes | Sequence[int], *, then_eos: bool = False) -> Reply:
    """Return a reply of the bytes of `text`, over and over unless the end of text comes after them."""
    data = text.encode() if isinstance(text, str) else text

    def reply(request: Request) -> Iterator[TokenOutput]:
        params = request.params
        produced = 0
        if not request.generated_token_ids:
            yield from scored_prompt(request)
        while True:
            for token_id in (*data, EOS) if then_eos else data:
                produced += 1
                stops = token_id in params.stop_token_ids or (token_id == EOS and not params.ignore_eos)
                at_limit = produced == params.max_tokens
                yield TokenOutput(
                    request_id=request.request_id,
                    token_ids=(token_id,),
                    logprobs=() if params.logprobs is None else (logprobs_of(token_id, params.logprobs),),
                    finish_reason=FinishReason.STOP if stops else FinishReason.LENGTH if at_limit else None,
                    stop_token_id=token_id if stops else None,
                )

    return reply


def embed(vector: Sequence[float]) -> Reply:
    """Return a reply of this vector, with the first token of the prompt in the place of its first number."""

    def reply(request: PoolingRequest) -> Iterator[TokenOutput]:
        its = array("f", [request.prompt_token_ids[0], *vector[1:]])
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.STOP, waits=(0.1, 0.2), vector=its)

    return reply


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Return a token's chosen logprobs: its own is -token_id/8, so the likeliest are ids 0, 1, 2, ..."""
    return TokenLogprobs(token_id, -token_id / 8, token_id + 1, tuple((i, -i / 8) for i in range(num_top)))


def scored_prompt(request: Request) -> Iterator[TokenOutput]:
    """Yield the prompt's chosen logprobs, if the request wants them, but for those that it has."""
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return
    entries = (None, *(logprobs_of(token_id, num_top) for token_id in request.prompt_token_ids[1:]))
    for start in range(request.num_scored_tokens, len(entries), MAX_SCORES_PER_OUTPUT):
        piece = entries[start : start + MAX_SCORES_PER_OUTPUT]
        yield TokenOutput(request.request_id, (), prompt_logprobs=piece)


class FakeEngineClient:
    """An EngineClient without a model; `submitted` and `aborted` record what came.

    Everything is called on the event loop but `from_outside` and `wait_for`, which are for the thread of a test. A test
    may put another `reply` in the place of the one given; of it a request does not get again what it says it has.
    """

    def __init__(self, reply: Reply | None = None, *, auto: bool = True, info: EngineInfo = INFO) -> None:
        self.info = info
        self.stats = EngineStats()
        self.is_alive = True
        self.is_restarting = False
        self.restarts: dict[DeathKind, int] = {}
        self.submitted: list[Any] = []
        self.aborted: list[str] = []
        self.block_map: BlockMap | None = BlockMap(1, "21c.")
        self.num_looks = 0
        self.num_outputs = 0
        self.max_requests = info.max_num_seqs + info.max_num_queued_reqs
        self.retry_after_s = 7
        self.reply = reply or say("abc")
        self._auto = auto
        self._live: dict[str, tuple[TokenStream, Iterator[TokenOutput]]] = {}
        self._stepping = False
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def live_ids(self) -> list[str]:
        """The requests that have neither ended nor been aborted."""
        return list(self._live)

    async def start(self) -> None:
        """Be started already."""

    @property
    def is_ready(self) -> bool:
        return self.is_alive and not self.is_restarting

    def submit(self, requests: Sequence[AnyRequest]) -> TokenStream:
        if not self.is_alive:
            raise EngineDiedError("the fake engine is dead")
        for request in requests:
            request.check(self.info)
        self.check_room(len(requests))
        self._loop = asyncio.get_running_loop()
        stream = TokenStream((request.request_id for request in requests), self._forget)
        for request in requests:
            assert request.request_id not in self._live
            num_given = len(request.generated_token_ids) if isinstance(request, Request) else 0
            rest = itertools.islice(self.reply(request), num_given, None)
            self._live[request.request_id] = stream, rest
        self._note(lambda: self.submitted.extend(requests))
        self._schedule()
        return stream

    def check_room(self, num_requests: int, num_others: int = 0) -> None:
        if len(self._live) + num_requests + num_others > self.max_requests:
            raise QueueFullError("the queue is full", retry_after_s=self.retry_after_s)

    def look(self, show: Callable[[BlockMap], None]) -> None:
        self.num_looks += 1
        if self.block_map is not None:
            show(self.block_map)

    async def wait_until_dead(self) -> EngineDiedError:
        raise NotImplementedError

    async def close(self) -> None:
        self.die("the fake engine was closed")

    def step(self) -> None:
        """Give every live request its next output."""
        for request_id, (stream, outputs) in list(self._live.items()):
            output = next(outputs, None)
            if output is None:
                continue
            if output.finish_reason is not None:
                del self._live[request_id]
            self.num_outputs += 1
            stream.push(output)
        self._note(lambda: None)

    def die(self, cause: str = "killed") -> None:
        """End every stream as a dead engine does."""
        self.is_alive = False
        for stream in {id(stream): stream for stream, _ in self._live.values()}.values():
            stream.fail(EngineDiedError(cause))
        self._live.clear()

    def from_outside(self, action: Callable[[], None]) -> None:
        """Run `action` on the event loop, from another thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(action)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Block a thread that is not the event loop's until `condition` holds."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "the fake engine never came to the state waited for"

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._live.pop(request_id, None)
        self._note(lambda: self.aborted.extend(request_ids))

    def _note(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def _schedule(self) -> None:
        if self._auto and not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._stepping = False
        self.step()
        if self._live:
            self._schedule()

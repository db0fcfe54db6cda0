"""The loop alone, over a channel whose commands are written down beforehand."""

from __future__ import annotations

import functools
import pickle
from collections import deque

import pytest

from gptserve.engine.process.loop import (
    Abort,
    Command,
    Failed,
    Loading,
    Message,
    Ready,
    Shutdown,
    Stepped,
    Submit,
    serve,
)
from gptserve.engine.request import FinishReason, TokenLogprobs, TokenOutput
from gptserve.engine.stats import EngineStats
from tests.engine import fake_step_engine as fake
from tests.engine.client_harness import expected, make_request


class ScriptedChannel:
    """Hands out one group of commands per turn of the loop; after the last the client is gone."""

    def __init__(self, *turns: tuple[Command, ...]) -> None:
        self._turns = deque(map(deque, turns))
        self.sent: list[Message] = []

    def poll(self) -> bool:
        return not self._turns or bool(self._turns[0])

    def recv(self) -> Command:
        while self._turns and not self._turns[0]:
            self._turns.popleft()  # nothing came, and the loop waits
        if not self._turns:
            raise EOFError
        return self._turns[0].popleft()

    def send(self, message: Message) -> None:
        self.sent.append(message)
        if isinstance(message, Stepped):
            self._turns.popleft()


def steps(channel: ScriptedChannel) -> list[Stepped]:
    ready, *rest = channel.sent
    assert isinstance(ready, Ready)
    assert ready.info == fake.INFO
    return [message for message in rest if isinstance(message, Stepped)]


def test_a_turn_takes_all_commands_then_steps_once_and_sends_one_message() -> None:
    a, b = make_request("a", 2), make_request("bb", 2)
    channel = ScriptedChannel((Submit((a,)), Submit((b,))), (), (Shutdown(),))
    serve(fake.load, channel)
    first, second = steps(channel)
    assert [output.token_ids for output in first.outputs] == [(expected(a)[0],), (expected(b)[0],)]
    assert [output.token_ids for output in second.outputs] == [(expected(a)[1],), (expected(b)[1],)]
    assert (first.stats.num_running, second.stats.num_running) == (2, 0)


def test_abort_takes_effect_before_the_next_step_and_shows_in_the_stats_at_once() -> None:
    submit, abort = Submit((make_request("a"), make_request("b"))), Abort(("unknown", "a", "b"))
    channel = ScriptedChannel((submit,), (abort,), (Shutdown(),))
    serve(fake.load, channel)
    _, after = steps(channel)
    assert after == Stepped((), EngineStats(num_running=0, num_steps=1))


def test_refused_request_is_answered_though_there_is_nothing_to_step() -> None:
    channel = ScriptedChannel((Submit((make_request("a", first=fake.REFUSE),)),), (Shutdown(),))
    serve(fake.load, channel)
    (only,) = steps(channel)
    assert only.outputs[0].finish_reason is FinishReason.ERROR
    assert only.stats.num_steps == 0


def test_idle_loop_waits_and_sends_nothing() -> None:
    channel = ScriptedChannel((), (Submit((make_request("a", 1),)),), (), (), (Abort(("a",)),), (), (Shutdown(),))
    serve(fake.load, channel)
    assert [len(step.outputs) for step in steps(channel)] == [1, 0]


def test_shutdown_ends_the_loop_with_work_left() -> None:
    channel = ScriptedChannel((Submit((make_request("a", 1_000),)),), (Shutdown(),))
    serve(fake.load, channel)
    assert len(steps(channel)) == 1


@pytest.mark.parametrize("turns", [(), ((Submit((make_request("a", 1_000),)),), ())])
def test_client_that_is_gone_ends_the_loop_idle_or_at_work(turns: tuple[tuple[Command, ...], ...]) -> None:
    channel = ScriptedChannel(*turns)
    with pytest.raises(EOFError):
        serve(fake.load, channel)
    assert len(steps(channel)) == len(turns)


def test_engine_that_raises_is_the_last_message() -> None:
    channel = ScriptedChannel((Submit((make_request("a", first=fake.RAISE),)),))
    serve(fake.load, channel)
    assert channel.sent[1:] == [Failed("the engine raised ValueError: told to raise")]


def test_factory_that_raises_is_the_only_message() -> None:
    channel = ScriptedChannel()
    serve(functools.partial(fake.load, loading="refuses"), channel)
    assert channel.sent == [Failed("config.json: n_layer must be at least 1, got 0")]


def test_progress_comes_before_the_engine_is_ready() -> None:
    channel = ScriptedChannel((Shutdown(),))
    serve(functools.partial(fake.load, loading="reports"), channel)
    progress, ready = channel.sent
    assert progress == Loading(1, 4)
    assert isinstance(ready, Ready)


def test_step_message_survives_the_wire() -> None:
    logprobs = TokenLogprobs(3, -0.5, 1, ((3, -0.5), (1, -1.25)))
    message = Stepped(
        (
            TokenOutput("a", (3,), (logprobs,), (None, logprobs), FinishReason.STOP, 3, 16),
            TokenOutput("b", (), finish_reason=FinishReason.ERROR, error="why"),
        ),
        EngineStats(num_running=1, num_preemptions=2),
    )
    copy = pickle.loads(pickle.dumps(message))
    assert copy == message
    assert copy.outputs[0].finish_reason is FinishReason.STOP

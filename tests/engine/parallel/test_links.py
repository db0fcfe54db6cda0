"""The first rank takes ranks of other nodes that know the key and have its settings, and says why it takes no other."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.parallel import links
from gptserve.engine.parallel.links import (
    NodeLink,
    RefusedError,
    accept_ranks,
    connect_rank,
    listen,
)
from gptserve.engine.parallel.messages import Finding, receive, send
from tests.engine.parallel.nodes import free_port

KEY, OTHER_KEY = b"0123456789abcdef", b"fedcba9876543210"
LIMIT_S = 60
Accepted = Future[dict[int, NodeLink]]


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(
        Path("first"), tensor_parallel_size=2, nnodes=2, master_addr="127.0.0.1", master_port=free_port()
    )


@pytest.fixture
def accepted(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> Iterator[Accepted]:
    """The first rank, which waits for rank 1; it is answered if the test has not done so."""
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(accept_ranks, config, KEY, 77)
        yield future
        if not future.done():
            connect(config)[0].close()
        for link in future.result(LIMIT_S).values():
            link.close()


def connect(config: EngineConfig, number: int = 1, key: bytes = KEY) -> tuple[socket.socket, links.Welcome]:
    """Connect once the first rank listens and has time, as a node does: a stranger before it takes that rank's time."""
    while True:
        try:
            return connect_rank(config, number, key)
        except (ConnectionRefusedError, BlockingIOError):
            continue


def refusal(config: EngineConfig, number: int = 1, key: bytes = KEY) -> str:
    with pytest.raises(RefusedError) as refused:
        connect(config, number, key)
    return str(refused.value)


def test_a_rank_of_another_node_is_told_where_ranks_meet_and_then_talks(
    config: EngineConfig, accepted: Accepted
) -> None:
    other = replace(config, model_dir=Path("second"), node_rank=1, num_threads=3, master_addr="localhost")
    peer, welcome = connect(other)
    link = accepted.result(LIMIT_S)[1]
    with peer, links.Connection(peer.detach()) as connection:
        assert welcome.store_port == 77
        send(connection, Finding("hello"))
        assert receive(link.connection) == Finding("hello")
        name = links._shown(link._socket.getpeername())
        link.kill()
        with pytest.raises(EOFError):
            receive(connection)
    assert link.wait() == f"the connection to rank 1 at {name} ended"


def test_another_key_is_refused_on_both_sides(
    config: EngineConfig, accepted: Accepted, caplog: pytest.LogCaptureFixture
) -> None:
    assert refusal(config, key=OTHER_KEY) == "the first node has another GPTSERVE_CLUSTER_KEY"
    connect(config)[0].close()
    accepted.result(LIMIT_S)
    assert any(line.endswith(": its GPTSERVE_CLUSTER_KEY is another one") for line in caplog.messages)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "bfloat16"}, "dtype must be the same on all nodes, got 'bfloat16' and on the first one 'auto'"),
        ({"block_size": 8}, "block_size must be the same on all nodes, got 8 and on the first one 16"),
    ],
)
def test_another_setting_is_refused_with_both_values(
    change: dict[str, Any], expected: str, config: EngineConfig, accepted: Accepted
) -> None:
    assert refusal(replace(config, **change)) == expected


def test_another_version_is_refused(config: EngineConfig, accepted: Accepted, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = links._settings(config)
    monkeypatch.setattr(links, "_settings", lambda _: dict(settings))
    ours = settings["torch"]
    settings["torch"] = "1.0"  # the first rank reads it later, so both have this
    connect(config)[0].close()
    accepted.result(LIMIT_S)
    assert links._difference({**settings, "torch": ours}, settings) == (
        f"torch must be the same on all nodes, got {ours!r} and on the first one '1.0'"
    )


@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_no_other_node_has_is_refused(number: int, config: EngineConfig, accepted: Accepted) -> None:
    assert refusal(config, number) == f"rank {number} is none of another node"


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05hello"])
def test_a_stranger_keeps_no_rank_away(
    said: bytes, config: EngineConfig, accepted: Accepted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "GREETING_LIMIT_S", 1.0)
    peer, _ = _stranger(config)
    with peer:
        peer.sendall(said)  # and waits
        rank, _ = connect(replace(config))
        rank.close()
        assert list(accepted.result(LIMIT_S)) == [1]


def test_a_rank_that_connects_again_replaces_its_first_connection(config: EngineConfig) -> None:
    config = replace(config, tensor_parallel_size=3, nnodes=3)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(accept_ranks, config, KEY, 77)
        first, _ = connect(config, 1)
        again, _ = connect(config, 1)
        other, _ = connect(config, 2)
        found = future.result(LIMIT_S)
        assert found[1]._socket.getpeername() == again.getsockname()
        assert first.recv(1) == b""
        for end in (first, again, other, *found.values()):
            end.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidConfigurationError) as refused:
        listen("192.0.2.1", 29501)
    assert str(refused.value) == (
        "cannot listen on master_addr '192.0.2.1' port 29501: Cannot assign requested address"
    )


def test_it_listens_at_the_one_address_alone() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def _stranger(config: EngineConfig) -> tuple[socket.socket, None]:
    while True:
        try:
            return socket.create_connection((str(config.master_addr), config.master_port)), None
        except ConnectionRefusedError:
            continue

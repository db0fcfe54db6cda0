from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from gptserve.server.http.connections import PROBE_CONNECTIONS, Connections, ProbeConnections
from tests.server.serving import ROOT


class Peer:
    def __init__(self) -> None:
        self.is_dropped = False

    def hang_up(self) -> None:
        self.is_dropped = True


def open_idle(connections: Connections, count: int) -> list[Peer]:
    peers = [Peer() for _ in range(count)]
    for peer in peers:
        assert connections.admit()
        connections.set_idle(peer, peer.hang_up)
    return peers


def open_busy(connections: Connections, count: int) -> list[Peer]:
    peers = []
    for _ in range(count):
        peers += open_idle(connections, 1)
        connections.set_busy(peers[-1])
    return peers


def test_the_longest_idle_makes_room() -> None:
    connections = Connections(8)
    peers = open_idle(connections, 6)
    assert [peer.is_dropped for peer in peers] == [True, True, False, False, False, False]
    assert (len(connections), connections.num_idle, connections.num_closed_idle) == (4, 4, 2)


def test_one_that_is_idle_again_is_the_newest() -> None:
    connections = Connections(8)
    peers = open_idle(connections, 4)
    connections.set_busy(peers[0])
    connections.set_idle(peers[0], peers[0].hang_up)
    connections.set_idle(peers[1], peers[1].hang_up)  # it was idle all the time
    assert connections.admit()
    assert [peer.is_dropped for peer in peers] == [False, True, False, False]


def test_a_busy_one_is_never_dropped() -> None:
    connections = Connections(4)
    busy = open_busy(connections, 3)
    idle = open_idle(connections, 5)
    assert not any(peer.is_dropped for peer in busy)
    assert [peer.is_dropped for peer in idle] == [True, True, True, True, False]
    assert connections.num_refused == 0


def test_when_all_are_busy_a_new_one_is_refused_until_one_goes() -> None:
    connections = Connections(4)
    busy = open_busy(connections, 4)
    assert [connections.admit() for _ in range(3)] == [False] * 3
    connections.remove(busy[0])
    assert connections.admit()


def test_connections_of_probes_are_few_and_apart_from_the_others() -> None:
    others = Connections(2)
    open_busy(others, 2)
    probes = ProbeConnections(others)
    idle = open_idle(probes, 20)
    assert [peer.is_dropped for peer in idle].count(False) == PROBE_CONNECTIONS // 2
    open_busy(probes, PROBE_CONNECTIONS)
    assert not probes.admit()
    probes.refuse()
    assert (len(probes), len(others), others.num_refused) == (PROBE_CONNECTIONS, 2, 1)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_smallest_limits_let_somebody_in(limit: int) -> None:
    connections = Connections(limit)
    open_idle(connections, 5)
    assert len(connections) == 1
    assert connections.admit()


def test_what_happens_a_thousand_times_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    connections = Connections(2)
    open_idle(connections, 1000)
    open_busy(connections, 2)
    for _ in range(1000):
        assert not connections.admit()
        connections.refuse()
    assert connections.num_refused == 1000
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "closing idle connections: 1 may be idle and 2 may be open",
        "refusing connections: all 2 that may be open are busy",
    ]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((100, 256), "192 256"),
        ((100, 2000), "1000 2000"),
        ((64, 64), "ValueError('the limit of open files (ulimit -n) must be over 64, got 64') 64"),
    ],
)
def test_descriptors_bound_the_connections_and_some_are_kept(limits: tuple[int, int], expected: str) -> None:
    script = (
        "import resource, gptserve.server.http.connections as c\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        "try: found = c.affordable_connections(1000)\n"
        "except ValueError as error: found = repr(error)\n"
        "print(found, resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected
    assert ("max-connections is 192 instead of 1000" in result.stderr) == (limits[1] == 256)

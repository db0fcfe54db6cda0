"""How the first rank reaches another: by the pipe of a child process, or over TCP where that is on another node.

The ranks of other nodes connect to the first one (`accept_ranks`, `connect_rank`). Both sides prove with an HMAC that
they know the key of the cluster, which only the environment has, and the settings of both must be the same. What
follows is neither encrypted nor signed, so a network of nodes must be trusted. Torch-free; ranks.py and node.py use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from gptserve.engine.child import describe_exit
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.version import installed_version

CLUSTER_KEY = "GPTSERVE_CLUSTER_KEY"
"""The variable that holds the key of all nodes."""
MIN_KEY_LENGTH = 16
EXIT_LIMIT_S = 5.0  # a rank's process must end within this after its pipe has
GREETING_LIMIT_S = 5.0
"""Whoever connects and says less within this is cut off: the others wait meanwhile."""
LOST_AFTER_S = 20
"""A node that has vanished without a word, as without power, is missed after this."""

_NONCE_BYTES = 32
_MAX_GREETING_BYTES = 1 << 16
_OWN = frozenset({"model_dir", "node_rank", "num_threads", "master_addr", "gpu_memory_utilization"})
"""The settings in which nodes may differ."""

logger = logging.getLogger(__name__)


class RefusedError(InvalidConfigurationError):
    """The first rank takes no rank with this key or these settings."""


class Link(Protocol):
    """The connection to a rank, and what can be done to it."""

    connection: Connection

    def kill(self) -> None:
        """Have the rank end at once."""

    def wait(self) -> str:
        """Return how the rank ended, once it has; after the connection has ended it is killed."""

    def close(self) -> None:
        """Free what the link holds; the rank has ended."""


class ChildLink:
    """A rank that is a child process of the first one."""

    def __init__(self, number: int, process: SpawnProcess, connection: Connection) -> None:
        self.process, self.connection = process, connection
        self._name = f"rank {number}"

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> str:
        self.process.join(EXIT_LIMIT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return describe_exit(self._name, self.process.exitcode)[0]

    def close(self) -> None:
        self.connection.close()
        self.process.join()  # where its watch closes it, nobody has
        self.process.close()


class NodeLink:
    """A rank on another node: the end of the connection is the end of the rank, which that node kills then."""

    def __init__(self, number: int, peer: socket.socket) -> None:
        self._socket, self._cause = peer, f"the connection to rank {number} at {_shown(peer.getpeername())} ended"
        self.connection = Connection(os.dup(peer.fileno()))

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self) -> str:
        return self._cause

    def close(self) -> None:
        self.kill()
        self.connection.close()
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the first rank tells one that it takes."""

    store_port: int
    """Where ranks find each other, at the first rank's address."""


def cluster_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key of all nodes; it is no option, so that no command line shows it.

    Raises InvalidConfigurationError if there is none.
    """
    key = environment.get(CLUSTER_KEY, "")
    if len(key) < MIN_KEY_LENGTH:
        got = "a shorter one" if key else "none"
        rule = f"the variable {CLUSTER_KEY} with a key of at least {MIN_KEY_LENGTH} characters"
        raise InvalidConfigurationError(f"nnodes above 1 needs {rule}, got {got}")
    return key.encode()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this one address. Raises InvalidConfigurationError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        cause = str(error.strerror).partition(" (while")[0]  # the rest repeats the address
        message = f"cannot listen on master_addr {host!r} port {port}: {cause}"
        raise InvalidConfigurationError(message) from error


def accept_ranks(config: EngineConfig, key: bytes, store_port: int) -> dict[int, NodeLink]:
    """Wait until all ranks of other nodes have connected; return them by their numbers.

    One that connects again replaces its first connection: it has ended meanwhile. Raises InvalidConfigurationError if
    the address is not this machine's.
    """
    found: dict[int, NodeLink] = {}
    wanted = range(config.num_local_ranks, config.tensor_parallel_size)
    with listen(str(config.master_addr), config.master_port) as listener:
        logger.info("waiting at %s for ranks %s", _shown(listener.getsockname()), ", ".join(map(str, wanted)))
        while len(found) < len(wanted):
            peer, address = listener.accept()
            try:
                number = _welcome(peer, config, key, store_port)
            except (OSError, EOFError, ValueError, KeyError, RefusedError) as error:
                logger.warning("refused a rank from %s: %s", _shown(address), error or type(error).__name__)
                peer.close()
                continue
            if number in found:
                found[number].close()
            found[number] = NodeLink(number, peer)
            logger.info("rank %d has connected from %s", number, _shown(address))
    return found


def connect_rank(config: EngineConfig, number: int, key: bytes) -> tuple[socket.socket, Welcome]:
    """Connect a rank of this node to the first one. Raises RefusedError, and OSError or EOFError if none is there."""
    peer = socket.create_connection((str(config.master_addr), config.master_port), GREETING_LIMIT_S)
    try:
        with _greeting(peer) as connection:
            _know_first(connection, key)
            connection.send_bytes(json.dumps({"rank": number, "settings": _settings(config)}).encode())
            answer = json.loads(connection.recv_bytes(_MAX_GREETING_BYTES))
    except BaseException:
        peer.close()
        raise
    if "refused" in answer:
        peer.close()
        raise RefusedError(answer["refused"])
    return peer, Welcome(answer["store_port"])


def _welcome(peer: socket.socket, config: EngineConfig, key: bytes, store_port: int) -> int:
    """Check who has connected, and return its rank. Raises RefusedError, OSError, EOFError, ValueError."""
    with _greeting(peer) as connection:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.send_bytes(nonce)
        proof = connection.recv_bytes(_MAX_GREETING_BYTES)
        theirs = proof[:_NONCE_BYTES]
        if not hmac.compare_digest(proof[_NONCE_BYTES:], _proof(key, b"node", nonce, theirs)):
            connection.send_bytes(b"")
            raise RefusedError(f"its {CLUSTER_KEY} is another one")
        connection.send_bytes(_proof(key, b"first", theirs, nonce))
        hello = json.loads(connection.recv_bytes(_MAX_GREETING_BYTES))
        number, fault = int(hello["rank"]), _difference(hello["settings"], _settings(config))
        if fault is None and not config.num_local_ranks <= number < config.tensor_parallel_size:
            fault = f"rank {number} is none of another node"
        if fault is not None:
            connection.send_bytes(json.dumps({"refused": fault}).encode())
            raise RefusedError(fault)
        connection.send_bytes(json.dumps({"store_port": store_port}).encode())
        return number


def _know_first(connection: Connection, key: bytes) -> None:
    """Prove to know the key, and have the other side prove it. Raises RefusedError."""
    theirs, nonce = connection.recv_bytes(_MAX_GREETING_BYTES), secrets.token_bytes(_NONCE_BYTES)
    connection.send_bytes(nonce + _proof(key, b"node", theirs, nonce))
    proof = connection.recv_bytes(_MAX_GREETING_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"first", nonce, theirs)):
        raise RefusedError(f"the first node has another {CLUSTER_KEY}")


def _proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, b"".join((b"gptserve ", who, *nonces)), hashlib.sha256)


@contextlib.contextmanager
def _greeting(peer: socket.socket) -> Any:
    """Give a connection that ends with the block, while the socket stays; each message in it has a time limit."""
    peer.setblocking(True)
    _limit(peer, GREETING_LIMIT_S)
    _notice_silence(peer)
    with Connection(os.dup(peer.fileno())) as connection:
        yield connection
    _limit(peer, 0.0)  # none


def _limit(peer: socket.socket, limit_s: float) -> None:
    value = struct.pack("ll", int(limit_s), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, value)


def _notice_silence(peer: socket.socket) -> None:
    """Have the connection end when the other machine has been silent for LOST_AFTER_S; and send at once."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    num_probes = 4
    for option, value in (
        (socket.TCP_KEEPIDLE, LOST_AFTER_S // num_probes),
        (socket.TCP_KEEPINTVL, LOST_AFTER_S // num_probes),
        (socket.TCP_KEEPCNT, num_probes - 1),
        (socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000),
    ):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def _settings(config: EngineConfig) -> dict[str, object]:
    """Return what must be the same on all nodes, as JSON has it."""
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _OWN}
    return {**values, "gptserve": installed_version(), "torch": version("torch").partition("+")[0]}


def _difference(theirs: Mapping[str, object], ours: Mapping[str, object]) -> str | None:
    """Return which setting differs first, as one sentence; None if none does."""
    for name, value in ours.items():
        if name not in theirs or theirs[name] != value:
            return f"{name} must be the same on all nodes, got {theirs.get(name)!r} and on the first one {value!r}"
    return None


def _shown(address: Any) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""Which replica a prompt goes to: the one that had its beginning, and has the keys and values of it. Knows no Ray."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gptserve.engine.pooling import PoolingRequest
from gptserve.engine.request import Request

NUM_TOKENS = 64  # of a prompt's beginning; with more, prompts that share a system prompt would go apart
SLACK = 8  # so many calls more than the idlest replica has are worth a prefill


def beginning(arguments: Sequence[object]) -> bytes:
    """Return what the requests of a call of Engine.compute share with those whose blocks they can use.

    It is the salt and the first tokens; empty for other calls.
    """
    match arguments:
        case [_, [Request() | PoolingRequest() as request, *_]]:
            return f"{request.cache_salt}\n{request.prompt_token_ids[:NUM_TOKENS]}".encode()
    return b""


def ranked(head: bytes, names: Sequence[str], loads: Sequence[int]) -> list[int]:
    """Return the positions of replicas in the order in which to ask them, by their names and numbers of calls.

    Rendezvous hashing (https://en.wikipedia.org/wiki/Rendezvous_hashing): a replica more or less moves only the prompts
    that it has. Those that are too busy come last; without a beginning the idlest comes first.
    """
    limit = min(loads, default=0) + SLACK
    hashes = [hashlib.blake2b(head + name.encode(), digest_size=8).digest() for name in names]
    return sorted(range(len(names)), key=lambda i: (loads[i] > limit, hashes[i] if head else loads[i]))

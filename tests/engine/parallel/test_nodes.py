"""Two processes that share only a socket compute what one machine does, and outlive each other."""

from __future__ import annotations

import functools
import logging
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gptserve.engine.errors import DeathKind, EngineDiedError, InvalidConfigurationError
from gptserve.engine.parallel.links import accept_ranks
from gptserve.engine.parallel.ranks import Ranks
from gptserve.engine.process.factory import load_engine
from gptserve.engine.process.process_client import ProcessClient
from gptserve.engine.process.supervisor import Supervisor
from gptserve.engine.request import Request
from tests.engine.client_harness import LIMIT_S, started
from tests.engine.client_harness import run as asyncio_run
from tests.engine.parallel.nodes import KEY, free_port, of_nodes, rank_of, second_node
from tests.engine.parallel.test_links import connect
from tests.engine.runs import OutputsById, make_config, make_engine, make_request, ragged_prompts, run, token_ids
from tests.leaks import holdings, wait_until_gone

NUM_TOKENS = 24
STALL_LIMIT_S = 4.0


@pytest.fixture(autouse=True)
def _has_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTSERVE_CLUSTER_KEY", KEY)


@pytest.fixture
def copy(tiny_gpt2: Path, tmp_path: Path) -> Path:
    """The model on the second node."""
    return shutil.copytree(tiny_gpt2, tmp_path / "copy")


def requests() -> list[Request]:
    prompts = ragged_prompts(6, 40, vocab_size=90)
    return [
        make_request(str(i), p, seed=i, temperature=i % 2, max_tokens=NUM_TOKENS, logprobs=2, prompt_logprobs=1)
        for i, p in enumerate(prompts)
    ]


def tokens(outputs: OutputsById) -> dict[str, list[int]]:
    return {request_id: token_ids(found) for request_id, found in outputs.items()}


@pytest.mark.slow
def test_two_nodes_compute_the_bits_of_one_and_a_killed_node_is_told(
    tiny_gpt2: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local, port = make_engine(tiny_gpt2, tensor_parallel_size=2), free_port()
    expected = run(local, requests())
    assert tokens(expected) == tokens(run(make_engine(tiny_gpt2), requests()))
    with second_node(copy, port) as node:
        engine = make_engine(tiny_gpt2, **of_nodes(port))
        assert engine.info.fingerprint == local.info.fingerprint
        assert run(engine, requests()) == expected, "ids and logprobs, bit for bit"

        rank_of(node).kill()
        with caplog.at_level(logging.ERROR), pytest.raises(EngineDiedError) as died:
            run(engine, requests())
        assert str(died.value).startswith("the connection to rank 1 at 127.0.0.1:")
        assert str(died.value).endswith(" ended")
        caplog.clear()  # its tracebacks hold the engine
        node.wait_for_line("rank 1 was killed by signal 9")

        again = make_engine(tiny_gpt2, **of_nodes(port))  # the same node serves the next engine
        assert run(again, requests()) == expected
        rank = rank_of(node)
        assert again._runner._ranks is not None
        again._runner._ranks.close()  # as at the first node's end
        node.wait_for_line("the first node hung up; connecting again")
        assert not rank.is_running()
        node.popen.send_signal(signal.SIGTERM)
        assert node.wait()[0] == 0


@pytest.mark.slow
def test_streams_go_on_when_a_node_is_killed_and_started_again(tiny_gpt2: Path, copy: Path) -> None:
    before = holdings()
    expected, port = tokens(run(make_engine(tiny_gpt2), requests())), free_port()
    factory = functools.partial(load_engine, make_config(tiny_gpt2, **of_nodes(port)))
    make_client = functools.partial(ProcessClient, factory)
    supervisor = Supervisor(make_client, max_restarts=2, stall_limit_s=LIMIT_S, load_limit_s=LIMIT_S)

    async def test() -> None:
        with second_node(copy, port) as node:
            async with started(supervisor) as client:
                streams = {request.request_id: client.submit([request]) for request in requests()}
                first = {request_id: await anext(stream) for request_id, stream in streams.items()}
                node.kill()
                with second_node(copy, port):
                    for request_id, stream in streams.items():
                        rest = [output async for outputs in stream for output in outputs]
                        assert token_ids([*first[request_id], *rest]) == expected[request_id]
                assert sum(client.restarts.values()) == 1

    asyncio_run(test())
    assert not wait_until_gone(before)


@pytest.mark.slow
def test_streams_go_on_when_a_node_falls_silent(tiny_gpt2: Path, copy: Path) -> None:
    expected, port = tokens(run(make_engine(tiny_gpt2), requests())), free_port()
    factory = functools.partial(load_engine, make_config(tiny_gpt2, **of_nodes(port)))
    make_client = functools.partial(ProcessClient, factory)
    supervisor = Supervisor(make_client, max_restarts=9, stall_limit_s=STALL_LIMIT_S, load_limit_s=LIMIT_S)

    async def test() -> None:
        with second_node(copy, port) as node:
            async with started(supervisor) as client:
                streams = {request.request_id: client.submit([request]) for request in requests()}
                rank_of(node).suspend()  # its kernel goes on to answer: TCP sees nothing
                for request_id, stream in streams.items():
                    found = [output async for outputs in stream for output in outputs]
                    assert token_ids(found) == expected[request_id]
                assert client.restarts[DeathKind.STALLED] >= 1

    asyncio_run(test())


@pytest.mark.slow
def test_a_node_with_other_weights_is_refused(tiny_gpt2: Path, make_gpt2: Callable[..., Path]) -> None:
    other, port = make_gpt2(initializer_range=0.5), free_port()
    with second_node(other, port), pytest.raises(InvalidConfigurationError) as refused:
        make_engine(tiny_gpt2, **of_nodes(port))
    assert str(refused.value) == "rank 1 has other weights than the first node"


@pytest.mark.slow
def test_a_node_with_another_key_ends_with_a_sentence(tiny_gpt2: Path) -> None:
    port = free_port()
    config = make_config(tiny_gpt2, **of_nodes(port))
    with ThreadPoolExecutor(1) as pool, second_node(tiny_gpt2, port, key=KEY[::-1]) as node:
        accepted = pool.submit(accept_ranks, config, KEY.encode(), 1)
        status, said = node.wait()
        peer, _ = connect(config, key=KEY.encode())
        peer.close()
        accepted.result(LIMIT_S)[1].close()
    assert status == 1
    assert said.endswith("gptserve: the first node has another GPTSERVE_CLUSTER_KEY\n")
    assert "only the first node reads port\n" in said
    assert "ranks talk over TCP, without encryption, with 127.0.0.1" in said


def test_an_engine_is_of_the_first_node(tiny_gpt2: Path) -> None:
    with pytest.raises(InvalidConfigurationError) as refused:
        Ranks(make_config(tiny_gpt2, **of_nodes(1), node_rank=1), torch.device("cpu"))
    assert str(refused.value) == "node_rank must be 0 but for `gptserve serve`, got 1"

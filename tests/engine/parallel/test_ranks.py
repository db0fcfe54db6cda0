"""Two processes compute what one does: same ids, bits that do not depend on the batch; and a rank's death is told."""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gptserve.engine.engine import Engine
from gptserve.engine.errors import DeathKind, EngineDiedError, InvalidConfigurationError
from gptserve.engine.parallel.messages import Memory
from gptserve.engine.parallel.ranks import Ranks
from gptserve.engine.process.factory import load_engine
from gptserve.engine.process.process_client import ProcessClient
from gptserve.engine.process.supervisor import Supervisor
from gptserve.engine.request import Request, TokenOutput
from gptserve.engine.runner.hardware import set_num_threads
from gptserve.engine.runner.memory import kv_bytes_per_token
from gptserve.engine.runner.runner import ModelRunner
from gptserve.weights.errors import UnsupportedModelError
from gptserve.weights.families import load_config
from tests.engine.client_harness import LIMIT_S, collect, hurried, run_hurried, started, until
from tests.engine.client_harness import run as asyncio_run
from tests.engine.runs import make_config, make_engine, make_request, ragged_prompts, run, token_ids
from tests.leaks import holdings, wait_until_gone
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

NUM_TOKENS = 24
UNSPLIT = {
    "GPT-2, one layer of one head": "its 1 heads are no multiple of 2",
    **dict.fromkeys(
        (
            *("Gemma 4, inputs of layers and shared keys", "Gemma 4 that sees, inputs of layers and shared keys"),
            *("Gemma 3n, past its window", "Gemma 3n, two streams, all gates and keys", "Gemma 3n that sees and hears"),
        ),
        "its layers have inputs of their own",
    ),
    **dict.fromkeys(
        ("OLMo 2", "OLMo 3, past its window", "OLMo 3, YaRN on some layers", "OLMoE", "MiniMax M2", "FlexOlmo"),
        "its norm of queries and keys (qk_norm) is over all heads",
    ),
    **dict.fromkeys(
        (
            *("Qwen3.5", "Qwen3.5, attention first, tied", "Qwen3.5 that sees", "Qwen3.5 with experts"),
            *("Qwen3.5 with experts that sees", "Qwen3-Next", "Qwen3-Next, a dense layer, weights of all"),
            *("LFM2", "LFM2, attention first, as wide as it says", "LFM2-VL"),
            *("LFM3, past its window", "LFM3, neither gates nor norms behind"),
            *("LFM2 with experts", "LFM2 with experts, scores as they are"),
            *("Granite 4-H", "Granite 4-H with experts, groups and limits of steps", "Nemotron-H", "Nemotron 3 Nano"),
            *("Falcon-H1", "Falcon-H1, norms, no factors"),
        ),
        "its layers that keep a state are not split",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two key-value heads, sinks, experts, biases, windows and a head of its own."""
    made = tmp_path_factory.mktemp("model")
    model_type, fields = SHAPES["gpt-oss, past its window"]
    write_model(made, model_type, {**fields, "intermediate_size": 128})
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """An engine of two ranks; the last test of it kills one."""
    return make_engine(folder, tensor_parallel_size=2, speculative_ngram=2)


def requests() -> list[Request]:
    """Greedy and sampled ones, with logprobs of the prompt or of the tokens."""
    prompts = ragged_prompts(6, 40, vocab_size=90)
    return [
        make_request(str(i), p, seed=i, temperature=i % 2, max_tokens=NUM_TOKENS, logprobs=2, prompt_logprobs=1)
        for i, p in enumerate(prompts)
    ]


def test_two_ranks_generate_the_tokens_of_one(folder: Path, engine: Engine) -> None:
    alone, split = run(make_engine(folder), requests()), run(engine, requests())

    for request_id, outputs in alone.items():
        assert token_ids(split[request_id]) == token_ids(outputs)
        for one, other in zip(_logprobs(split[request_id]), _logprobs(outputs), strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_the_bits_of_an_answer_do_not_depend_on_the_batch(engine: Engine) -> None:
    together = run(engine, requests())

    assert engine.info.batch_invariant
    for request in requests()[:3]:
        assert _logprobs(run(engine, [request])[request.request_id]) == _logprobs(together[request.request_id])


def test_each_rank_has_the_cache_of_its_own_heads(folder: Path, engine: Engine) -> None:
    whole = kv_bytes_per_token(load_config(folder), 4)

    assert engine.info.kv_cache_bytes == engine.info.num_blocks * engine.info.block_size * whole
    assert engine.info.num_blocks == 2 * 2**24 // (engine.info.block_size * whole)  # kv_cache_bytes are each rank's


def test_the_number_of_ranks_is_in_the_fingerprint(folder: Path, engine: Engine) -> None:
    assert make_engine(folder).info.fingerprint != engine.info.fingerprint


def test_a_killed_rank_ends_the_engine_with_its_cause(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    cause = "rank 1 was killed by signal 9 (Killed), as the system does when memory runs out"
    rank = process_of_rank(engine._runner)
    os.kill(rank.pid, signal.SIGKILL)

    with caplog.at_level(logging.ERROR), pytest.raises(EngineDiedError) as died:
        run(engine, requests())

    assert str(died.value) == cause
    assert f"{cause}; the engine ends with it" in caplog.messages
    assert not rank.is_alive()
    caplog.clear()  # its tracebacks hold the engine


def test_more_ranks_than_devices_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidConfigurationError) as refused:
        Ranks(make_config(folder, tensor_parallel_size=2), torch.device("cuda"))

    assert str(refused.value) == "tensor_parallel_size must be at most the number of CUDA devices (1), got 2"


def test_ranks_share_the_threads(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert set_num_threads(make_config(folder, tensor_parallel_size=2, num_threads=5)) == 2
        assert set_num_threads(make_config(folder, tensor_parallel_size=4, num_threads=3)) == 1
    finally:
        torch.set_num_threads(before)


def test_int8_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfigurationError) as refused:
        make_engine(folder, tensor_parallel_size=2, quantization="int8")

    assert str(refused.value) == (
        "quantization 'int8' has packed codes, which are not split, got tensor_parallel_size 2"
    )


@pytest.mark.slow
def test_streams_go_on_when_a_rank_is_killed(folder: Path) -> None:
    """kill -9 of rank 1 while it computes and while all wait: its engine ends, the next one continues."""
    before = holdings()
    expected = {request_id: token_ids(outputs) for request_id, outputs in run(make_engine(folder), requests()).items()}

    async def test() -> None:
        async with started(_supervisor(folder)) as client:
            streams = {request.request_id: client.submit([request]) for request in requests()}
            first = {request_id: await anext(stream) for request_id, stream in streams.items()}
            _grandchild().kill()
            for request_id, stream in streams.items():
                rest = [output async for outputs in stream for output in outputs]
                assert token_ids([*first[request_id], *rest]) == expected[request_id]
            num_restarts = sum(client.restarts.values())
            _grandchild().kill()  # nobody waits for an answer now
            await until(lambda: sum(client.restarts.values()) > num_restarts and client.is_ready)
            (outputs,) = (await collect(client.submit([requests()[0]]))).values()
            assert outputs == expected["0"]

    asyncio_run(test())
    assert not wait_until_gone(before)


@pytest.mark.slow
def test_a_rank_that_hangs_is_an_engine_that_makes_no_step(folder: Path) -> None:
    expected = token_ids(run(make_engine(folder), requests()[:1])["0"])

    async def test() -> None:
        async with started(_supervisor(folder)) as client:
            _grandchild().suspend()
            stream = client.submit(requests()[:1])
            async with hurried(lambda: not client.restarts):
                assert await collect(stream) == {"0": expected}
            assert dict(client.restarts) == {DeathKind.STALLED: 1}

    run_hurried(test())


@pytest.mark.slow
def test_a_first_rank_that_fails_in_a_step_ends_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others would take the next step's numbers for the rest of this one's."""
    engine = make_engine(folder, tensor_parallel_size=2)

    def embed(*args: object) -> None:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr("gptserve.engine.model.decoder.Decoder._embed", embed)
    with pytest.raises(EngineDiedError) as died:
        run(engine, requests())

    assert str(died.value) == "the first rank raised MemoryError in the middle of a step"
    caplog.clear()  # its tracebacks hold the engine


@pytest.mark.slow
def test_a_rank_that_cannot_allocate_its_cache_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first rank thinks that so much memory is there."""
    monkeypatch.setattr("gptserve.engine.runner.step_memory.plan_cache", lambda *args: (2**50, 128))
    monkeypatch.setattr("gptserve.engine.runner.step_memory.KVCache", lambda *args: None)
    with pytest.raises(EngineDiedError) as died:
        make_engine(folder, tensor_parallel_size=2)

    assert str(died.value) == f"rank 1 failed: num_blocks is {2**50}, but memory for that many could not be allocated"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_family_computes_the_same_on_two_ranks(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    if name in UNSPLIT:
        with pytest.raises(UnsupportedModelError) as refused:
            make_engine(tmp_path, tensor_parallel_size=2)
        assert str(refused.value).endswith(f"of this shape cannot be split among 2 ranks: {UNSPLIT[name]}")
        return
    alone, split = make_engine(tmp_path), make_engine(tmp_path, tensor_parallel_size=2)

    expected, found = run(alone, requests()), run(split, requests())

    assert {i: token_ids(outputs) for i, outputs in found.items()} == {i: token_ids(o) for i, o in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPTBigCode, one KV head", "BLOOM"])
def test_four_ranks_share_fewer_key_value_heads(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    alone, split = make_engine(tmp_path), make_engine(tmp_path, tensor_parallel_size=4)

    expected, found = run(alone, requests()), run(split, requests())

    assert {i: token_ids(outputs) for i, outputs in found.items()} == {i: token_ids(o) for i, o in expected.items()}


@pytest.mark.slow
def test_the_rank_with_the_least_memory_limits_the_caches_of_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 2**20  # of each rank, a quarter of what the sequences could use
    # Of the first rank alone: the other one is a process, and finds gigabytes.
    monkeypatch.setattr("gptserve.engine.parallel.ranks.cache_memory_bytes", lambda *_: (2**30, budget))
    engine = make_engine(folder, tensor_parallel_size=2, kv_cache_bytes=None)

    assert engine.info.kv_cache_bytes == 2 * budget


@pytest.mark.slow
def test_the_file_in_which_ranks_find_each_other_stays_until_all_have_met(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the first rank is done long before the last one has read the others' addresses."""
    receive, found = Ranks._receive, []

    def look(self: Ranks, rank: Any) -> Any:
        message = receive(self, rank)
        if isinstance(message, Memory):
            found.append(Path(self._folder.name, "meeting").exists())
        return message

    monkeypatch.setattr(Ranks, "_receive", look)
    engine = make_engine(folder, tensor_parallel_size=2)
    assert found == [True]
    assert engine._runner._ranks is not None
    assert not Path(engine._runner._ranks._folder.name).exists()


@pytest.mark.slow
def test_the_peak_of_a_rank_is_about_its_share(tmp_path: Path, tiny_gpt2: Path) -> None:
    fields = {"vocab_size": 96, "n_positions": 128, "n_embd": 768, "n_layer": 12, "n_head": 12}
    write_model(tmp_path, "gpt2", fields)
    whole = (tmp_path / "model.safetensors").stat().st_size

    def peak_bytes(folder: Path) -> int:
        engine = make_engine(folder, tensor_parallel_size=2)
        rank = process_of_rank(engine._runner)
        (line,) = (line for line in Path(f"/proc/{rank.pid}/status").read_text().splitlines() if "VmHWM" in line)
        del engine
        return int(line.split()[1]) * 1024

    assert 0.45 * whole < peak_bytes(tmp_path) - peak_bytes(tiny_gpt2) < 0.75 * whole


def process_of_rank(runner: ModelRunner) -> Any:
    """Return the process of the only other rank; its watch reaps it, so nobody else may wait for it."""
    assert runner._ranks is not None
    (rank,) = runner._ranks._ranks
    return rank.link.process


def _supervisor(folder: Path) -> Supervisor:
    factory = functools.partial(load_engine, make_config(folder, tensor_parallel_size=2))
    make_client = functools.partial(ProcessClient, factory)
    return Supervisor(make_client, max_restarts=2, stall_limit_s=LIMIT_S, load_limit_s=LIMIT_S)


def _grandchild() -> psutil.Process:
    """Return the rank of an engine in a process of its own."""
    (rank,) = (p for p in psutil.Process().children(recursive=True) if p.ppid() != os.getpid() and _is_spawned(p))
    return rank


def _is_spawned(process: psutil.Process) -> bool:
    return "spawn_main" in " ".join(process.cmdline())


def _logprobs(outputs: Sequence[TokenOutput]) -> list[float]:
    entries = [entry for output in outputs for entry in (*output.logprobs, *(output.prompt_logprobs or ()))]
    return [entry.logprob for entry in entries if entry is not None]

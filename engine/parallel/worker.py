"""A rank beyond the first: it computes its share of the layers for each step that the first rank sends, and no more.

It has its heads' KV cache, and graphs of its decoding steps. It knows no requests, vocabulary or sampling. ranks.py
starts it as a child process of the first rank, node.py on another machine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.gpu.recorded_steps import RecordedSteps, capture_of, obstacle
from gptserve.engine.child import end_with_parent
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import explain
from gptserve.engine.model.attention import AttentionMetadata
from gptserve.engine.model.batch import model_input
from gptserve.engine.model.decoder import Layers
from gptserve.engine.model.group import Group, Meeting, RankLostError, choose_order
from gptserve.engine.model.loading import StreamedTensors
from gptserve.engine.parallel.kept_warnings import KeptWarnings
from gptserve.engine.parallel.messages import Cache, Failed, Finding, Loaded, Memory, Step, receive, send
from gptserve.engine.runner.fingerprint import weights_digest
from gptserve.engine.runner.hardware import set_num_threads
from gptserve.engine.runner.kv_cache import KVCache, cache_dtype, cache_memory_bytes
from gptserve.engine.runner.products import Linears
from gptserve.engine.runner.setup import set_up
from gptserve.weights.loading_threads import loading_threads
from gptserve.weights.sharding import Share


def run_rank(parent_pid: int, config: EngineConfig, share: Share, meeting: Meeting, connection: Connection) -> None:
    """Run in the rank's process until the first rank closes the connection or dies."""
    errors = logging.StreamHandler()
    errors.setLevel(logging.ERROR)
    logging.getLogger().addHandler(errors)  # the first rank logs the warnings
    with connection, contextlib.suppress(EOFError, ConnectionError), KeptWarnings() as warnings:
        end_with_parent(parent_pid)
        try:
            with torch.inference_mode():
                _serve(config, share, meeting, connection, warnings.messages)
        except RankLostError:
            connection.recv_bytes()  # the first rank knows which one, and ends all others
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            send(connection, Failed(explain(error)))


def _serve(
    config: EngineConfig, share: Share, meeting: Meeting, connection: Connection, warnings: Sequence[str]
) -> None:
    num_threads = set_num_threads(config)
    torch.set_num_threads(1)  # until a step says how many
    setup = set_up(config, share, num_threads)
    device, dtype, model, backend, operations = setup.device, setup.dtype, setup.model, setup.backend, setup.operations
    group = Group(share, meeting, device, choose_order(config, device))
    with loading_threads(num_threads):
        linears = Linears(call_rows=setup.products.call_rows)
        # Nothing else may hold the stream, as it holds its last tensor.
        layers = Layers(
            model, StreamedTensors(setup.stream(), linears, group=group, operations=operations), backend, device
        )
    digest = weights_digest(config) if share.rank >= config.num_local_ranks else ""
    send(connection, Loaded(tuple(warnings), digest))
    group.meet()
    send(connection, Memory(*cache_memory_bytes(config, device, 0)))
    plan: Cache = receive(connection)
    cache = KVCache(model, plan.num_blocks, config.block_size, cache_dtype(config, dtype), device)
    layers.set_max_model_len(plan.max_model_len, device)
    send(connection, plan)

    def compute(token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = torch.empty(len(positions_T), model.hidden_size, dtype=dtype, device=device)
        group.broadcast_(x)
        return layers(x, positions_T, cache, metadata)

    steps: RecordedSteps | None = None
    if plan.has_graphs:
        steps = RecordedSteps(compute, cache, config, plan.max_model_len, device)
        found = obstacle(backend, host_starts_experts=operations.host_starts_experts(model))
        if _record(steps, found, model.vocab_size, device, connection) is not None:
            steps = None
    while True:
        step: Step = receive(connection)
        torch.set_num_threads(step.num_torch_threads)
        native.set_num_threads(step.num_threads)
        if step.graph_size is None:
            inputs = model_input(step.arrays, device)
            compute(inputs.token_ids_T, inputs.positions_T, inputs.metadata)
        else:
            assert steps is not None, "all ranks have graphs, or none"
            recorded = steps.of(step.graph_size)
            recorded.fill(step.arrays)
            recorded.replay()


def _record(
    steps: RecordedSteps, found: str | None, vocab_size: int, device: torch.device, connection: Connection
) -> str | None:
    """Record the steps while the first rank does (capture_decoding); return what kept a rank from it, or None."""

    def agree(found: str | None) -> str | None:
        send(connection, Finding(found))
        finding: Finding = receive(connection)
        return finding.obstacle

    capture = capture_of(device)
    assert capture is not None, "the first rank has one"
    found = agree(found) or steps.record(capture, agree)
    found = found or agree(None)  # the first rank has recorded its draws
    return found or steps.disagreement(vocab_size, agree)

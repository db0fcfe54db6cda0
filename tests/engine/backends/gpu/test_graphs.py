"""Decoding by graphs, with a stand-in on a CPU: a replay records nothing and computes anew from the same tensors.

So these tests show which steps have graphs, that their inputs and padding are right, and that nothing in what is
recorded waits for the device or reads the host. That CUDA repeats it is seen in test_cuda.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gptserve.engine import staging
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.cpu.draw import choose
from gptserve.engine.backends.gpu.attention import TritonAttention
from gptserve.engine.backends.gpu.graphs import DecodeGraphs, capture_decoding
from gptserve.engine.backends.gpu.operations import TritonOperations
from gptserve.engine.backends.gpu.recorded_steps import Capture, RecordedStep, Replay, batch_sizes
from gptserve.engine.backends.gpu.sampler import KINDS, Kind, TritonSampler
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.model.attention import AttentionBackend, AttentionMetadata, AttentionSpec
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.request import Request, SamplingParams, TokenLogprobs
from gptserve.engine.runner import runner
from gptserve.engine.runner.kv_cache import KVCache
from gptserve.engine.sampling.choice import Choice
from gptserve.engine.scheduling.sequence import ScheduledSequence, SequenceState
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from tests.conftest import MakeGPT2
from tests.engine.backends.gpu.host_copies import DEVICE, Copies, Lists
from tests.engine.batches import arrays_of, step_of
from tests.engine.runs import make_config, make_engine, run, token_ids
from tests.engine.test_grammars import ragged
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES, WITH_STATES

pytestmark = pytest.mark.skipif(not CpuAttention.is_available(), reason="installed without a compiler")

CPU = torch.device("cpu")
LOADS: dict[str, dict[str, Any]] = {
    "batches that grow and shrink": {"max_num_seqs": 7},
    "one at a time": {"max_num_seqs": 1},
    "preempted": {"num_blocks": 12, "block_size": 4, "max_num_seqs": 8, "max_model_len": 48},
    "drafts": {"speculative_ngram": 2, "max_num_seqs": 2},
}
ALWAYS = {"GPT-2", "BLOOM", "Gemma 3, past its window", "gpt-oss, past its window"}
"""The families of the tests that are not slow."""


@pytest.fixture(autouse=True)
def as_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch start the operations one by one, not a program of a CPU."""
    monkeypatch.setattr(runner, "native_decoder", lambda *arguments: None)


class Rerun:
    """The stand-in for CudaCapture."""

    num_replays = 0

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        def replay() -> Tensor:
            self.num_replays += 1
            return compute()

        return replay


def capture_for(engine: Engine, capture: Capture, **options: Any) -> DecodeGraphs | None:
    """Return graphs for an engine that has run nothing yet."""
    runner = engine._runner
    backend, sampler = options.pop("backend", CpuAttention()), options.pop("sampler", None)
    sizes = {"max_num_seqs": engine.info.max_num_seqs, "block_size": engine.info.block_size}
    config = make_config(Path(), **{**sizes, **options})
    with torch.inference_mode():
        return capture_decoding(
            *(config, runner._model, runner._decoder, backend),
            *(runner._cache, engine.info.max_model_len, CPU, capture, sampler),
        )


class ByLibrary(TritonSampler):
    """Stands in for the kernels: it computes what they do from what is staged for them."""

    def __init__(self, vocab_size: int) -> None:
        self._allocate(vocab_size, 12, CPU, 256)

    def draw(self, logits: Tensor, kind: Kind) -> Tensor:
        for row, entry in enumerate(self._table[: len(logits)].tolist()):
            noise, top_p, temperature, min_p, top_k, source, *_ = entry
            if source >= 0:
                assert kind == "all" or not top_k
                assert kind != "plain" or (top_p == 1.0 and not min_p)
                scores = (self._scores if source else logits)[row : row + 1]
                self._token_ids[row] = choose(scores, [Choice(noise, top_p, temperature, min_p, int(top_k))])[0]
        return self._token_ids[: len(logits)]

    def _adjust(self, logits: Tensor, table_A8: Tensor, drafts: Tensor, masks: Tensor) -> None:
        for row, seat, mask, *penalties, start, end in table_A8.tolist():
            scores_V = logits[int(row)].clone()
            if seat >= 0:
                assert self.counts.words is not None
                words_V = self.counts.words[int(seat)]
                counts_V = (words_V >> 1) + torch.bincount(drafts[int(start) : int(end)], minlength=len(words_V))
                repetition, frequency, presence = penalties
                penalized_V = torch.where(scores_V > 0, scores_V / repetition, scores_V * repetition)
                scores_V = torch.where((words_V > 0) | (counts_V > 0), penalized_V, scores_V)
                penalty_V = (frequency * counts_V.double() + presence).float()
                scores_V = torch.where(counts_V > 0, scores_V - penalty_V, scores_V)
            if mask >= 0:
                bits = np.unpackbits(masks[int(mask)].numpy().view(np.uint8), bitorder="little")
                scores_V[torch.from_numpy(bits[: len(scores_V)] == 0)] -= torch.inf
            self._scores[int(row)] = scores_V


def requests() -> list[Request]:
    """Return requests with and without grammars, greedy and drawn, whose answers have different lengths."""
    return [replace(r, params=replace(r.params, max_tokens=5 + 4 * (i % 7))) for i, r in enumerate(ragged())]


def results(engine: Engine, asked: list[Request] | None = None) -> dict[str, tuple[list[int], list[TokenLogprobs]]]:
    outputs = run(engine, (asked or requests())[: 4 * engine.info.max_num_seqs])
    return {i: (token_ids(its), [entry for output in its for entry in output.logprobs]) for i, its in outputs.items()}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("load", "dtype"),
    [
        ("batches that grow and shrink", "bfloat16"),
        pytest.param("preempted", "float32", marks=pytest.mark.slow),
        ("drafts", "float32"),
        pytest.param("batches that grow and shrink", "float32", marks=pytest.mark.slow),
        pytest.param("one at a time", "float32", marks=pytest.mark.slow),
    ],
)
def test_with_graphs_every_answer_has_the_same_bits(load: str, dtype: str, storyteller: Path) -> None:
    options = {"dtype": dtype, **LOADS[load]}
    plain, graphed = (make_engine(storyteller, **options) for _ in range(2))
    capture = Rerun()
    graphed._runner.graphs = capture_for(graphed, capture)
    capture.num_replays = 0
    assert results(graphed) == results(plain)
    assert 0.3 * graphed.stats.num_steps < capture.num_replays < graphed.stats.num_steps
    assert graphed.stats.num_preemptions > 0 or load != "preempted"
    assert graphed.stats.num_draft_tokens > 0 or load != "drafts"


def penalized() -> list[Request]:
    """Return requests of which most have penalties, some more than that, and pairs are choices of one."""
    kinds: list[dict[str, Any]] = [
        *({"repetition_penalty": 1.3}, {"frequency_penalty": 0.7, "top_p": 0.9}, {"top_k": 9}),
        *({"presence_penalty": 1.5, "temperature": 0.0}, {"repetition_penalty": 0.8, "logit_bias": {30: 3.0}}),
        {"frequency_penalty": 0.4, "bad_words": ((40,),), "min_tokens": 9, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    ]
    return [
        replace(r, seed=i // 2, choice_index=i % 2, params=replace(r.params, **kinds[i // 2 % len(kinds)]))
        for i, r in enumerate(requests())
    ]


@pytest.mark.parametrize(
    "load", [pytest.param(name, marks=() if name == "preempted" else pytest.mark.slow) for name in LOADS]
)
def test_with_recorded_draws_and_counts_of_the_device_every_answer_has_the_same_bits(
    load: str, storyteller: Path
) -> None:
    plain, graphed = (make_engine(storyteller, dtype="float32", **LOADS[load]) for _ in range(2))
    sampler, capture = ByLibrary(graphed.info.vocab_size), Rerun()
    graphed._runner.graphs = capture_for(graphed, capture, sampler=sampler)
    graphed._runner.choose = sampler.choose
    capture.num_replays = 0
    assert results(graphed, penalized()) == results(plain, penalized())
    assert 0.3 * graphed.stats.num_steps < capture.num_replays
    assert capture.num_replays % 2 == 0, "logits and tokens"
    assert graphed.stats.num_preemptions > 0 or load != "preempted"
    assert graphed.stats.num_draft_tokens > 0 or load != "drafts"
    sampler.counts.release_if_unused()
    assert sampler.counts.words is None, "all have ended"


@pytest.mark.some(2)
@pytest.mark.parametrize("change", ["token_ids_T", "positions_T", "slots_T", "kv_lens_S", "block_tables_SN"])
def test_an_input_of_another_step_would_be_seen(change: str, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the test above might compare what depends on nothing."""
    graphs, compute = capture_for(make_engine(tiny_gpt2), Rerun(), max_num_seqs=4), Decoder.hidden_states
    assert graphs is not None
    step = [decoding([5, 9, 3], [1]), decoding([7] * 20, [2, 4]), decoding([8, 1], [5])]
    other = [decoding([6], [3]), decoding([4] * 30, [4, 2]), decoding([2, 3, 3], [0])]
    seen: list[Tensor] = []

    def computing(self: Decoder, token_ids_T: Tensor, positions_T: Tensor, cache: KVCache, metadata: Any) -> Tensor:
        kept = vars_of(token_ids_T, positions_T, metadata)[change]
        seen.append(kept.clone())
        kept.copy_(seen[0])
        return compute(self, token_ids_T, positions_T, cache, metadata)

    logits_of(graphs, other)
    expected = logits_of(graphs, step)
    monkeypatch.setattr(Decoder, "hidden_states", computing)
    logits_of(graphs, other)
    assert not torch.equal(logits_of(graphs, step), expected)


def vars_of(token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata) -> dict[str, Tensor]:
    inputs = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    return {"token_ids_T": token_ids_T, "positions_T": positions_T, **inputs}


def decoding(token_ids: list[int], block_ids: list[int]) -> ScheduledSequence:
    """Return a sequence of which the last token is computed."""
    request = Request("r", (), SamplingParams(), seed=0)
    known = SequenceState(request, 0, token_ids, num_computed=len(token_ids) - 1, block_ids=block_ids)
    return ScheduledSequence(known, 1)


def logits_of(graphs: DecodeGraphs, items: Sequence[ScheduledSequence]) -> Tensor:
    with torch.inference_mode():
        logits = graphs.logits(arrays_of(*items))
    return logits[: len(items)].clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_changes_no_bit_of_cache_or_logits(dtype: str, tiny_gpt2: Path) -> None:
    items = [decoding([5, 9, 3], [1]), decoding([7] * 20, [2, 4]), decoding([8, 1], [5])]
    found = []
    for max_num_seqs in (3, 8):  # a graph of just these rows, and one with five more
        engine = make_engine(tiny_gpt2, dtype=dtype, num_blocks=8)
        graphs = capture_for(engine, Rerun(), max_num_seqs=max_num_seqs)
        assert graphs is not None
        graphs._recorded.steps = graphs._recorded.steps[:1]
        for layer in engine._runner._cache.layers:
            with torch.inference_mode():
                layer.fill_(0.5)
        logits_of(graphs, [decoding([1] * 20, [6, 7])] * max_num_seqs)  # what was there before
        found.append((logits_of(graphs, items), [layer.clone() for layer in engine._runner._cache.layers]))
    (logits, layers), (padded_logits, padded_layers) = found
    assert torch.equal(logits, padded_logits)
    for layer, padded in zip(layers, padded_layers, strict=True):
        assert torch.equal(layer, padded)
        written = (layer != 0.5).any(-1).any(2).any(0).nonzero().tolist()  # block and offset
        assert written == [[1, 2], [4, 3], [5, 1], [7, 3]]


def test_steps_that_compute_known_tokens_or_drafts_have_no_graph() -> None:
    lone = decoding([5, 9, 3], [1])
    prompt = SequenceState(Request("p", (3,), SamplingParams(prompt_logprobs=1), 0), 0, [3], block_ids=[3])
    drafted = ScheduledSequence(decoding([4, 4], [2]).sequence, 3, draft=(4, 4))
    behind = decoding([6, 6, 6], [4])
    behind.sequence.num_computed = 1  # as after a preemption: its next token is known
    behind = ScheduledSequence(behind.sequence, 1)
    for other in (ScheduledSequence(prompt, 1), drafted, behind):
        assert not step_of(lone, other).decodes
    assert step_of(lone, lone).decodes


def test_sizes_are_powers_of_two_up_to_the_largest_batch() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(7) == [1, 2, 4, 7]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 32, 64]


def test_in_a_cache_with_fewer_tokens_than_sequences_graphs_are_compared_with_steps_of_their_sizes(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen, compute = make_engine(tiny_gpt2, num_blocks=1, block_size=3), set[int](), Decoder.hidden_states

    def computing(decoder: Decoder, token_ids_T: Tensor, *rest: Any) -> Tensor:
        seen.add(len(token_ids_T))
        return compute(decoder, token_ids_T, *rest)

    monkeypatch.setattr(Decoder, "hidden_states", computing)
    assert capture_for(engine, Rerun(), max_num_seqs=5) is not None
    assert seen == {1, 2, 4, 5}


def keep_first(compute: Callable[[], Tensor]) -> Replay:
    """Return a Replay that ignores its inputs."""
    out = compute()
    return lambda: out


def fail(compute: Callable[[], Tensor]) -> Replay:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_graphs_that_are_dropped_are_freed_at_once(tiny_gpt2: Path) -> None:
    """Those with which memory is measured: what they hold until garbage is collected, the cache would lack."""
    engine = make_engine(tiny_gpt2)
    runner, config = engine._runner, make_config(tiny_gpt2, max_num_seqs=4)
    sampler = ByLibrary(engine.info.vocab_size)
    gc.collect()
    gc.disable()
    try:
        with torch.inference_mode():
            graphs = DecodeGraphs(runner._decoder, runner._cache, config, 64, CPU, sampler)
            assert graphs.record(keep_first) is None
        held = [weakref.ref(graphs), *map(weakref.ref, graphs._recorded.steps)]
        del graphs
        assert [ref() for ref in held] == [None, None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("capture", "backend", "shape", "reason"),
    [
        (keep_first, CpuAttention, None, "they give other numbers for a batch of 4"),
        (
            *(fail, CpuAttention, None),
            "they failed with RuntimeError: operation not permitted when stream is capturing",
        ),
        (
            *(Rerun(), ReferenceAttention, None),
            "attention is 'reference', which the host steers by the lengths of the sequences",
        ),
        (Rerun(), CpuAttention, "gpt-oss, past its window", "the host starts the experts of each step"),
    ],
)
def test_where_graphs_fail_differ_or_cannot_be_they_are_left_with_the_reason(
    capture: Capture,
    backend: type[AttentionBackend],
    shape: str | None,
    reason: str,
    tiny_gpt2: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if shape is not None:
        write_model(tmp_path, *SHAPES[shape])
    engine = make_engine(tmp_path if shape else tiny_gpt2)
    assert capture_for(engine, capture, max_num_seqs=4, backend=backend()) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"decoding: kernels started one by one, which is slower, are used instead of CUDA graphs: {reason}"
    )


def test_a_draw_that_does_not_read_what_is_staged_is_seen(tiny_gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(tiny_gpt2)

    def capture(compute: Callable[[], Tensor]) -> Replay:
        if not isinstance(compute, partial):
            return compute
        drawn = compute().clone()
        return lambda: drawn

    assert capture_for(engine, capture, max_num_seqs=4, sampler=ByLibrary(engine.info.vocab_size)) is None
    assert caplog.messages[-1].endswith(": they give other tokens for a batch of 4")


def test_a_graph_that_stores_no_keys_is_seen(tiny_gpt2: Path) -> None:
    engine = make_engine(tiny_gpt2)

    def forget(compute: Callable[[], Tensor]) -> Replay:
        def replay() -> Tensor:
            write = CpuAttention.write
            CpuAttention.write = lambda *arguments: None  # type: ignore[method-assign, assignment]
            try:
                return compute()
            finally:
                CpuAttention.write = write  # type: ignore[method-assign]

        return replay

    assert capture_for(engine, forget) is None


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", ["the length", "the blocks", "the scale"])
def test_a_graph_that_attends_to_other_keys_than_a_step_is_seen(
    wrong: str, dtype: str, make_gpt2: MakeGPT2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its kernels, started one by one, do the same with what was recorded. A block has 16 tokens."""
    attend, num_wrong = CpuAttention.attend, 0

    def attend_wrongly(
        self: CpuAttention, query: Tensor, cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        nonlocal num_wrong
        if metadata.kv_lens == (64,) * len(metadata.kv_lens):  # as recorded
            num_wrong += 1
            if wrong == "the length":
                metadata = replace(metadata, kv_lens_S=metadata.kv_lens_S.clamp(max=16))
            elif wrong == "the blocks":
                tables_SN = metadata.block_tables_SN
                metadata = replace(metadata, block_tables_SN=tables_SN[:1].repeat(len(tables_SN), 1))
            else:
                spec = replace(spec, scale=2 * spec.scale)
        return attend(self, query, cache, metadata, spec)

    # Large weights, so that attention is not lost among the rounding of the rest.
    engine = make_engine(make_gpt2(initializer_range=0.5), max_model_len=64, dtype=dtype)
    assert capture_for(engine, Rerun()) is not None
    monkeypatch.setattr(CpuAttention, "attend", attend_wrongly)
    assert capture_for(engine, Rerun()) is None
    assert num_wrong > 0


@pytest.mark.parametrize(("dtype", "by"), [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("exact", [False, True])
def test_kernels_of_a_graph_may_round_otherwise_unless_bits_are_promised(
    exact: bool, dtype: str, by: float, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = CpuAttention.attend

    def attend_otherwise(
        self: CpuAttention, query: Tensor, cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        is_recorded = metadata.kv_lens == (64,) * len(metadata.kv_lens)
        return attend(self, query, cache, metadata, spec) * (1 + by * is_recorded)

    engine = make_engine(tiny_gpt2, max_model_len=64, dtype=dtype)
    monkeypatch.setattr(CpuAttention, "attend", attend_otherwise)
    assert (capture_for(engine, Rerun(), batch_invariant=exact) is None) == exact


def test_a_graph_must_give_the_bits_of_its_kernels(tiny_gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(tiny_gpt2)
    assert capture_for(engine, lambda compute: lambda: compute() * (1 + 1e-6)) is None
    assert caplog.messages[-1].endswith(": they give other numbers for a batch of 64")


def test_no_graphs_are_tried_where_none_are_wanted(tiny_gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(tiny_gpt2)
    assert engine._runner.graphs is None
    assert capture_for(engine, fail, enforce_eager=True) is None
    assert not caplog.records


def test_a_graph_goes_before_what_it_recorded() -> None:
    """As NCCL wants it, and in whatever order the collector clears what it found in a cycle."""
    gone: list[str] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self._name = name

        def __del__(self) -> None:
            gone.append(self._name)

    def make_cycle() -> None:
        # Arrays, as objects of C++ are, are unknown to the collector: what they hold goes with them and not before.
        group, graph = (np.array([Noting(name)], dtype=object) for name in ("group", "graph"))
        step = RecordedStep(2, lambda *inputs: torch.zeros(len(group)), 16, 32, 2, CPU)
        assert step.record(lambda compute: lambda: torch.zeros(len(graph))) is None
        step.cycle = step  # type: ignore[attr-defined]

    make_cycle()
    gc.collect()
    assert gone == ["graph", "group"]


class Launches:
    """Stands in for the Triton kernels: it notes grids and whatever is no tensor."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def __getattr__(self, kernel: str) -> Any:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            numbers = [x for x in arguments if not isinstance(x, Tensor)]
            self.noted.append((grid, numbers, constants))

        return launch


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow)
        for name in SHAPES
        if name not in WITH_STATES
    ],
)
def test_what_is_recorded_neither_waits_nor_reads_the_host(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every family on a device without numbers: whatever asked for one would fail."""
    monkeypatch.setattr(staging, "pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    write_model(tmp_path, *SHAPES[name])
    model, launches = load_config(tmp_path), Launches()
    backend = object.__new__(TritonAttention)
    vars(backend).update(_kernels=launches, _piece=64, _max_split_rows=64, _programs=256, _exact=True, build="")
    tensors = Checkpoint(tmp_path, model).stream(dtype=torch.bfloat16, device="cpu")
    kernels = object.__new__(TritonOperations)
    vars(kernels).update(_kernels=launches, build="")
    # A scale of a layer is read once, while it loads.
    of_device = ((key, tensor if key.endswith(".scale") else tensor.to(DEVICE)) for key, tensor in tensors)
    decoder = Decoder(model, of_device, backend, operations=kernels.operations())
    decoder.set_max_model_len(model.max_position)
    cache = KVCache(model, 8, 16, torch.bfloat16, DEVICE)
    config = EngineConfig(Path(), max_num_seqs=5)
    sampler = object.__new__(TritonSampler)
    vars(sampler).update(_kernels=launches)
    sampler._allocate(model.vocab_size, 12, DEVICE, 256)
    graphs = DecodeGraphs(decoder, cache, config, model.max_position, DEVICE, sampler)
    assert graphs.record(Rerun()) is None
    first: list[Any] = []
    for items in ([decoding([5, 9, 3], [1])] * 3, [decoding([7] * 20, [2, 4])] * 5):
        step = graphs._latest = graphs._recorded.steps[0]
        arrays, launches.noted = arrays_of(*items).as_numpy(), []
        with Lists(), Copies() as copies:
            step.fill(arrays, torch.empty(len(items), dtype=torch.int64, device=DEVICE))
        assert (copies.count, copies.num_started) == (1, 2), "the table of blocks goes on to its place"
        foreseen = [decoding([*item.sequence.token_ids, ~0], [1, 2]) for item in items]
        arrays = arrays_of(*foreseen).as_numpy()
        with Lists(), Copies() as copies:
            step.fill(arrays, torch.empty(len(items), dtype=torch.int64, device=DEVICE))
        assert (copies.count, copies.num_started) == (1, 3), "and the ids that the step before chose"
        with Lists(), Copies() as copies:
            assert step.replay().shape == (5, model.vocab_size)
        assert copies.count == 0
        assert len(launches.noted) >= 2 * model.num_layers
        num_launches = len(launches.noted)
        for kind in KINDS:
            with Lists(), Copies() as copies:
                graphs._draw(step.out, kind)
            assert copies.count == 0
        assert len(launches.noted) == num_launches + 3 + 12 + 20
        first = first or launches.noted
        assert launches.noted == first

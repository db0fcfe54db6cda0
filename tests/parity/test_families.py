"""Every family against transformers in fp32: the same logits, and the same greedy ids through the whole engine.

`pytest -rP` shows the table of differences; `python -m tests.parity.table` writes that of docs/dev/parity.md.
"""

from __future__ import annotations

import json
import re
import shutil
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.cpu.decoder import NativeDecoder, native_decoder
from gptserve.engine.backends.reference.attention import ReferenceAttention
from gptserve.engine.model.attention import AttentionBackend, AttentionMetadata
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.model.operations import TORCH, Operations
from gptserve.engine.request import Request, SamplingParams, TokenLogprobs, TokenOutput
from gptserve.engine.runner import products
from gptserve.engine.runner.kv_cache import KVCache
from gptserve.engine.runner.products import Linears
from gptserve.engine.state_place import StatePlace
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import FAMILIES, load_config
from tests.engine.runs import make_engine, make_request, ragged_prompts, run, token_ids
from tests.engine.steps import make_metadata, positions, shuffled_tables
from tests.parity.models import load_in_transformers, write_model
from tests.parity.shapes import FIRST, SHAPES, UNLIKE

DOCS = Path(__file__).parents[2] / "docs" / "dev" / "parity.md"
NUM_GREEDY = 64
CHUNKS = (16, 7, 1, 1, 1, 30, 1, 1, 1, 1)

Written = Callable[[str], Path]

all_or_unlike = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in UNLIKE else pytest.mark.slow) for name in SHAPES]
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return the folder of a shape's checkpoint, written once."""
    folders: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("model")
            write_model(folders[name], *SHAPES[name])
        return folders[name]

    return write


def greedy(prompts: list[list[int]], max_tokens: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [Request(str(i), tuple(prompt), sampling, seed=0) for i, prompt in enumerate(prompts)]


def paged_logits(
    folder: Path,
    prompts: list[list[int]],
    backend: AttentionBackend,
    dtype: torch.dtype = torch.float32,
    operations: Operations = TORCH,
) -> list[torch.Tensor]:
    """Return the logits [len(prompt), vocab] of each prompt, all prompts advancing together by CHUNKS."""
    checkpoint = Checkpoint(folder, load_config(folder))
    config, tensors = (
        checkpoint.config,
        checkpoint.stream(dtype=dtype, device="cpu", keeps=operations.keeps),
    )
    longest, block_size = max(map(len, prompts)), 4
    decoder = Decoder(config, tensors, backend, Linears(), operations=operations, compile_program=native_decoder)
    decoder.set_max_model_len(longest)
    num_blocks = len(prompts) * (longest // block_size + 1)
    tables = shuffled_tables([longest + 1] * len(prompts), block_size, num_blocks)
    cache = KVCache(config, num_blocks, block_size, dtype, torch.device("cpu"), num_states=len(prompts))
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = 0
    for chunk in CHUNKS:
        live = [s for s, prompt in enumerate(prompts) if len(prompt) > done]
        if not live:
            break
        kv_lens = [min(len(prompts[s]), done + chunk) for s in live]
        query_lens = [kv_len - done for kv_len in kv_lens]
        ids = [token for s, kv_len in zip(live, kv_lens, strict=True) for token in prompts[s][done:kv_len]]
        states = [number for s in live for number in StatePlace(s, s if done else -1)]
        metadata = make_metadata(query_lens, kv_lens, [tables[s] for s in live], block_size)
        metadata = replace(metadata, states=tuple(states))
        logits = logits_of(decoder, ids, positions(query_lens, kv_lens), cache, metadata)
        for s, part in zip(live, logits.split(query_lens), strict=True):
            rows[s].append(part)
        done += chunk
    return [torch.cat(parts) for parts in rows]


def logits_of(
    decoder: Decoder, token_ids: list[int], positions_T: torch.Tensor, cache: KVCache, metadata: AttentionMetadata
) -> torch.Tensor:
    """Return the logits of all rows of a step, by the decoder's program if it has one."""
    program = decoder.program
    if program is None:
        return decoder.logits(decoder.hidden_states(torch.tensor(token_ids), positions_T, cache, metadata))
    assert isinstance(program, NativeDecoder)
    of_attention = array("i", metadata.query_starts), array("i", metadata.kv_lens)
    tables, slots = metadata.block_tables_SN.flatten().tolist(), metadata.slots_T.tolist()
    ids = array("q", token_ids), array("q", positions_T.tolist()), array("q")
    places = array("i", metadata.states)
    program.run(StepArrays(*ids, *of_attention, array("i", tables), array("q", slots), places), cache)
    return program.logits(slice(len(token_ids)))


def largest_difference(folder: Path, backend: AttentionBackend) -> float:
    """Return it over ragged prompts, checking that neighbouring positions differ by far more."""
    prompts = ragged_prompts(5, 60, vocab_size=90)
    model = load_in_transformers(folder)
    differences = []
    with torch.no_grad():
        for prompt, logits in zip(prompts, paged_logits(folder, prompts, backend), strict=True):
            expected = model(torch.tensor([prompt])).logits[0]
            differences.append((logits - expected).abs().max().item())
            assert (logits - expected.roll(1, 0)).abs().max().item() > 1e-2 or len(prompt) == 1
    return max(differences)


def test_every_family_has_a_shape() -> None:
    # transformers does not know nanoGPT: its tensors are GPT-2's, and tests/weights/test_convert.py reads them.
    assert {model_type for model_type, _ in SHAPES.values()} == FAMILIES.keys() - {"nanogpt"}


def test_the_table_in_the_docs_has_these_shapes_and_no_larger_differences() -> None:
    rows = re.findall(r"^\| (.+) \| `(.+)` \| (\S+) \| (\S+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: model_type for name, model_type, *_ in rows} == {name: shape[0] for name, shape in SHAPES.items()}
    assert all(0 < float(difference) < 1e-4 for row in rows for difference in row[2:])


@pytest.mark.some(
    *(40, "GPT-NeoX-CpuAttention", "Falcon 40B-CpuAttention", "Qwen2, YaRN, past its first context-ReferenceAttention")
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if kind is ReferenceAttention or name in UNLIKE else pytest.mark.slow)
        for name in SHAPES
        for kind in (ReferenceAttention, CpuAttention)
    ],
)
def test_logits_equal_those_of_transformers_over_ragged_chunks_and_cached_tokens(
    name: str, kind: type[AttentionBackend], written: Written
) -> None:
    if kind is CpuAttention and not CpuAttention.is_available():
        pytest.skip("the CPU kernel was not compiled")
    difference = largest_difference(written(name), kind())
    print(f"| {name} | `{SHAPES[name][0]}` | {kind.name} | {difference:.1e} |")  # noqa: T201 - the table
    assert difference < 1e-4


def test_gemma_3_caps_its_scores_as_transformers_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads attn_logit_softcapping for Gemma 3, but does not hand it to its attention: done here."""
    from transformers.models.gemma3 import modeling_gemma3

    model_type, fields = SHAPES["Gemma 3, past its window"]
    write_model(tmp_path, model_type, {**fields, "attn_logit_softcapping": 2.0})
    uncapped = largest_difference(tmp_path, ReferenceAttention())
    attend = modeling_gemma3.eager_attention_forward
    monkeypatch.setattr(
        modeling_gemma3,
        "eager_attention_forward",
        lambda module, *args, **options: attend(module, *args, **options, softcap=module.attn_logit_softcapping),
    )

    assert largest_difference(tmp_path, ReferenceAttention()) < 1e-4 < 1e-2 < uncapped


@pytest.mark.slow
@all_or_unlike
def test_sixty_four_greedy_ids_equal_those_of_transformers(name: str, written: Written) -> None:
    prompts = [[3], [1, 2, 3, 4, 5], list(range(13))]
    outputs = run(make_engine(written(name)), greedy(prompts, NUM_GREEDY))
    model = load_in_transformers(written(name))
    for i, prompt in enumerate(prompts):
        ids = token_ids(outputs[str(i)])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0]
        # Each id is the likeliest after those before it: what greedy decoding there would have given, id by id.
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids
        assert len(ids) == NUM_GREEDY


@pytest.mark.some(2)
@pytest.mark.skipif(not native.is_available(), reason="the library is not built")
@all_or_unlike
def test_programs_and_products_of_our_own_in_bf16_are_as_close_to_fp32_as_torch(
    name: str, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ragged_prompts(5, 60, vocab_size=90)
    exact = torch.cat(paged_logits(written(name), prompts, ReferenceAttention()))

    def error(backend: AttentionBackend) -> float:
        logits = torch.cat(paged_logits(written(name), prompts, backend, torch.bfloat16))
        return (logits - exact).abs().mean().item()

    of_products = error(ReferenceAttention())
    of_programs = error(CpuAttention()) if CpuAttention.is_available() else of_products
    monkeypatch.setattr(products, "product_of", lambda *choice: "torch")
    limit = 1.5 * error(ReferenceAttention())
    assert 0 < of_products < limit
    assert 0 < of_programs < limit


@pytest.mark.slow
@pytest.mark.skipif(not native.is_available(), reason="the library is not built")
@all_or_unlike
def test_the_instructions_of_any_cpu_give_the_same_logits(
    name: str, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the accuracy of fp32, which bf16 would miss by far."""
    prompts = ragged_prompts(5, 60, vocab_size=90)
    fastest = torch.cat(paged_logits(written(name), prompts, CpuAttention()))
    monkeypatch.setattr(native, "supported_variants", lambda element_bits: ("generic",))
    generic = torch.cat(paged_logits(written(name), prompts, CpuAttention("generic")))
    assert (generic - fastest).abs().max() < 1e-4


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "name", [pytest.param(FIRST[t], marks=() if FIRST[t] in UNLIKE else pytest.mark.slow) for t in sorted(FIRST)]
)
def test_shards_and_bf16_give_the_same_tensors(name: str, written: Written, tmp_path: Path) -> None:
    folder = written(name)
    tensors = load_file(folder / "model.safetensors")
    config = load_config(folder)
    whole = dict(Checkpoint(folder, config).stream(dtype=torch.float32, device="cpu"))
    shards = [{name: tensors[name].bfloat16() for name in list(tensors)[i::3]} for i in range(3)]
    for i, shard in enumerate(shards):
        save_file(shard, tmp_path / f"{i}.safetensors")
    weight_map = {name: f"{i}.safetensors" for i, shard in enumerate(shards) for name in shard}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(folder / "config.json", tmp_path)

    halves = dict(Checkpoint(tmp_path, config).stream(dtype=torch.bfloat16, device="cpu"))

    assert halves.keys() == whole.keys()
    differing = [name for name in whole if not torch.equal(halves[name], whole[name].bfloat16())]
    assert not differing or config.weight_factors  # what was rounded before it was multiplied is rounded twice
    assert all(torch.allclose(halves[name].float(), whole[name], rtol=2**-7) for name in differing)


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@all_or_unlike
def test_alone_equals_in_a_ragged_batch_in_chunks(name: str, dtype: str, written: Written) -> None:
    """Bit for bit: token ids and logprobs, greedy and sampled."""
    requests = [
        make_request(str(i), prompt, seed=i, max_tokens=12, logprobs=2, temperature=(i % 2) * 0.9)
        for i, prompt in enumerate(ragged_prompts(7, 40, vocab_size=90))
    ]
    lone = make_engine(written(name), dtype=dtype, enable_prefix_caching=False)
    alone = {r.request_id: result(run(lone, [r])[r.request_id]) for r in requests}

    together = run(
        make_engine(written(name), dtype=dtype, max_num_batched_tokens=16, max_num_seqs=6, block_size=8), requests
    )

    assert {i: result(outputs) for i, outputs in together.items()} == alone


def result(outputs: list[TokenOutput]) -> tuple[list[int], list[TokenLogprobs]]:
    return token_ids(outputs), [entry for output in outputs for entry in output.logprobs]

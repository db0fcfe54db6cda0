"""The report of a model: numbers worked out by hand."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from gptserve.server.cli.inspection import inspect_model, render
from gptserve.weights.families import load_config
from gptserve.weights.families.family import RawConfig
from gptserve.weights.families.gpt_oss import GPT_OSS
from gptserve.weights.families.llama import LLAMA
from gptserve.weights.families.nanogpt import NANOGPT
from gptserve.weights.inventory import StoredPart
from gptserve.weights.quantized.gguf import Gguf, GgufHalves
from gptserve.weights.quantized.gptq import read_gptq
from gptserve.weights.quantized.mxfp4 import MXFP4
from tests.weights.families.known import KNOWN

SHAPE = {
    "model_type": "nanogpt",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 8,
    "block_size": 64,
    "bias": False,
    "vocab_size": 100,
}
TINY = NANOGPT.read_config(RawConfig(SHAPE))
NUM_PARAMETERS = 100 * 8 + 64 * 8 + 2 * (8 * 24 + 8 * 8) + 2 * (2 * 8 * 32) + 5 * 8


def test_the_weights_are_counted_in_either_type() -> None:
    report = inspect_model("tiny", TINY, 2**20, 16)

    assert report.num_parameters == NUM_PARAMETERS
    in_codes, padded = 2 * (8 * 24 + 8 * 8 + 2 * 8 * 32) + 100 * 8, 2 * 32 * (24 + 8 + 32 + 8) + 32 * 100
    int8_bytes = 2 * (NUM_PARAMETERS - in_codes) + padded * 34 // 32
    sizes = [entry.weights_bytes for entry in report.by_dtype]
    assert sizes[:3] == [4 * NUM_PARAMETERS, 2 * NUM_PARAMETERS, int8_bytes]
    assert sizes[3] < int8_bytes
    assert report.by_dtype[2].part_bytes["head"] == 0  # it is the embedding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"), [("gpt-oss-20b", 12.8), pytest.param("gpt-oss-120b", 60.8, marks=pytest.mark.slow)]
)
def test_a_model_in_mxfp4_takes_as_much_as_its_published_files(name: str, published: float) -> None:
    """In GiB, by OpenAI's model card."""
    model = GPT_OSS.read_config(RawConfig(KNOWN[name][0]))
    report = inspect_model(name, model, 2**36, 16, types=(MXFP4,))

    assert [entry.dtype for entry in report.by_dtype] == ["float32", "bfloat16", "int8", "int4", "mxfp4"]
    assert round(report.by_dtype[-1].weights_bytes / 2**30, 1) == published


@pytest.mark.slow
def test_each_rank_of_a_model_in_mxfp4_has_its_share_in_smaller_groups() -> None:
    model = GPT_OSS.read_config(RawConfig(KNOWN["gpt-oss-20b"][0]))
    whole, first = (inspect_model("20b", model, 2**36, 16, num_ranks, (MXFP4,)).by_dtype[-1] for num_ranks in (1, 8))
    experts, vocabulary = 24 * 32 * 3 * 2880 * 2880, 2 * 2 * 201088 * 2880

    assert (whole.dtype, first.dtype) == ("mxfp4", "mxfp4")
    assert first.other_rank_weights_bytes is not None
    num_more_scales = experts // 3 * (1 / 8 - 1 / 32)  # of a third of the weights, whose rows are cut
    of_layers = (whole.weights_bytes - vocabulary + num_more_scales) / 8
    assert first.other_rank_weights_bytes == pytest.approx(of_layers, rel=0.01)


def test_what_fits_is_what_the_weights_leave() -> None:
    kv_bytes_per_token = 2 * 2 * 2 * 4 * 4
    memory = 4 * NUM_PARAMETERS + 9 * 16 * kv_bytes_per_token

    entry = inspect_model("tiny", TINY, memory, 16).by_dtype[0]

    assert (entry.dtype, entry.kv_bytes_per_token) == ("float32", kv_bytes_per_token)
    assert (entry.num_blocks, entry.num_tokens, entry.num_full_sequences) == (9, 144, 2)


def test_the_memory_is_what_is_free_here_unless_given() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    assert 0 < inspect_model("tiny", TINY, None, 16).memory_bytes <= machine


def test_the_table_shows_every_part_the_formula_and_a_tied_head() -> None:
    table = render(inspect_model("tiny", TINY, 2**20, 16))

    for part in ("embedding", "position", "attention", "feed-forward", "norms", "head (the embedding)", "total"):
        assert f"\n  {part} " in table
    assert "layer inputs" not in table
    assert "2 (key, value) x 2 layers x 2 KV heads x 4 head size x bytes a number; with" in table
    assert "; with --kv-cache-dtype int8 they are 64\n" in table
    assert "what 1.0 MiB hold" in table
    assert (
        "on a CPU a server reserves at most 40% of the memory that loading leaves free, unless --kv-cache-bytes says "
        "more; what is reserved is used only as the cache fills"
    ) in table


def test_the_table_names_the_stored_types_of_quantized_weights() -> None:
    types = read_gptq(RawConfig({"bits": 4, "dynamic": {"+:.*": {"bits": 8}}}))
    report = inspect_model("tiny", TINY, 2**20, 16, types=types)

    assert report.stored_types == ("GPTQ",)
    assert [entry.dtype for entry in report.by_dtype] == ["float32", "bfloat16", "int8", "int4"]
    assert "\nquantized weights in the files: GPTQ; a column has what they are unpacked to" in render(report)
    assert "in the files" not in render(inspect_model("tiny", TINY, 2**20, 16))


def test_each_part_shows_what_is_stored_in_how_many_bits() -> None:
    stored = [
        StoredPart("embed.weight", 0, 1, "F16", 1600, 800),
        *(StoredPart("blocks.0.qkv.weight", i, 3, ("Q4_K", "Q4_K", "Q6_K")[i], (36, 36, 52)[i], 64) for i in range(3)),
        *(StoredPart("blocks.1.qkv.weight", i, 3, "Q4_K", 36, 64) for i in range(3)),
        StoredPart("blocks.0.experts.0.ffn_up.weight", 0, 1, "MXFP4", 34, 64),
        StoredPart("blocks.1.attn_norm.weight", 0, 1, "F32", 32, 8),
    ]
    report = inspect_model("tiny", TINY, 2**20, 16, stored=reversed(stored))

    assert [(entry.part, entry.type_bytes, entry.bits_per_weight) for entry in report.stored] == [
        ("embedding", {"F16": 1600}, 16),
        ("attention q", {"Q4_K": 72}, 4.5),
        ("attention k", {"Q4_K": 72}, 4.5),
        ("attention v", {"Q4_K": 36, "Q6_K": 52}, 5.5),
        ("experts", {"MXFP4": 34}, 4.25),
        ("norms", {"F32": 32}, 32),
    ]
    table = render(report)
    assert "\n  attention v                       5.50            88 B  Q6_K, Q4_K\n" in table
    assert "in the files" not in render(inspect_model("tiny", TINY, 2**20, 16))


def test_stored_types_that_no_weight_has_are_not_named() -> None:
    """As those of GGUF's weights whose halves differ in type: there is one for each pair of the types in a file."""
    types = [Gguf("Q4_1"), GgufHalves(("Q4_1", "F32"), ("first", "last"))]
    stored = [StoredPart("blocks.0.qkv.weight", 0, 3, types[0].name, 36, 64)]

    assert inspect_model("tiny", TINY, 2**20, 16, types=types, stored=stored).stored_types == ("GGUF's Q4_1",)
    assert len(inspect_model("tiny", TINY, 2**20, 16, types=types).stored_types) == 2


def test_each_part_shows_what_it_is_computed_with_and_what_a_token_reads() -> None:
    report = inspect_model("tiny", TINY, 2**20, 16)

    floats, _, int8, _ = (entry.computed_with for entry in report.by_dtype)
    assert [(entry.part, entry.type_bytes, entry.bytes_per_token) for entry in floats] == [
        ("embedding", {"float32": 4 * 800}, 4 * 8),
        ("position", {"float32": 4 * 64 * 8}, 4 * 8),
        ("attention q, k, v", {"float32": 4 * 2 * 8 * 24}, 4 * 2 * 8 * 24),
        ("attention out", {"float32": 4 * 2 * 8 * 8}, 4 * 2 * 8 * 8),
        ("feed-forward", {"float32": 4 * 2 * 2 * 8 * 32}, 4 * 2 * 2 * 8 * 32),
        ("norms", {"float32": 4 * 5 * 8}, 4 * 5 * 8),
        ("head", {"float32": 0}, 4 * 800),  # it is the embedding
    ]
    assert [sum(sum(row.type_bytes.values()) for row in entry.computed_with) for entry in report.by_dtype] == [
        entry.weights_bytes for entry in report.by_dtype
    ]
    types = [",".join(entry.type_bytes) for entry in int8]
    assert types == ["int8", "bfloat16", "int8", "int8", "int8", "bfloat16", "int8"]
    table = render(report)
    columns = ["float32", "bfloat16", "int8", "int8"]
    assert any(line.split() == ["head", *columns] for line in table.splitlines())
    assert "\n  read for a token " in table


@pytest.mark.slow
def test_of_experts_a_token_reads_those_that_are_active() -> None:
    model = GPT_OSS.read_config(RawConfig(KNOWN["gpt-oss-20b"][0]))
    entry = inspect_model("20b", model, 2**36, 16, types=(MXFP4,)).by_dtype[-1]
    experts = next(row for row in entry.computed_with if row.part == "experts")

    assert set(experts.type_bytes) == {"MXFP4", "bfloat16"}  # the second of the biases
    assert experts.bytes_per_token == sum(experts.type_bytes.values()) * 4 // 32


def test_the_table_shows_a_head_of_its_own() -> None:
    untied = render(inspect_model("8B", LLAMA.read_config(RawConfig(KNOWN["Llama 3 8B"][0])), 2**20, 16))

    assert f"\n  head                  {128256 * 4096:>16,}" in untied


def test_a_rank_has_its_share_of_the_layers_and_the_first_one_the_vocabulary() -> None:
    model = LLAMA.read_config(RawConfig(KNOWN["Llama 3 70B"][0]))
    whole, first = (inspect_model("70B", model, 2**36, 16, num_ranks) for num_ranks in (1, 8))
    vocabulary, norms = 2 * 128256 * 8192, 2 * 80 * 8192

    assert [entry.dtype for entry in first.by_dtype] == ["float32", "bfloat16"]
    entry = first.by_dtype[1]
    split = whole.num_parameters - vocabulary - norms - 8192  # the last is the final norm
    assert entry.weights_bytes == 2 * (vocabulary + norms + 8192 + split // 8)
    assert entry.other_rank_weights_bytes == 2 * (norms + split // 8)
    assert entry.kv_bytes_per_token * 8 == whole.by_dtype[1].kv_bytes_per_token
    assert "70B (llama), the first of 8 ranks" in render(first)
    assert "\n  each other rank       " in render(first)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if fields["model_type"] in ("gpt2", "llama", "gpt_oss") else pytest.mark.slow)
        for name, (fields, _) in KNOWN.items()
    ],
)
def test_the_config_of_a_published_model_gives_its_published_size(name: str, tmp_path: Path) -> None:
    fields, published = KNOWN[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))

    report = inspect_model(name, load_config(tmp_path), 2**30, 16)

    assert report.num_parameters == published
    assert f"  {published:,} " in render(report)


def test_layers_that_read_the_keys_of_others_take_no_cache(tmp_path: Path) -> None:
    """E2B has 35 layers, of which 20 share: 12 with heads of 256 numbers and 3 with heads of 512 are left."""
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["gemma-4-E2B"][0]))
    report = inspect_model("E2B", load_config(tmp_path), 2**34, 16)
    assert (report.num_layers, report.num_kv_layers) == (35, 15)
    assert [entry.kv_bytes_per_token for entry in report.by_dtype][:2] == [36_864, 18_432]
    table = render(report)
    assert "over 15 layers" in table
    assert re.search(r"layer inputs +41,287,680 ", table)


def test_states_are_told_beside_the_cache_of_the_layers_that_attend(tmp_path: Path) -> None:
    sizes = {"vocab_size": 1000, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text", **sizes, **heads}))
    report = inspect_model("9B", load_config(tmp_path), 2**36, 16)
    assert (report.num_layers, report.num_kv_layers, report.num_kv_heads, report.head_size) == (32, 8, 4, 256)
    assert report.state_bytes == 24 * 4 * (3 * 8192 + 32 * 128 * 128)
    table = render(report)
    assert "\neach sequence keeps 50.2 MiB of states beside them, however long it is" in table
    assert re.search(r"\n  states +float32 +bfloat16", table)
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["gemma-4-E2B"][0]))
    assert "states" not in render(inspect_model("E2B", load_config(tmp_path), 2**34, 16))

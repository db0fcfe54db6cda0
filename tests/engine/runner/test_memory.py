"""The sizes of published models, what fits into how much memory, and how much of it is free."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.runner.memory import (
    available_memory_bytes,
    cache_capacity,
    group_format,
    held_weights,
    kv_bytes_per_token,
    linear_bytes,
    parameter_counts,
    plan_cache,
    weight_bytes,
    weight_type_of,
    weight_types,
)
from gptserve.weights.config import ModelConfig
from gptserve.weights.families import find_family
from gptserve.weights.families.family import RawConfig
from gptserve.weights.quantized.coded import CodeFormat
from tests.engine.model.small_shape import BLOCK_BYTES, MODEL
from tests.weights.families.known import KNOWN, gpt2, llama3

FREE = 100_000 * BLOCK_BYTES
GIB = 2**30


def read(fields: dict[str, Any]) -> ModelConfig:
    return find_family(fields["model_type"]).read_config(RawConfig(fields))


@pytest.mark.some(8)
@pytest.mark.parametrize("name", KNOWN)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    fields, published = KNOWN[name]

    assert sum(parameter_counts(read(fields)).values()) == published


def test_parameters_are_counted_by_part() -> None:
    counts = parameter_counts(read(gpt2(768, 12, 12)))

    assert counts["embedding"] == 50257 * 768
    assert counts["position"] == 1024 * 768
    assert counts["attention"] == 12 * (768 * 4 * 768 + 4 * 768)
    assert counts["norms"] == 25 * 2 * 768
    assert counts["head"] == 0


def test_int8_leaves_routers_and_embeddings() -> None:
    names = ["blocks.0.attn_out", "blocks.3.experts.1.ffn_up", "head", "blocks.3.router", "embed"]
    assert [weight_type_of(name, "int8", 12) for name in names] == ["int8", "int8", "int8", None, None]
    assert weight_type_of("blocks.11.ffn_down", None, 12) is None
    assert set(weight_types("int8")) == {"int8", None}
    assert weight_types(None) == (None,)


def test_int4_has_groups_in_4_and_5_bits_in_layers_and_in_6_or_8_bits_elsewhere() -> None:
    names = ["blocks.0.attn_out", "blocks.3.experts.1.ffn_up", "blocks.3.router", "head", "embed", "embed_in"]
    found = [weight_type_of(name, "int4", 12) for name in names]
    assert found == ["int5", "int4", None, "int6", None, "int8"]
    assert weight_type_of("blocks.11.qkv", "int4", 12) == "int5"
    assert [group_format("int6", width) for width in (512, 576)] == [
        CodeFormat(6, "scales", 16),
        CodeFormat(8, "scales"),
    ]
    assert [group_format("int5", width) for width in (512, 576)] == [
        CodeFormat(5, "scales and leasts", 32),
        CodeFormat(5, "scales and leasts"),
    ]
    assert set(weight_types("int4")) == {"int4", "int5", "int6", "int8", None}


@pytest.mark.parametrize("linear", ["ffn_down", "experts.3.ffn_down"])
def test_the_last_weights_of_feed_forwards_have_5_bits_in_the_first_and_the_last_layers(linear: str) -> None:
    def wide(num_layers: int) -> list[int]:
        types = [weight_type_of(f"blocks.{i}.{linear}", "int4", num_layers) for i in range(num_layers)]
        assert set(types) <= {"int4", "int5"}
        return [i for i, its in enumerate(types) if its == "int5"]

    assert wide(12) == [0, 1, 2, 8, 9, 10, 11]
    assert wide(16) == [0, 1, 2, 3, 11, 12, 13, 14, 15]
    assert wide(2) == []


def test_a_shape_of_1_billion_in_int4_takes_at_most_0_7_bytes_a_weight() -> None:
    model = read(llama3(2048, 16, 32, 8192) | {"tie_word_embeddings": True})
    held = list(held_weights(model, 2, "int4"))
    layers = [its for its in held if its.name.startswith("blocks.") and its.type is not None]
    num_in_layers = sum(parameter_counts(model)[part] for part in ("attention", "feed-forward"))
    assert sum(its.num_bytes for its in layers) <= 0.62 * num_in_layers
    assert sum(its.num_bytes for its in held) <= 0.7 * sum(parameter_counts(model).values())
    embedding, head = held[0], held[-1]
    assert (embedding.name, embedding.num_bytes) == ("embed.weight", 2048 * 128256 * 210 // 256)
    assert (head.name, head.type, head.num_bytes) == ("head.weight", "int6", 0)  # it is the embedding
    assert head.read_bytes == embedding.num_bytes
    assert linear_bytes(model, "int4", 2) == sum(its.num_bytes for its in (embedding, *layers))


def test_a_weight_in_int8_has_a_scale_for_32_codes_and_whole_groups() -> None:
    for width, padded in ((768, 768), (80, 96)):
        model = read(gpt2(width, 2, 2))
        products = 2 * (width * 3 + width + width * 4) * padded + 2 * width * width * 4 + 50257 * padded
        assert linear_bytes(model, "int8", 2) == products * 34 // 32
        rest = 1024 * width + sum(parameter_counts(model)[part] for part in ("norms",)) + 2 * 9 * width
        assert sum(weight_bytes(model, 2, "int8").values()) == products * 34 // 32 + 2 * rest


def test_untying_the_head_adds_one_embedding() -> None:
    counts = parameter_counts(read(gpt2(768, 12, 12) | {"tie_word_embeddings": False}))

    assert counts["head"] == counts["embedding"]


def test_kv_cache_of_a_7b_shape_is_one_gib_at_2048_tokens() -> None:
    shape = read(llama3(4096, 32, 32, 14336) | {"num_key_value_heads": 32})

    assert kv_bytes_per_token(shape, 2) * 2048 == 2**30


def test_grouped_heads_divide_the_kv_cache() -> None:
    assert kv_bytes_per_token(read(llama3(4096, 32, 32, 14336)), 2) == 128 * 1024


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_a_cache_in_int8_takes_at_most_57_percent_of_one_in_bf16(head_size: int) -> None:
    model = read(llama3(8 * head_size, 2, 8, 1024) | {"head_dim": head_size})

    assert kv_bytes_per_token(model, 1) <= 0.57 * kv_bytes_per_token(model, 2)
    assert kv_bytes_per_token(model, 1) == 2 * 2 * 8 * (head_size + 4)


def test_capacity_counts_whole_blocks_and_sequences_of_whole_blocks() -> None:
    model = read(gpt2(768, 12, 12))
    block_bytes = 16 * kv_bytes_per_token(model, 2)

    assert cache_capacity(model, 13 * block_bytes - 1, 2, block_size=16, max_model_len=33) == (12, 192, 4)


def test_nothing_fits_into_less_than_nothing() -> None:
    assert cache_capacity(read(gpt2(768, 12, 12)), -1, 2, 16, max_model_len=1024) == (0, 0, 0)


def plan(budget_bytes: int = FREE, **options: Any) -> tuple[int, int]:
    """Return the number of blocks and the longest sequence."""
    return plan_cache(EngineConfig(model_dir=Path(), **options), MODEL, 4, FREE, budget_bytes)


def test_bytes_are_turned_into_whole_blocks() -> None:
    assert plan(kv_cache_bytes=20 * BLOCK_BYTES + 1) == (20, 128)


def test_what_is_asked_for_is_taken_exactly_however_few_sequences_there_are() -> None:
    assert plan(kv_cache_bytes=1000 * BLOCK_BYTES, max_num_seqs=1) == (1000, 128)
    assert plan(num_blocks=1000, max_num_seqs=1) == (1000, 128)


def test_a_number_of_blocks_is_taken_as_given() -> None:
    assert plan(num_blocks=9, kv_cache_bytes=1) == (9, 128)


def test_by_default_there_are_two_contexts_for_each_sequence_if_they_fit_the_budget() -> None:
    assert plan(max_num_seqs=3) == (2 * 3 * 8, 128)
    assert plan(max_num_seqs=64, budget_bytes=40 * BLOCK_BYTES) == (40, 128)
    with pytest.raises(InvalidConfigurationError, match="too small"):
        plan(budget_bytes=0)


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"kv_cache_bytes": FREE + 1}, "kv_cache_bytes"), ({"num_blocks": 100_001}, "num_blocks 100001")],
)
def test_more_than_is_free_is_refused_with_both_numbers(options: dict[str, Any], asked: str) -> None:
    wanted = options.get("kv_cache_bytes", 100_001 * BLOCK_BYTES)
    with pytest.raises(InvalidConfigurationError) as caught:
        plan(**options)
    assert str(caught.value) == (
        f"{asked} asks for {wanted:,} bytes of KV cache, but only {FREE:,} bytes of memory are free"
    )
    assert plan(kv_cache_bytes=FREE) == (100_000, 128)


def test_a_context_that_does_not_fit_is_shortened_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(kv_cache_bytes=8 * BLOCK_BYTES) == (8, 128)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert plan(kv_cache_bytes=7 * BLOCK_BYTES) == (7, 112)
    assert "max_model_len is 112 tokens instead of the model's context of 128, because " in caplog.text
    assert plan(num_blocks=1) == (1, 16)
    with pytest.raises(InvalidConfigurationError, match="too small for one sequence"):
        plan(kv_cache_bytes=1)


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidConfigurationError) as caught:
        plan(max_model_len=128, kv_cache_bytes=7 * BLOCK_BYTES)
    assert str(caught.value) == (
        f"the KV cache is too small for one sequence of max_model_len 128: {7 * BLOCK_BYTES:,} bytes hold 7 blocks, "
        f"8 blocks of 16 tokens ({8 * BLOCK_BYTES:,} bytes) are needed; lower max_model_len to 112 or give the cache "
        "more memory"
    )
    assert plan(max_model_len=112, kv_cache_bytes=7 * BLOCK_BYTES) == (7, 112)
    with pytest.raises(InvalidConfigurationError, match=r"are needed; give the cache more memory$"):
        plan(max_model_len=128, kv_cache_bytes=1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def limit(root: Path, maximum: str, current: int, inactive_file: int, group: str = "", high: str = "max") -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{maximum}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def limit_v1(root: Path, group: str, maximum: int, current: int, inactive_file: int) -> None:
    folder = root / "sys/fs/cgroup/memory" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{maximum}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {inactive_file}\n")


def join_group(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def test_without_a_limit_it_is_the_machines(root: Path) -> None:
    assert available_memory_bytes(root) == 8 * GIB
    join_group(root, "0::/")
    limit(root, "max", 3 * GIB, 0)
    assert available_memory_bytes(root) == 8 * GIB


def test_a_container_has_what_its_limit_leaves_and_its_file_cache(root: Path) -> None:
    join_group(root, "0::/")
    limit(root, str(4 * GIB), 3 * GIB, GIB)
    assert available_memory_bytes(root) == 2 * GIB
    limit(root, str(64 * GIB), 3 * GIB, 0)
    assert available_memory_bytes(root) == 8 * GIB
    limit(root, "max", 3 * GIB, 0, high=str(5 * GIB))
    assert available_memory_bytes(root) == 2 * GIB


@pytest.mark.parametrize("group", ["", "system.slice", "system.slice/gptserve.service"])
def test_the_least_that_a_group_or_one_around_it_leaves_counts(root: Path, group: str) -> None:
    """As of a service of systemd with MemoryMax, or of a slice with one."""
    join_group(root, "0::/system.slice/gptserve.service")
    limit(root, "max", 9 * GIB, 0)
    limit(root, str(7 * GIB), GIB, 0, "system.slice/gptserve.service")
    limit(root, str(3 * GIB), 2 * GIB, 0, group)
    assert available_memory_bytes(root) == GIB


def test_a_group_of_version_1_counts_too(root: Path) -> None:
    join_group(root, "9:name=systemd:/", "4:cpu,memory:/docker/5", "0::/")
    limit_v1(root, "", 2**63 - 4096, 9 * GIB, 0)
    assert available_memory_bytes(root) == 8 * GIB
    limit_v1(root, "docker/5", 4 * GIB, 3 * GIB, GIB)
    assert available_memory_bytes(root) == 2 * GIB


def test_a_group_that_cannot_be_read_limits_nothing(root: Path) -> None:
    join_group(root, "0::/of/the/host")
    assert available_memory_bytes(root) == 8 * GIB


def test_this_machine_has_some() -> None:
    assert available_memory_bytes() > 0


def test_elsewhere_it_is_half_of_what_there_is(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) > 0

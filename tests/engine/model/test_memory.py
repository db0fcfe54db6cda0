"""The sizes of published models, from their config.json alone."""

from __future__ import annotations

from typing import Any

import pytest

from gptserve.engine.model.memory import CacheCapacity, cache_capacity, kv_bytes_per_token, parameter_counts
from gptserve.weights.config import ModelConfig
from gptserve.weights.families import find_family
from gptserve.weights.families.family import RawConfig
from tests.weights.families.known import KNOWN, gpt2, llama3


def read(fields: dict[str, Any]) -> ModelConfig:
    return find_family(fields["model_type"]).read_config(RawConfig(fields))


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


def test_untying_the_head_adds_one_embedding() -> None:
    counts = parameter_counts(read(gpt2(768, 12, 12) | {"tie_word_embeddings": False}))

    assert counts["head"] == counts["embedding"]


def test_kv_cache_of_a_7b_shape_is_one_gib_at_2048_tokens() -> None:
    shape = read(llama3(4096, 32, 32, 14336) | {"num_key_value_heads": 32})

    assert kv_bytes_per_token(shape, 2) * 2048 == 2**30


def test_grouped_heads_divide_the_kv_cache() -> None:
    assert kv_bytes_per_token(read(llama3(4096, 32, 32, 14336)), 2) == 128 * 1024


def test_capacity_counts_whole_blocks_and_sequences_of_whole_blocks() -> None:
    model = read(gpt2(768, 12, 12))
    block_bytes = 16 * kv_bytes_per_token(model, 2)

    assert cache_capacity(model, 13 * block_bytes - 1, 2, block_size=16, max_model_len=33) == CacheCapacity(
        num_blocks=12, num_tokens=192, num_full_sequences=4
    )


def test_nothing_fits_into_less_than_nothing() -> None:
    assert cache_capacity(read(gpt2(768, 12, 12)), -1, 2, 16, max_model_len=1024) == CacheCapacity(0, 0, 0)
